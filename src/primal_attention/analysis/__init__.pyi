from . import causes, counts, depth, flow, transport
from .attention_maps import (
    MapSpectrum,
    map_spectra,
    mass_at_rank,
    rank_for_mass,
    singular_values,
)
from .options import (
    CausesOptions,
    CountsOptions,
    DepthOptions,
    FlowOptions,
    SpectrumOptions,
    TransportOptions,
)
from .registry import (
    AnalysisEntry,
    AnalysisResult,
    analysis_entry,
    list_analyses,
    register_analysis,
)
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
    "CausesOptions",
    "CountsOptions",
    "DepthOptions",
    "FlowOptions",
    "LayerSpectrum",
    "MapSpectrum",
    "SpectrumOptions",
    "SpectrumResult",
    "TransportOptions",
    "analysis_entry",
    "analyze_spectrum",
    "causes",
    "counts",
    "depth",
    "flow",
    "layer_spectra",
    "list_analyses",
    "map_spectra",
    "mass_at_rank",
    "plot_spectra",
    "rank_for_mass",
    "register_analysis",
    "singular_values",
    "spectrum_summary",
    "transport",
]
