"""The report: pages, tables and figures made from records alone."""

from wellposed_lab.report.page import write_report

__all__ = ["write_report"]
