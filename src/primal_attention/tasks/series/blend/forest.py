"""Extremely randomised trees as arrays: scikit-learn grows them, safetensors can hold them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from primal_attention.support.command import UserError

__all__ = ["Forest", "ForestSizes"]


@dataclass(frozen=True)
class ForestSizes:
    """Sizes of the arrays of a :class:`Forest`."""

    trees: int
    """Number of trees."""
    nodes: int
    """Nodes of all trees, those with a question and the leaves."""
    leaves: int
    """Leaves of all trees."""


class Forest(nn.Module):
    """The mean answer of many trees.

    A node asks whether a feature is at most a threshold. Time of a prediction
    ``O(cases · trees · depth)``.

    Args:
        sizes: Sizes of the arrays.
        outputs: Numbers that a leaf answers with.
    """

    feature: torch.Tensor
    threshold: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    root: torch.Tensor
    answer: torch.Tensor

    def __init__(self, sizes: ForestSizes, outputs: int) -> None:
        super().__init__()
        self.sizes = sizes
        for name in ("feature", "left", "right"):
            self.register_buffer(name, torch.zeros(sizes.nodes, dtype=torch.int32))
        self.register_buffer("threshold", torch.zeros(sizes.nodes))
        self.register_buffer("root", torch.zeros(sizes.trees, dtype=torch.int32))
        self.register_buffer("answer", torch.zeros(sizes.leaves, outputs))

    @classmethod
    def from_sklearn(cls, forest: Any, outputs: int = 1) -> "Forest":
        """Return the trees of a fitted classifier or regressor of scikit-learn.

        Args:
            forest: Its classes, if it has any, are whole numbers below ``outputs``.
            outputs: Number of classes, those without a training case included, or one.
        """
        trees = [estimator.tree_ for estimator in forest.estimators_]
        start = np.cumsum([0, *(tree.node_count for tree in trees)])
        feature = np.concatenate([tree.feature for tree in trees])
        is_leaf = feature < 0
        # for float32 values, x <= t is the same as x <= t rounded down to float32
        exact = np.concatenate([tree.threshold for tree in trees])
        threshold = exact.astype(np.float32)
        threshold = np.where(threshold > exact, np.nextafter(threshold, -np.inf), threshold)
        left, right = (
            np.concatenate([getattr(t, side) + s for t, s in zip(trees, start, strict=False)])
            for side in ("children_left", "children_right")
        )
        answer = np.zeros((int(is_leaf.sum()), outputs))
        known = getattr(forest, "classes_", [0])
        answer[:, known] = np.concatenate([tree.value[:, 0] for tree in trees])[is_leaf]
        leaf = np.cumsum(is_leaf) - 1
        made = cls(ForestSizes(len(trees), len(feature), len(answer)), outputs)
        arrays = {
            "feature": np.where(is_leaf, -1, feature),
            "threshold": np.where(is_leaf, 0, threshold),
            "left": np.where(is_leaf, leaf, left),  # a leaf stores its row of answers
            "right": np.where(is_leaf, leaf, right),
            "root": start[:-1],
            "answer": answer,
        }
        for name, array in arrays.items():
            buffer = getattr(made, name)
            setattr(made, name, torch.from_numpy(array).to(buffer.dtype))
        return made

    def forward(self, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the mean answer to every row of features, ``[cases, outputs]``."""
        feature, threshold = self.feature.numpy(), self.threshold.numpy()
        left, right = self.left.numpy(), self.right.numpy()
        self._check_arrays(x.shape[1])
        case = np.repeat(np.arange(len(x)), self.sizes.trees)
        node = np.tile(self.root.numpy(), len(x))
        leaf = np.zeros_like(node)
        place = np.arange(len(node))
        while True:  # children come after their parents, so every walk ends
            asked = feature[node]
            done = asked < 0
            leaf[place[done]] = left[node[done]]
            going = ~done
            if not going.any():
                break
            case, node, place, asked = case[going], node[going], place[going], asked[going]
            node = np.where(x[case, asked] <= threshold[node], left[node], right[node])
        answers = self.answer.numpy()[leaf].reshape(len(x), self.sizes.trees, self.answer.shape[1])
        mean: NDArray[np.float64] = answers.mean(1, dtype=np.float64)
        return mean

    def _check_arrays(self, features: int) -> None:
        """Raise if an array points outside another, or a walk would not end."""
        node = np.arange(self.sizes.nodes)
        feature, left, right = self.feature.numpy(), self.left.numpy(), self.right.numpy()
        root = self.root.numpy()
        is_leaf = feature < 0
        is_sound = (left > node) & (right > node) & (left < len(node)) & (right < len(node))
        is_answer = (left >= 0) & (left < self.sizes.leaves)
        if not (
            np.where(is_leaf, is_answer, is_sound).all()
            and (feature < features).all()
            and ((root >= 0) & (root < len(node))).all()
        ):
            raise UserError(
                f"the trees of the model do not belong to cases of {features} features; its file "
                "is damaged."
            )
