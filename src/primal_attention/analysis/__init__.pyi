from .attention_maps import (
    MapSpectrum,
    layer_inputs,
    map_spectra,
    mass_at_rank,
    rank_for_mass,
    singular_values,
)
from .cost import Cost, compare_costs
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
    "Cost",
    "LayerSpectrum",
    "MapSpectrum",
    "PeakMemory",
    "Report",
    "SpectrumOptions",
    "SpectrumResult",
    "analysis_entry",
    "analyze_spectrum",
    "compare_costs",
    "kept_for_backward",
    "layer_inputs",
    "layer_spectra",
    "list_analyses",
    "map_spectra",
    "mass_at_rank",
    "plot_confusion",
    "plot_curves",
    "plot_dots",
    "plot_spectra",
    "plot_values",
    "rank_for_mass",
    "register_analysis",
    "singular_values",
    "spectrum_summary",
    "to_png",
]
