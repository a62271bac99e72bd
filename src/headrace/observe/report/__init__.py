"""The HTML report of a run: one file, no scripts, nothing fetched, readable in ten years."""

from headrace.observe.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]
