"""The engine on a CUDA device: batches, model, graphs and launches over the kernels of `engine/kernels`."""
