"""Ours and other libraries on the same equilibria: accuracy, gradients, steps, time and memory."""
