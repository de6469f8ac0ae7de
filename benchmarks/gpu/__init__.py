"""Triton kernels and CUDA graphs; these need a CUDA device."""
