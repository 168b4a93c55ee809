"""A report as one HTML file that needs nothing beside it, not even a network."""

from autotune.report.html.page import check, render, write
from autotune.report.html.predictions import PredictedPoint, read_predictions

__all__ = ["PredictedPoint", "check", "read_predictions", "render", "write"]
