"""HTTP front door: picks a pair of workers, opens both legs of a request at once, streams the answer. No torch.

A request goes app → dispatch (request, in_flight) → client → workers' nodes → dispatch (logprobs, events) → client.
"""
