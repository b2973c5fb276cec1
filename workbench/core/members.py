"""Losses and predictions of individual members, each on its own rows (cross-fitting) or all on the same rows (predictive distribution)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution as TorchDistribution

from ..distributions import Normal, StudentT
from ..distributions.base import Distribution
from ..distributions.mixture import Mixture
from ..distributions.parametric import Parametric
from ..engine.run import Branched
from ..engine.state import Path
from ..risk import Risk
from .additions import extra
from .calls.predict import plan_of, run
from .calls.risks import meanings_of, pair_of, reduced
from .calls.training_losses import loss_of_model
from .crossfit import Committee, committee_of
from .method import Call, split_heads
from .outputs.class_scores import Classes, Logits
from .outputs.meanings import Values
from .outputs.options import form_of
from .outputs.resolution import check_numbers
from .outputs.returned_distributions import mixture, with_moments
from .outputs.slips import listening, refuse_class_numbers, warn_unsaid
from .ownership import table_of
from .standardize import Scaling


def loss(
    wrapped: Any, criterion: Callable[[Any, Any], Tensor] | None, args: tuple, y: Any, rows: Tensor, whole: bool
) -> Tensor:
    """Return the voters' training losses, each on its own rows; their sum is the loss to minimize.

    Args:
        wrapped: wrapped object with voters.
        criterion: `criterion(prediction, target)`; None for the likelihood of the risk heads alone.
        args, y: rows of all voters, concatenated, in the model's units.
        rows: int64 [voters, n], row numbers of each voter.
        whole: whether each loss is a mean over the same number of rows, so that one call of the criterion covers all voters.

    Returns:
        The loss of each voter [voters]; with `whole` only their sum [1].
    """
    branched, _ = run(wrapped, plan_of(wrapped, Call(wrapped.training, True, dealt=True, loss=True), rows), args, {})
    record, pair = wrapped._workbench, pair_of(wrapped._workbench, branched.axes)
    refuse_class_numbers(wrapped, pair, y, branched.leaves, len(branched.axes))
    warn_unsaid(wrapped, criterion, y, branched.leaves, len(branched.axes))
    criterion = listening(wrapped, criterion, y)
    groups = [None] if whole else list(rows)
    losses: list[Any] = [0] * len(groups)
    for model_leaves in _models(branched, pair is not None):
        for i, group in enumerate(groups):
            leaves = [
                leaf if group is None or not isinstance(leaf, Tensor) else _take(leaf, group, pair)
                for leaf in model_leaves
            ]
            target = y if group is None else y.index_select(0, group.to(y.device))
            losses[i] = losses[i] + loss_of_model(record, branched.rebuild, leaves, criterion, target, pair)
    voters_each = len(rows) / len(groups)
    total = torch.stack(losses) * voters_each / _count(branched, pair is not None)
    for method in record.methods:
        if (term := method.regularizer(table_of(wrapped), record.rows)) is not None:
            total = total + voters_each * term
    return total


def _count(branched: Branched, paired: bool) -> int:
    sizes = next(leaf.shape[: len(branched.axes)] for leaf in branched.leaves if isinstance(leaf, Tensor))
    return int(torch.Size(sizes[:-1] if paired else sizes).numel())


def _models(branched: Branched, paired: bool) -> list[list[Any]]:
    """Return the output leaves of each combination of samples; with `paired`, the axis of the pair comes first."""
    depth = len(branched.axes) - paired
    return [
        [leaf.reshape(-1, *leaf.shape[depth:])[k] if isinstance(leaf, Tensor) else leaf for leaf in branched.leaves]
        for k in range(_count(branched, paired))
    ]


def _take(leaf: Tensor, rows: Tensor, pair: Any) -> Tensor:
    return leaf.index_select(0 if pair is None else 1, rows.to(leaf.device, non_blocking=True))


def answers(wrapped: Any, args: tuple, rows: Tensor) -> tuple[Any, Risk]:
    """Return predictions and risks of each voter on its own rows, in the order of the rows and in original units.

    Args:
        wrapped: wrapped object with voters; factors of cross-fitting are not applied.
        args: inputs of all voters, concatenated, in original units.
        rows: int64 [voters, n], row numbers of each voter.

    Returns:
        Pair (predictions, risks).
    """
    scaling = extra(wrapped, "scaling")
    if scaling is not None:
        args = scaling.inputs(args, {})[0]
    branched, _ = run(wrapped, plan_of(wrapped, Call(wrapped.training, True, dealt=True), rows), args, {})
    y, risks = reduced(wrapped, branched, True, scaling)
    return y, Risk(**risks)


def family(wrapped: Any) -> Distribution:
    """Return the distribution family of each member's targets: that of sculpt, or Student's t if cross-fitting found heavier tails.

    Normal without sculpt, or if sculpt's distribution has no density given a single risk (evidence, quantiles).
    """
    committee = committee_of(wrapped)
    if committee is not None and bool(committee.df.isfinite()):
        return StudentT(float(committee.df))
    families = (method.distribution for method in wrapped._workbench.methods)
    return next((f for f in families if isinstance(f, Distribution) and f.by_risk), Normal())


def predictive(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the predictive distribution; see `Wrapped.predictive`."""
    record, scaling, committee = wrapped._workbench, extra(wrapped, "scaling"), committee_of(wrapped)
    if form_of(record.output) == "detections":
        raise ValueError(
            "boxes have no predictive distribution: wrapped(x, return_risk=True) gives the spread of their corners"
        )
    if form_of(record.output) not in ("values", "several"):
        raise ValueError(
            f'output="{form_of(record.output)}" gives class probabilities, which are the predictive distribution: wrapped(x)'
        )
    if scaling is not None:
        args, kwargs = scaling.inputs(args, kwargs)
    branched, _ = run(wrapped, plan_of(wrapped, Call(wrapped.training, True)), args, kwargs)
    pair = pair_of(record, branched.axes)
    output = branched.rebuild(branched.leaves)
    if isinstance(output, TorchDistribution):
        with_moments(branched, lambda: pair)  # raises for distributions without moments
        if scaling is not None and scaling.y_mean is not None:
            raise ValueError(
                "the model returns distributions of standardized targets: train with targets in original units"
            )
        return mixture(output, len(branched.axes))
    if committee is None and (
        pair is None or (not isinstance(pair.distribution, Parametric) and not pair.distribution.by_risk)
    ):
        remedy = "compose with sculpt.Wrapper() and train with its likelihood"
        if pair is not None:
            remedy = (
                f"the heads are those of {type(pair.distribution).__name__}, which do not mix; wrapped.quantiles(x) gives the quantiles of "
                "quantile heads, and sculpt.Wrapper() with its default, Normal, has a distribution"
            )
        raise ValueError(
            f"no member predicts a distribution of its targets: {remedy}, or cross-fit with workbench.fit(..., folds=5); for intervals around "
            "any prediction use workbench.calibrate"
        )
    meanings = meanings_of(record, branched)
    mixtures = [
        _mixture(wrapped, branched.axes, leaf, pair, scaling, committee) if isinstance(meaning, Values) else None
        for leaf, meaning in zip(branched.leaves, meanings, strict=True)
    ]
    if all(mixture is None for mixture in mixtures):
        raise ValueError(
            "no output holds values: for class scores the prediction itself is the predictive distribution, wrapped(x)"
        )
    return branched.rebuild(mixtures)


