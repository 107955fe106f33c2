from .maps import LayerTransport, TransportResult, analyze_transport, layer_transport
from .metrics import (
    MapMetrics,
    PathMetrics,
    RootMetrics,
    map_metrics,
    path_metrics,
    root_metrics,
)
from .plots import plot_map, plot_metrics, plot_paths
from .recorder import PathResult, TransportRecorder

__all__ = [
    "LayerTransport",
    "MapMetrics",
    "PathMetrics",
    "PathResult",
    "RootMetrics",
    "TransportRecorder",
    "TransportResult",
    "analyze_transport",
    "layer_transport",
    "map_metrics",
    "path_metrics",
    "plot_map",
    "plot_metrics",
    "plot_paths",
    "root_metrics",
]
