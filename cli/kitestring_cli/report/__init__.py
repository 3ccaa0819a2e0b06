"""The report of a run."""

from kitestring_cli.report.page import write_report

__all__ = ["write_report"]