def _mixture(
    wrapped: Any, axes: tuple[str, ...], leaf: Tensor, pair: Any, scaling: Scaling | None, committee: Committee | None
) -> Mixture:
    """Return the mixture of the distributions of all members for one output."""
    models = [axis for axis in axes if pair is None or axis != pair.name]
    if pair is None and leaf[(0,) * (len(models) + 1)].numel() > 1:
        raise ValueError(
            "cross-fitting without risk heads estimates one noise for all outputs, and the model has several: compose with sculpt.Wrapper()"
        )
    distribution = None if pair is None else pair.distribution
    if pair is None:
        loc, risk = leaf, torch.ones_like(leaf)
    elif isinstance(distribution, Parametric):
        loc, auxiliary = split_heads(leaf, axes.index(pair.name))
        risk = pair.risk_of(auxiliary)
        loc, risk = (
            (loc, risk) if scaling is None or scaling.y_mean is None else distribution.rescaled(loc, risk, scaling)
        )
    else:
        parts = pair.reduce({"y": leaf}, axes.index(pair.name))
        risk = parts["aleatoric"].sqrt()
        loc = parts["y"].to(risk.dtype)
    if scaling is not None and not isinstance(distribution, Parametric):
        loc, risk = scaling.prediction(loc), risk if pair is None else scaling.risk(risk)
    weights = torch.ones((), dtype=risk.dtype, device=risk.device)
    for i, axis in enumerate(models):
        counts = weights.new_full((loc.shape[i],), 1 / loc.shape[i])
        if committee is not None and axis == committee.axis:
            counts = committee.weights.to(weights)
            risk = committee.widened(risk, i)
        weights = weights[..., None] * counts
    weights, shape = weights.reshape(-1), loc.shape[len(models) :]
    loc = loc.reshape(len(weights), *shape)
    if isinstance(distribution, Parametric):
        return Mixture(distribution, loc, risk.reshape(len(risk), *loc.shape), weights)
    return Mixture(family(wrapped), loc, risk.reshape(loc.shape), weights)


