"""OpenAI's endpoints of a node: bodies become /generate bodies, answers become OpenAI's objects."""
