"""Runs, their records, and reports made from the records."""
