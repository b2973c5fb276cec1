"""Outputs that are distributions of torch: their means as prediction, their variances as aleatoric risk, and the mixture over branches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, MixtureSameFamily

from ...engine.run import Branched
from ...engine.tree import children, flatten, like
from .class_scores import at_least_float32

CLASSES = (
    "Bernoulli",
    "Categorical",
    "OneHotCategorical",
    "OneHotCategoricalStraightThrough",
    "Binomial",
    "Multinomial",
)


def distributions_in(tree: Any) -> list[Distribution]:
    """The distributions in an output."""
    if isinstance(tree, Distribution):
        return [tree]
    return [said for _, value in children(tree) or () for said in distributions_in(value)]


def with_moments(branched: Branched, method: Any = None) -> tuple[Branched, dict[int, Tensor]]:
    """The outputs of all branches with the means of distributions in their place, and the variances by the places of these leaves.

    Args:
        branched: the outputs; parameters have the axes of the run in front.
        method: of risk heads beside the model, which has nothing to say where the model says its own distribution.

    Raises:
        ValueError: if a distribution has no mean or variance, is one of classes, or has risk heads beside it.
    """
    tree = branched.rebuild(branched.leaves)
    said = distributions_in(tree)
    if not said:
        return branched, {}
    for distribution in said:
        _check(distribution, method)
    variances = {id(d): at_least_float32(d.variance) for d in said}
    means = {id(d): at_least_float32(d.mean) for d in said}
    marks: dict[int, int] = {}

    def replaced(node: Any) -> Any:
        if isinstance(node, Distribution):
            marks[id(means[id(node)])] = id(node)
            return means[id(node)]
        parts = children(node)
        return node if parts is None else like(node, [replaced(value) for _, value in parts])

    leaves, rebuild = flatten(replaced(tree))
    at = {i: variances[marks[id(leaf)]] for i, leaf in enumerate(leaves) if id(leaf) in marks}
    return Branched(branched.axes, leaves, rebuild), at


def _check(distribution: Distribution, method: Any) -> None:
    name = type(distribution).__name__
    if name in CLASSES:
        raise ValueError(
            f'the model gives a distribution of classes, {name}: return its logits, and wrap with output="logits" (or "binary")'
        )
    if method is not None:
        raise ValueError(
            f"{method.name}: the model gives a distribution, {name}, which says the noise already, and a risk head would say it again: leave "
            f"{method.name} out, or return the mean"
        )
    try:
        moments = distribution.mean, distribution.variance
    except NotImplementedError as error:
        raise ValueError(
            f"the model gives a {name}, which has no mean or variance in closed form: return samples or moments"
        ) from error
    if any(bool(moment.isnan().all()) for moment in moments if moment.numel() and moment.device.type == "cpu"):
        raise ValueError(
            f"the model gives a {name}, whose mean or variance does not exist: return its location and scale"
        )


def nll(said: Any, target: Any) -> Tensor:
    """The mean negative log-likelihood of targets under the distribution that a model gives.

    Raises:
        TypeError: if it gives several outputs.
        ValueError: if targets have another shape.
    """
    if not isinstance(said, Distribution):
        raise TypeError(
            "criterion: the model gives several outputs, one of them a distribution; give criterion(prediction, target)"
        )
    shape = said.batch_shape + said.event_shape
    if target.shape != shape:
        raise ValueError(
            f"y: targets are {list(target.shape)}, but the distribution is of {list(shape)}; they must have one shape"
        )
    support: Any = said.support
    if not bool(support.check(target).all()):
        raise ValueError(f"y: there are targets outside of the support of {type(said).__name__}, {support}")
    return -said.log_prob(target).mean()


def mixture(distribution: Distribution, depth: int) -> Distribution:
    """The mixture over equally likely branches, whose axes are the first of the batch shape.

    Args:
        distribution: batch shape [*branches, ...].
        depth: how many axes there are.
    """
    if not depth:
        return distribution
    place = len(distribution.batch_shape) - depth
    leaves, rebuild = flatten(distribution)
    parts = rebuild(
        [leaf.flatten(0, depth - 1).movedim(0, place) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    )
    count = math.prod(distribution.batch_shape[:depth])
    weights = torch.zeros(
        (*parts.batch_shape[:-1], count), device=next(t for t in leaves if isinstance(t, Tensor)).device
    )
    return MixtureSameFamily(Categorical(logits=weights), parts, validate_args=False)


__all__ = ["distributions_in", "mixture", "nll", "with_moments"]
