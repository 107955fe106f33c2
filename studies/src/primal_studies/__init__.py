"""The studies of this package, for `primal bench`, `primal repro` and `primal demo`.

The entry point ``primal.studies`` leads here. A module is imported when its study is used.
"""

from typing import Literal

from primal_attention.tasks.study import StudyEntry

__all__ = ["STUDIES"]

_TABLE: tuple[tuple[str, Literal["bench", "repro", "demo"], str, str], ...] = (
    ("uea", "repro", "series.uea:TableOne", "Table 1: accuracy on the UEA sets"),
    ("uea-ablation", "repro", "series.uea:Ablation", "one change at a time on UEA sets"),
    ("uea-trainings", "repro", "series.uea:Trainings", "the training of Table 1"),
    (
        "series",
        "repro",
        "series.study:SeriesPeers",
        "our time-series classifier beside those of aeon on UCR sets",
    ),
    (
        "series-damage",
        "repro",
        "series.damage:SeriesDamage",
        "what unequal lengths and missing values cost time-series classifiers",
    ),
    (
        "series-parts",
        "repro",
        "series.parts:SeriesParts",
        "what each part of our time-series classifier gains",
    ),
    (
        "series-long",
        "bench",
        "series.long:SeriesLong",
        "memory and time of time-series classifiers on long series",
    ),
    (
        "longrange-accuracy",
        "repro",
        "longrange.accuracy:Accuracy",
        "Long Range Arena: accuracy at equal processor time or equal steps",
    ),
    (
        "events",
        "repro",
        "events.study:TimeCodes",
        "time codes on StackOverflow badges (Xu et al. 2019)",
    ),
    (
        "events-peers",
        "repro",
        "events.peer_study:Peers",
        "next events: ours beside RMTPP, THP and AttNHP",
    ),
    (
        "events-planted",
        "repro",
        "events.planted:Planted",
        "periods, decays and likelihoods of processes that are known",
    ),
    (
        "tables",
        "repro",
        "tables.study:Tables",
        "attention between rows beside trees and boosting on small tables",
    ),
    (
        "ot-accuracy",
        "repro",
        "tables.aligned:AlignedAccuracy",
        "classes aligned by transport: accuracy and geometry",
    ),
    (
        "tables-probes",
        "repro",
        "tables.probes:Probes",
        "which attention between rows looks up duplicates",
    ),
    (
        "ot-clouds",
        "repro",
        "tables.clouds:CloudPaths",
        "how training moves clouds of points: coded and corrected metrics",
    ),
    (
        "pairs-mechanism",
        "repro",
        "pairs.mechanism:Mechanism",
        "parsers and masked features in a vision-language model (Xue et al. 2021)",
    ),
    (
        "pairs-emoji",
        "repro",
        "pairs.emoji:EmojiStudy",
        "finding emoji by their names in a style that was never seen",
    ),
    (
        "rerank",
        "repro",
        "lists.study:RerankStudy",
        "re-ranking on objects and palms that no method saw, and after transfer",
    ),
    (
        "rerank-pretrained",
        "bench",
        "lists.pretrained:RerankPretrainedStudy",
        "the re-ranker of the package on data that it never saw",
    ),
    (
        "rerank-cost",
        "bench",
        "lists.cost:RerankCostStudy",
        "time and memory of re-ranking a list, dual-tied and softmax, over its length",
    ),
    (
        "tables-corruption",
        "repro",
        "tables.corruption:Corruption",
        "what predictions on small tables take from other rows",
    ),
    (
        "tables-scale",
        "repro",
        "tables.scale:Scale",
        "primal attention between 100,000 rows: time, memory, streaming",
    ),
    (
        "counts",
        "repro",
        "counts.study:CountsStudy",
        "attention from the counts of a corpus, and what trained heads know of them",
    ),
    (
        "corpus-init",
        "repro",
        "counts.corpus_init:CorpusInitStudy",
        "learning curves of primal layers that start at the counts of a corpus",
    ),
    ("relative", "repro", "core.relative:RelativeStudy", "relative positions (Luo et al. 2021)"),
    (
        "schoenbat-kernels",
        "repro",
        "core.schoenbat_kernels:KernelStudy",
        "four kernels of SchoenbAt (Guo et al. 2025)",
    ),
    (
        "skyformer-trained",
        "repro",
        "core.skyformer_trained:TrainedStudy",
        "low-rank attention on trained models (Chen et al. 2021)",
    ),
    (
        "causal-text",
        "repro",
        "causes.text:TextStudy",
        "explanations of a sentiment classifier: causal graphs beside fair baselines",
    ),
    (
        "causal-recommend",
        "repro",
        "causes.recommend:RecommendStudy",
        "explanations of recommended films: size and specificity, by method",
    ),
    ("demo", "demo", "demo.study:DemoStudy", "what primal attention is for, in three minutes"),
    ("layers", "bench", "core.layers:LayerStudy", "time and memory of attentions over length"),
    ("family", "bench", "core.family:FamilyStudy", "time, memory and error of every attention"),
    ("peers", "bench", "core.peers:PeerStudy", "our layers beside the public packages"),
    (
        "longrange-cost",
        "bench",
        "longrange.cost:CostStudy",
        "a training step on the shapes of Long Range Arena",
    ),
    (
        "instability",
        "bench",
        "core.instability:InstabilityStudy",
        "how far outputs move when parameters move",
    ),
    (
        "approximation",
        "bench",
        "core.approximation:ApproximationStudy",
        "error of random features in attention",
    ),
    (
        "kernel-convergence",
        "bench",
        "core.kernel_convergence:ConvergenceStudy",
        "error of random features by their number",
    ),
    ("nystrom", "bench", "core.nystrom:NystromStudy", "error of landmarks"),
    ("toeplitz", "bench", "core.toeplitz:ToeplitzStudy", "error of sums weighted by distance"),
    ("time", "bench", "core.time_cost:TimeCostStudy", "what times cost in attention"),
    (
        "flow-cost",
        "bench",
        "flow.cost:FlowCostStudy",
        "flow between modalities in a primal layer: time and memory",
    ),
    (
        "causal-cost",
        "bench",
        "causes.cost:CausalCostStudy",
        "partial correlations between tokens: hat matrix and inverse",
    ),
    ("ksvd", "bench", "core.ksvd:SolverStudy", "solvers of the asymmetric kernel SVD"),
    ("ksvd-loss", "bench", "core.ksvd_loss:LossStudy", "what the published KSVD loss does"),
    (
        "depth-sweep",
        "bench",
        "depth.sweep:DepthSweepStudy",
        "loss by depth at equal size, beside the rule",
    ),
    (
        "depth-teacher",
        "bench",
        "depth.teacher:DepthTeacherStudy",
        "one wide layer that learns two narrow ones, an illustration",
    ),
    ("surgery-minilm", "bench", "surgery.models:MinilmStudy", "a sentence encoder, converted"),
    ("surgery-smollm2", "bench", "surgery.models:Smollm2Study", "a language model, converted"),
    (
        "hybrid",
        "repro",
        "surgery.hybrid:Hybrid",
        "a language model with a memory of constant size, and its linear part off",
    ),
    (
        "adaptive",
        "repro",
        "surgery.adaptive:AdaptiveStudy",
        "trained models that read a part of the keys: quality against share read",
    ),
    (
        "adaptive-cost",
        "bench",
        "core.adaptive_cost:AdaptiveCostStudy",
        "time and memory of adaptive attention beside fused softmax",
    ),
    (
        "long-documents",
        "repro",
        "surgery.long_documents:LongDocuments",
        "one vector for a long document: whole or in pieces, cost and quality",
    ),
)

STUDIES = {
    name: StudyEntry(f"primal_studies.{where}", group, summary)
    for name, group, where, summary in _TABLE
}
"""All studies by name."""
