"""Benchmarks: ratios measured in one run, with a table and a JSON file."""
