from .cards import Card, add_cards
from .page import Report, to_png
from .plots import plot_confusion, plot_curves, plot_dots, plot_values

__all__ = [
    "Card",
    "Report",
    "add_cards",
    "plot_confusion",
    "plot_curves",
    "plot_dots",
    "plot_values",
    "to_png",
]
