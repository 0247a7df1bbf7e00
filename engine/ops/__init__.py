"""Kernels of the engine in plain torch, each with a slow twin (`*_ref`) that says what it computes."""
