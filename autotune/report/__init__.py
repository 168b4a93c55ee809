"""Summaries of a search as plain data, and their rendering."""

from autotune.report.compare import Gain
from autotune.report.model import Report
from autotune.report.trial import Trial

__all__ = ["Gain", "Report", "Trial"]
