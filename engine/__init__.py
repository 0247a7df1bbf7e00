"""Compute: models, kernels, state pools, scheduling, sampling. Knows no HTTP and no transfer."""
