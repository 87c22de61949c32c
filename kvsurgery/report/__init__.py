"""Reports: results of evaluations, benchmarks and sweeps, as self-contained HTML pages and as pictures."""

from kvsurgery.report.comparing import write_comparison, write_sweep
from kvsurgery.report.section import card_files
from kvsurgery.report.writing import write_report

__all__ = ["card_files", "write_comparison", "write_report", "write_sweep"]
