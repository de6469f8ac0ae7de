"""The report: one HTML page made from records alone."""

from wellposed.experiments.report.page import write_report

__all__ = ["write_report"]
