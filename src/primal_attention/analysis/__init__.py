"""What a model costs and what it learned, and the page that shows it."""

from primal_attention.analysis.memory import PeakMemory, kept_for_backward
from primal_attention.analysis.report import Report, to_png

__all__ = ["PeakMemory", "Report", "kept_for_backward", "to_png"]
