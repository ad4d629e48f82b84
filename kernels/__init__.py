"""Triton kernels on torch tensors for the sampler's side: expert routing and KV pages. Imports nothing of this project."""