def next_token_probabilities(
    wrapped: Any, args: tuple, kwargs: dict[str, Any], state: Sequence[Path]
) -> tuple[Any, Tensor]:
    """Return each member's probabilities of the next token, in one pass.

    Args:
        wrapped: language model whose only class scores are those of tokens, [rows, tokens, vocabulary].
        args, kwargs: its inputs.
        state: paths in its output that hold state passed from step to step.

    Returns:
        The model's output with the scores of the members' mean at the last position only, [rows, 1, vocabulary], and the probabilities
        [members, rows, vocabulary]. The scores are in float32 at least, where close tokens stay different, and logits have the mean level
        (logsumexp) of the members' own, which penalties of repeated tokens depend on.

    Raises:
        ValueError: if no output, or several, hold class scores.
    """
    record = wrapped._workbench
    plan = dataclasses.replace(plan_of(wrapped, Call(False, True)), state=tuple(state))
    branched, _ = run(wrapped, plan, args, kwargs)
    meanings = meanings_of(record, branched)
    places = [i for i, meaning in enumerate(meanings) if isinstance(meaning, Classes)]
    if len(places) != 1:
        raise ValueError(
            f"the model returns {len(places)} outputs of class scores, and there must be exactly one, the scores of tokens: wrap it with "
            "output={'logits': Logits(dim=-1)}, from workbench.outputs import Logits"
        )
    [place] = places
    meaning: Any = meanings[place]
    leaf, axes, pair = branched.leaves[place], branched.axes, pair_of(record, branched.axes)
    if leaf.dim() != len(axes) + 3 or getattr(meaning, "dim", None) != -1:
        raise ValueError(
            f"scores of tokens must be [rows, tokens, vocabulary], and the output is {meaning} of shape "
            f"{list(leaf.shape[len(axes) :])}: wrap the model with output={{'logits': Logits(dim=-1)}}, from workbench.outputs import Logits"
        )
    leaf = leaf[..., -1:, :]
    check_numbers(meaning, leaf, record.warned)
    if pair is None:
        probs = meaning.probabilities(leaf)
    else:
        leaf, heads = split_heads(leaf, axes.index(pair.name))
        probs = pair.probs(leaf, heads, meaning)
    n_axes = len(axes) - (pair is not None)
    probs = probs.flatten(0, n_axes - 1) if n_axes else probs[None]
    leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in branched.leaves]
    scores = meaning.form(probs.mean(0), meaning.log_scores(leaf))
    if isinstance(meaning, Logits):
        level = meaning.log_scores(leaf).logsumexp(-1, keepdim=True)
        scores = scores + (level.flatten(0, n_axes - 1).mean(0) if n_axes else level)
    leaves[place] = scores
    return branched.rebuild(leaves), probs[:, :, 0]
