from .memory import PeakMemory, kept_for_backward
from .options import SpectrumOptions
from .plots import plot_confusion, plot_curves, plot_dots, plot_values
from .registry import (
    AnalysisEntry,
    AnalysisResult,
    analysis_entry,
    list_analyses,
    register_analysis,
)
from .report import Report, to_png
from .spectrum import (
    LayerSpectrum,
    SpectrumResult,
    analyze_spectrum,
    layer_spectra,
    plot_spectra,
    spectrum_summary,
)

__all__ = [
    "AnalysisEntry",
    "AnalysisResult",
    "LayerSpectrum",
    "PeakMemory",
    "Report",
    "SpectrumOptions",
    "SpectrumResult",
    "analysis_entry",
    "analyze_spectrum",
    "kept_for_backward",
    "layer_spectra",
    "list_analyses",
    "plot_confusion",
    "plot_curves",
    "plot_dots",
    "plot_spectra",
    "plot_values",
    "register_analysis",
    "spectrum_summary",
    "to_png",
]
