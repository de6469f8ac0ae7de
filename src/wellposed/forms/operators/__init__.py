"""A, B, C and D as operators: what one offers (`base`), the kinds, and bounds on their entries."""
