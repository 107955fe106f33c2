"""What a model costs and what it learned, and the page that shows it."""

from primal_attention.analysis.memory import PeakMemory, kept_for_backward
from primal_attention.analysis.plots import plot_confusion, plot_curves, plot_values
from primal_attention.analysis.report import Report, to_png
from primal_attention.analysis.spectrum import (
    LayerSpectrum,
    layer_spectra,
    plot_spectra,
    spectrum_summary,
)

__all__ = [
    "LayerSpectrum",
    "PeakMemory",
    "Report",
    "kept_for_backward",
    "layer_spectra",
    "plot_confusion",
    "plot_curves",
    "plot_spectra",
    "plot_values",
    "spectrum_summary",
    "to_png",
]
