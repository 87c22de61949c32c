"""The report: what an evaluation and a benchmark found, as one page that needs no network, and as pictures."""

from kvsurgery.report.section import card_files
from kvsurgery.report.writing import write_report

__all__ = ["card_files", "write_report"]
