"""The suites: one file for each group of claims."""
