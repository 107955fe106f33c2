from .ablation import BlindScore, blind_scores, replace_modality
from .adapters import Layout, find_layout, special_token_ids
from .analyze import analyze_flow
from .coattention import CoAttention, Member
from .contribution import ScoreParts, contribution_shares, split_scores
from .layers import GivenLayer, SignedWeightsError
from .metric import modality_flow
from .plots import plot_directions, plot_flow
from .primal import DirectionShares, block_energy, direction_shares
from .result import FlowResult, PrimalFlow
from .shares import SampleFlow, average_shares, membership
from .sources import FlowDetails

__all__ = [
    "BlindScore",
    "CoAttention",
    "DirectionShares",
    "FlowDetails",
    "FlowResult",
    "GivenLayer",
    "Layout",
    "Member",
    "PrimalFlow",
    "SampleFlow",
    "ScoreParts",
    "SignedWeightsError",
    "analyze_flow",
    "average_shares",
    "blind_scores",
    "block_energy",
    "contribution_shares",
    "direction_shares",
    "find_layout",
    "membership",
    "modality_flow",
    "plot_directions",
    "plot_flow",
    "replace_modality",
    "special_token_ids",
    "split_scores",
]
