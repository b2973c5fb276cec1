"""Randomized prior functions: outputs of untrained models, added to the output of each voter (Osband et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.clone import is_scripted
from ..engine.effects.inputs import own_inputs
from ..engine.effects.random import values_unavailable, were_drawn
from ..engine.plan import Axis, Bank, Index, Intervention, Plan, Rule, Shared, Stacked
from ..engine.request import Receiver
from ..engine.results import Result
from ..engine.run import Branched
from ..engine.tree import flatten, map_tensors, names
from ..introspect.ends import ends_of
from .additions import EXTRAS, add_extra, extra
from .calls.risks import meanings_of
from .method import evaluating
from .outputs.class_scores import Binary, Classes, Logits
from .outputs.meanings import Meaning, Values
from .outputs.options import has_detections, meaning_of
from .ownership import engine_of, table_of
from .single_warnings import warn_once

NAME = "prior"


_TAKEN = frozenset([*dir(nn.Module()), "scale", "axis", "drawn", "shared", "left_out", "rules", "value", "of_branch"])


class Prior(nn.Module):
    """Tensors of untrained models, as buffers, so that no optimizer trains them.

    Args:
        scale: factor of their outputs.
        axis: name of the axis whose branches have one untrained model each.
        drawn: slot -> randomly initialized tensors of all branches, [branches, ...].
        shared: slot -> tensor that is the same in all branches.
        left_out: name -> why, of the outputs to which no prior is added.
    """

    left_out: Mapping[str, str] = MappingProxyType({})  # also of priors that an earlier version has pickled

    def __init__(
        self,
        scale: float,
        axis: str,
        drawn: Mapping[str, Tensor],
        shared: Mapping[str, Tensor],
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.axis, self.left_out = scale, axis, dict(left_out or {})
        self.drawn, self.shared = tuple(drawn), tuple(shared)
        for slot, value in {**drawn, **shared}.items():
            self.register_buffer(_key(slot), value.detach())

    def rules(self) -> dict[str, Rule]:
        """Return the rules by which each slot of the model finds its tensor in this prior."""
        name = f"{EXTRAS}.{NAME}."
        return {
            **{slot: Stacked(self.axis, name + _key(slot)) for slot in self.drawn},
            **{slot: Shared(name + _key(slot)) for slot in self.shared},
        }

    def value(self, slot: str) -> Tensor:
        """Return the tensors of a slot, [branches, ...] or shared by all branches."""
        return self.get_buffer(_key(slot))

    def of_branch(self, index: Index) -> Prior:
        """Return the prior of one branch, with its own copies of the tensors."""
        i = index.get(self.axis, 0)
        values = {slot: self.value(slot)[i].clone() for slot in self.drawn}
        values |= {slot: self.value(slot).clone() for slot in self.shared}
        return Prior(self.scale, self.axis, {}, values, self.left_out)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Adopt from the state which tensors all branches share: constants are, and the values of this model may be others."""
        sizes = {len(self.value(slot)) for slot in self.drawn}
        for slot in (*self.drawn, *self.shared):
            old, new = self.value(slot), state_dict.get(prefix + _key(slot))
            if new is None or new.shape == old.shape:
                continue
            if slot in self.drawn and new.shape == old.shape[1:]:
                self.drawn, self.shared = tuple(s for s in self.drawn if s != slot), (*self.shared, slot)
            elif slot in self.shared and new.shape[1:] == old.shape and new.shape[:1].numel() in sizes:
                self.drawn, self.shared = (*self.drawn, slot), tuple(s for s in self.shared if s != slot)
            else:
                continue
            old.data = old.data.new_zeros(new.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _key(slot: str) -> str:
    key = slot.replace(".", "/")  # buffer names cannot contain dots
    return f"{key}/" if key in _TAKEN else key  # a parameter of the user's may be called `scale`


class Whole(Intervention):
    """Intervention that installs all tensors as they are, so that layers do not expect rank-one factors in place of a weight."""

    def __init__(self) -> None:
        self.taps = {}

    def tensors(self, installed: dict[str, Tensor], index: Index) -> dict[str, Tensor]:
        return installed


def bank_of(wrapped: Any) -> Bank:
    """Return the tensors for untrained models as aliases: branches write attributes of parameters to them, which are not for the buffers."""
    table = table_of(wrapped)
    return Bank(lambda name: table.get(name).detach())


def install(root: Any, prior: Prior) -> None:
    """Add a prior to a wrapped object, with rules for all its slots, so that the clones on which branches run can replace every tensor."""
    add_extra(root, NAME, prior)
    for slot in prior.rules():
        root._workbench.rules.setdefault(slot, Shared(slot))


def check_prior(root: nn.Module, record: Any) -> None:
    """Raise ValueError if prior functions cannot be added to the model's outputs, as far as is known before it is called.

    Args:
        root: the model.
        record: record of its wrapping.
    """
    if has_detections(record.output):
        raise ValueError("prior: a prior function cannot be added to detected boxes; leave prior out")
    if record.state:
        raise ValueError(
            "prior: the state that this model passes from call to call (state=) would not include the prior; leave prior or state out"
        )
    outputs = record.output.values() if isinstance(record.output, Mapping) else [record.output]
    for entry in outputs:
        _check_meaning(None if entry is None else meaning_of(entry), "output")
    scripted = [path for path, module in root.named_modules() if is_scripted(module)]
    if scripted:
        raise ValueError(
            f"prior: {scripted[0]} is scripted (torch.jit), and its parameters cannot be drawn anew for an untrained model; wrap the model "
            "before it is scripted, or leave prior out"
        )


def limited_outputs(root: nn.Module, record: Any) -> dict[str, str]:
    """Return the outputs beside others that a sum with a prior would take out of their range, with what they end in.

    Args:
        root: the model.
        record: record of its wrapping.

    Raises:
        ValueError: if it is the only output, or one that `output=` names.
    """
    ends = {name: f"ends in {end.function}" for name, end in ends_of(root, record.method).items()}
    for name, end in ends.items():
        entry = record.output.get(name) if isinstance(record.output, Mapping) else None
        if not name or (entry is not None and isinstance(meaning_of(entry), Values | Classes)):
            raise ValueError(_no_sum(name, end))
    return ends


def _no_sum(name: str, why: str) -> str:
    what = f"output {name!r} of the model" if name else "the model"
    return (
        f"prior: {what} {why}, to which no prior can be added, since the sum would leave its range: let it end in its last linear layer (return "
        'logits, with output="logits"; for targets above 0 or between 0 and 1 train on their logarithm or logit), or leave prior out'
    )


def _check_meaning(meaning: Meaning | None, name: str) -> None:
    if (
        isinstance(meaning, Classes)
        and not isinstance(meaning, Logits)
        and not (isinstance(meaning, Binary) and meaning.logits)
    ):
        raise ValueError(
            f"prior: {name} holds probabilities ({meaning!r}), to which nothing can be added: let the model return logits, without its last "
            'softmax or sigmoid, and wrap it with output="logits" or Binary()'
        )


def run_with_prior(
    wrapped: Any,
    plan: Plan,
    args: tuple,
    kwargs: dict[str, Any],
    strategy: str = "auto",
    receiver: Callable[[], Receiver] | None = None,
) -> tuple[Branched, Sequence[Result]]:
    """Like `Engine.run`, with `scale` times the prior functions added to the model's outputs, but not to those of risk heads.

    Prior functions run in evaluation mode, without noise, on copies of the inputs. A receiver gets outputs only if there is no prior.

    Raises:
        ValueError: if the prior cannot be added consistently, such as if the model passes on state or has random outputs.
    """
    prior, engine = extra(wrapped, NAME), engine_of(wrapped)
    if prior is None:
        return engine.run(plan, args, kwargs, strategy, receiver)
    if plan.state:
        raise ValueError(
            "prior: the state that is passed from call to call would not include the prior; leave prior out"
        )
    axes = tuple(axis for axis in plan.axes if axis.name == prior.axis)
    untrained = Plan(
        axes,
        prior.rules(),
        bank_of(wrapped),
        (Whole(),),
        dealt=plan.dealt,
        rows=plan.rows,
        loop_only=plan.loop_only,
        cut=plan.cut,
        parts=plan.parts,
        keep_state=False,
        fixed=plan.fixed,
        chunk=plan.chunk,
    )
    prior_args, prior_kwargs = own_inputs(map_tensors(lambda t: t.clone(), (args, kwargs)))
    sources = engine.clones.sources(flatten((prior_args, prior_kwargs))[0])
    check_equal = "prior" not in wrapped._workbench.warned and not values_unavailable()
    before = sources.all() if check_equal else None
    with evaluating(wrapped):
        fixed, _ = engine.run(untrained, prior_args, prior_kwargs, "auto" if strategy == "replay" else strategy)
    if before is not None and were_drawn([*before], [*sources.all()]):
        raise ValueError(
            f"prior: forward of {type(wrapped)._plain_class.__name__} draws random numbers in evaluation mode, so that an untrained model would "
            "not be a fixed function; draw them outside and pass them in, or leave prior out"
        )
    branched, results = engine.run(plan, args, kwargs, strategy)
    if not torch.compiler.is_compiling() and (side_effects := _side_effects(engine)):
        raise ValueError(
            f"prior: forward of {type(wrapped)._plain_class.__name__} changes {side_effects}, so that its outputs may depend on earlier calls, "
            "which did not include the prior; return what it stores as an output, or leave prior out. If only the first call sets this up, call "
            "the model once before it is wrapped"
        )
    _add(wrapped, branched, fixed, prior, plan.axes)
    return branched, results


def _kind_of_scores(scores: Tensor, meaning: Meaning | None, depth: int) -> str:
    """Return what scores [branches, ..., n, classes] are by their numbers, probabilities or their logarithms; "" for logits and values."""
    if isinstance(meaning, Binary) or scores.dim() - depth < 2 or scores.is_complex():
        return ""
    logits = (meaning if isinstance(meaning, Logits) else Logits(-1)).at_end(scores.dim() - depth)
    kinds = {"probabilities": scores, "log probabilities": scores.exp()}
    return next((kind for kind, values in kinds.items() if logits.problem(values)), "")


def _side_effects(engine: Any) -> str:
    """Return a description of known side effects of forward; "" if there are none."""
    effects, impure = engine.effects, engine.clones.impure
    if impure:
        names = sorted(f"{path}.{attribute}".strip(".") for path, attribute in impure)
        return f"attributes of the model ({', '.join(names[:3])})"
    return "objects or lists among its inputs" if effects.changes_objects or effects.fills_containers else ""


def _add(wrapped: Any, branched: Branched, fixed: Branched, prior: Prior, axes: Sequence[Axis]) -> None:
    """Add the outputs of the prior to those of the branches, in place."""
    n_sums = 0
    meanings = meanings_of(wrapped._workbench, branched)
    tree_names = names(branched.rebuild(branched.leaves))
    depth = len(branched.axes)
    own_first = {axis.name for axis in axes if axis.own_first}
    heads = next((dim for dim, axis in enumerate(branched.axes) if axis in own_first), None)
    is_first = not values_unavailable() and "prior" not in wrapped._workbench.warned
    check_equal = is_first and bool(fixed.axes)
    if is_first:
        wrapped._workbench.warned.add("prior")
    if len(fixed.leaves) != len(branched.leaves):
        raise ValueError(
            "prior: the model returns different outputs in evaluation and in training mode; return the same in both"
        )
    for i, (leaf, other, meaning, name) in enumerate(
        zip(branched.leaves, fixed.leaves, meanings, tree_names, strict=True)
    ):
        what = f"output {name!r}" if name else "the output"
        if not _takes_prior(leaf, other, meaning, what, depth):
            continue
        if is_first and (kind := _kind_of_scores(leaf.detach(), meaning, depth)):
            prior.left_out = {**prior.left_out, name: f"holds {kind}"}
        if (why := prior.left_out.get(name)) is not None:
            if not name or wrapped._workbench.output is not None:
                raise ValueError(_no_sum(name, why))
            if check_equal:
                advice = "if it is a prediction, let it end in its last linear layer"
                warn_once(wrapped, f"prior {i}", f"{what} gets no prior, since it {why}; {advice}")
            continue
        n_sums += 1
        if check_equal and len(other) > 1 and other[0].numel() and all(torch.equal(row, other[0]) for row in other[1:]):
            warn_once(
                wrapped,
                f"prior {i}",
                f"{what} is the same in all untrained models of prior=, so that it adds no risk: what differs between them is multiplied by "
                "zeros, the inputs are zero, or the output is one of them. Use layers that draw their weights (reset_parameters), leave that "
                "output out, or leave prior out",
            )
        for dim, axis in enumerate(branched.axes):
            if axis not in fixed.axes:
                other = other.unsqueeze(dim)
        if other.shape[depth:] != leaf.shape[depth:]:
            raise ValueError(
                f"prior: {what} is {list(leaf.shape[depth:])} and that of an untrained model {list(other.shape[depth:])}; return a fixed shape"
            )
        branched.leaves[i] = _sum(leaf, prior.scale * other, heads)
    if prior.left_out and not n_sums:
        model = type(wrapped)._plain_class.__name__
        raise ValueError(
            f"prior: no output of {model} takes one, since all are probabilities or of limited range; leave prior out"
        )


def _takes_prior(leaf: Any, untrained: Any, meaning: Meaning | None, what: str, depth: int) -> bool:
    """Return whether an output has values or class scores, to which a prior is added; outputs that would contradict the sum are refused."""
    if not isinstance(leaf, Tensor):
        if isinstance(leaf, str | bool | int | float | None) and leaf == untrained:  # a constant needs no prior
            return False
        raise ValueError(f"prior: {what} is a {type(leaf).__name__}, to which nothing can be added; return tensors")
    if meaning is None or leaf.dim() == depth:
        kind = "a number without dimensions, such as a loss" if meaning else f"of {leaf.dtype}"
        raise ValueError(
            f"prior: {what} is {kind}, which the model computes from outputs without the prior; compute it outside, from the outputs of "
            "the wrapped model"
        )
    _check_meaning(meaning, what)
    return isinstance(meaning, Values | Classes)


def _sum(leaf: Tensor, prior: Tensor, heads: int | None) -> Tensor:
    """Return the sum; along the dimension of risk heads, only the first, which is the prediction, gets the prior."""
    if heads is None:
        return (leaf + prior).to(leaf.dtype)
    primary, auxiliary = leaf.narrow(heads, 0, 1), leaf.narrow(heads, 1, leaf.shape[heads] - 1)
    return torch.cat([(primary + prior).to(leaf.dtype), auxiliary], heads)


__all__ = ["NAME", "Prior", "Whole", "check_prior", "install", "limited_outputs", "run_with_prior"]
