"""Kernels compiled by numba. Only what `require` imports on first use may import these modules."""
