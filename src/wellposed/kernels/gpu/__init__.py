"""Kernels written in Triton. Only what `require` imports on first use may import these modules."""
