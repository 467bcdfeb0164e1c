"""Paged attention and the operators of a decoder: a reference in PyTorch, C for CPUs, Triton for GPUs."""
