"""Attention layers with one interface, by class or by name."""

from primal_attention.attention.adaptive import AdaptiveAttention, NeglectedMass
from primal_attention.attention.base import Attention, Aux, Capabilities, State
from primal_attention.attention.cosformer import CosformerAttention
from primal_attention.attention.create import create_attention
from primal_attention.attention.distributional import DistributionalTokenAttention
from primal_attention.attention.documents import document_ids_of
from primal_attention.attention.favor import FavorAttention
from primal_attention.attention.features import FeatureCore, KernelCore
from primal_attention.attention.flow import FlowAttention
from primal_attention.attention.gap import MongeGapTerm
from primal_attention.attention.gaussian import GaussianAttention
from primal_attention.attention.kernelized import KernelizedAttention
from primal_attention.attention.linear import LinearAttention
from primal_attention.attention.linformer import LinformerAttention
from primal_attention.attention.multihead import Core, FixedCoreAttention, MultiHeadAttention
from primal_attention.attention.nystromformer import NystromformerAttention
from primal_attention.attention.primal import Diagnostics, PrimalAttention, merge_memories
from primal_attention.attention.primal_relative import PrimalRelativeAttention
from primal_attention.attention.registry import (
    attention_entry,
    list_attentions,
    register_attention,
)
from primal_attention.attention.rotary import Rotary
from primal_attention.attention.schoenbat import SchoenbatAttention
from primal_attention.attention.skyformer import NystromDiagnostics, SkyformerAttention
from primal_attention.attention.softmax import ExplicitSoftmaxAttention, SoftmaxAttention
from primal_attention.attention.sparse import SparseAttention
from primal_attention.attention.terms import PublishesTerms, ksvd_loss, ksvd_terms
from primal_attention.attention.tied import TiedSoftmaxAttention
from primal_attention.attention.time import TimeAttention, TimeOptions
from primal_attention.attention.transport import TransportAttention
from primal_attention.attention.windowed import WindowedAttention

__all__ = [
    "AdaptiveAttention",
    "Attention",
    "Aux",
    "Capabilities",
    "Core",
    "CosformerAttention",
    "Diagnostics",
    "DistributionalTokenAttention",
    "ExplicitSoftmaxAttention",
    "FavorAttention",
    "FeatureCore",
    "FixedCoreAttention",
    "FlowAttention",
    "GaussianAttention",
    "KernelCore",
    "KernelizedAttention",
    "LinearAttention",
    "LinformerAttention",
    "MongeGapTerm",
    "MultiHeadAttention",
    "NeglectedMass",
    "NystromDiagnostics",
    "NystromformerAttention",
    "PrimalAttention",
    "PrimalRelativeAttention",
    "PublishesTerms",
    "Rotary",
    "SchoenbatAttention",
    "SkyformerAttention",
    "SoftmaxAttention",
    "SparseAttention",
    "State",
    "TiedSoftmaxAttention",
    "TimeAttention",
    "TimeOptions",
    "TransportAttention",
    "WindowedAttention",
    "attention_entry",
    "create_attention",
    "document_ids_of",
    "ksvd_loss",
    "ksvd_terms",
    "list_attentions",
    "merge_memories",
    "register_attention",
]
