"""Triton kernels of the engine on CUDA. Each has a twin in plain torch in `engine/ops`, to be compared with.

Everything here works on CUDA tensors, or on CPU tensors when Triton interprets (TRITON_INTERPRET=1, for tests).
"""
