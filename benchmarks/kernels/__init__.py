"""Compiled kernels on one CPU thread: the affine layer, sequences, sparse matrices, training."""
