"""Outputs that are torch distributions: their means as prediction, variances as aleatoric risk, and mixtures over branches."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    """Return the distributions in an output, in order."""
    if isinstance(tree, Distribution):
        return [tree]
    return [distribution for _, value in children(tree) or () for distribution in distributions_in(value)]


def _at_least_float32(distribution: Distribution) -> Distribution:
    """Return the distribution with parameters in float32 at least: squares of standard deviations leave the range of float16."""
    leaves, rebuild = flatten(distribution)
    wide = [
        at_least_float32(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves
    ]
    return distribution if all(a is b for a, b in zip(leaves, wide, strict=True)) else rebuild(wide)


def with_moments(branched: Branched, method: Callable[[], Any] = lambda: None) -> tuple[Branched, dict[int, Tensor]]:
    """Replace distributions in the outputs of all branches by their means, and return the variances.

    Args:
        branched: the outputs; parameters of distributions have the axes of the run as leading dimensions.
        method: returns the method with risk heads, which is not allowed with distributions, None if there is none.

    Returns:
        The outputs with means, and {position of a leaf: variance}.

    Raises:
        ValueError: if a distribution has no mean or variance, is over classes, or the model also has risk heads.
    """
    tree = branched.rebuild(branched.leaves)
    distributions = [] if type(tree) is Tensor else distributions_in(tree)
    if not distributions:
        return branched, {}
    for distribution in distributions:
        _check(distribution, method())
    wide = {id(d): _at_least_float32(d) for d in distributions}
    variances = {key: at_least_float32(d.variance) for key, d in wide.items()}
    means = {key: at_least_float32(d.mean) for key, d in wide.items()}
    owner_of_mean: dict[int, int] = {}

    def replaced(node: Any) -> Any:
        if isinstance(node, Distribution):
            owner_of_mean[id(means[id(node)])] = id(node)
            return means[id(node)]
        parts = children(node)
        return node if parts is None else like(node, [replaced(value) for _, value in parts])

    leaves, rebuild = flatten(replaced(tree))
    variance_at = {i: variances[owner_of_mean[id(leaf)]] for i, leaf in enumerate(leaves) if id(leaf) in owner_of_mean}
    return Branched(branched.axes, leaves, rebuild), variance_at


def _check(distribution: Distribution, method: Any) -> None:
    name = type(distribution).__name__
    if name in CLASSES:
        raise ValueError(
            f'the model returns a distribution of classes, {name}: return its logits, and wrap with output="logits" (or "binary")'
        )
    if method is not None:
        raise ValueError(
            f"{method.name}: the model returns a distribution, {name}, which already describes the noise that a risk head would predict: leave "
            f"{method.name} out, or return the mean"
        )
    try:
        moments = distribution.mean, distribution.variance
    except NotImplementedError as error:
        raise ValueError(
            f"the model returns a {name}, which has no mean or variance in closed form: return samples or "
            "moments, or let forward take the values and return their log-probability"
        ) from error
    if any(bool(moment.isnan().all()) for moment in moments if moment.numel() and moment.device.type == "cpu"):
        raise ValueError(
            f"the model returns a {name}, whose mean or variance does not exist: return its location and scale"
        )


def nll(distribution: Any, target: Any) -> Tensor:
    """Return the mean negative log-likelihood of targets under the distribution that a model returns.

    Raises:
        TypeError: if the model returns several outputs.
        ValueError: if targets have another shape, or lie outside of the support.
    """
    if not isinstance(distribution, Distribution):
        raise TypeError(
            "criterion: the model returns several outputs, one of them a distribution; give criterion(prediction, target)"
        )
    shape = distribution.batch_shape + distribution.event_shape
    if target.shape != shape:
        raise ValueError(
            f"y: targets have shape {list(target.shape)}, but the distribution {list(shape)}; both must have the same shape"
        )
    support: Any = distribution.support
    if not bool(support.check(target).all()):
        raise ValueError(f"y: there are targets outside of the support of {type(distribution).__name__}, {support}")
    return -_at_least_float32(distribution).log_prob(target).mean()


def mixture(distribution: Distribution, depth: int) -> Distribution:
    """Return the mixture over equally likely branches.

    Args:
        distribution: distribution with batch shape [*branches, ...].
        depth: number of leading axes of branches.
    """
    distribution = _at_least_float32(distribution)
    if not depth:
        return distribution
    mixture_dim = len(distribution.batch_shape) - depth
    leaves, rebuild = flatten(distribution)
    parts = rebuild(
        [leaf.flatten(0, depth - 1).movedim(0, mixture_dim) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    )
    count = math.prod(distribution.batch_shape[:depth])
    weights = torch.zeros(
        (*parts.batch_shape[:-1], count), device=next(t for t in leaves if isinstance(t, Tensor)).device
    )
    return MixtureSameFamily(Categorical(logits=weights), parts, validate_args=False)


__all__ = ["distributions_in", "mixture", "nll", "with_moments"]
