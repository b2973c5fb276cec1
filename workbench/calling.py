"""From `wrapped(x)` to the plan of a run, and from its branches to a prediction and its risks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .engine.plan import Bank, Intervention, Plan, RankOne
from .engine.run import Branched
from .engine.tree import is_float, paths, tensors
from .errors import WorkbenchWarning
from .method import Call, sqrt
from .risk import Risk

if TYPE_CHECKING:
    from .wrapped import Wrapped

_NORMS = (nn.modules.batchnorm._BatchNorm,)


# ---- the plan of a call ----------------------------------------------------------------------------------------------------------------
def plan_of(wrapped: Any, call: Call, rows: list[Tensor] | None = None) -> Plan:
    """What the branches of a call are."""
    from .wrapped import table_of

    record, table = wrapped._workbench, table_of(wrapped)
    axes = tuple(axis for method in record.methods if (axis := method.axis(call)) is not None)
    interventions = tuple(i for method in record.methods if (i := method.intervention(table, call)) is not None)
    names = {axis.name for axis in axes}
    moving = {slot for slot, rule in record.rules.items() if names & set(rule.axes())}
    whole = not [n for n in table.parameters() if n not in moving] or any(isinstance(record.rules[n], RankOne) for n in moving)
    noisy = any(axis.name == "sample" for axis in axes)
    return Plan(
        axes,
        record.rules,
        Bank(table.get),
        interventions,
        shares_trunk=bool(moving) and not whole and not noisy and not call.dealt,
        loop_only=_loop_only(wrapped, axes, interventions),
        dealt="vote" if call.dealt else "",
        rows=rows or [],
    )


def _loop_only(wrapped: Any, axes: tuple, interventions: tuple[Intervention, ...]) -> str:
    if any(axis.randomness == "error" for axis in axes):
        return 'randomness="error" is watched pass by pass'
    return next((reason for i in interventions if (reason := getattr(i, "loop_only", ""))), "")


def _deal(wrapped: Any, method: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor] | None:
    """Rows for every voter, evenly and at random; None with one warning where they can't be dealt out."""
    leaves = [leaf for leaf in tensors((args, kwargs)) if leaf.dim()]
    lengths = {leaf.shape[0] for leaf in leaves}
    n = method.n_voters
    least = 2 if any(isinstance(module, _NORMS) and module.training for module in wrapped.modules()) else 1
    if len(lengths) != 1:
        _tell(wrapped, "deal", "vote: the inputs have no common number of rows, so each step trains all voters on the whole batch")
        return None
    count = lengths.pop()
    if count < n * least:
        _tell(
            wrapped,
            "small",
            f"vote: a batch of {count} rows is too small to deal {least} to each of {n} voters, so this step trains all voters on the whole "
            "batch; use larger batches, or tile_and_reduce=True to say so",
        )
        return None
    return list(torch.randperm(count).tensor_split(n))


def _tell(wrapped: Any, key: str, message: str) -> None:
    if key not in wrapped._workbench.told:
        wrapped._workbench.told.add(key)
        warnings.warn(message, WorkbenchWarning, stacklevel=4)


def _run(wrapped: Any, plan: Plan, args: tuple, kwargs: dict[str, Any]) -> tuple[Branched, list[Any]]:
    return wrapped.__dict__["_engine"].engine.run(plan, args, kwargs, wrapped._workbench.strategy)


# ---- prediction ------------------------------------------------------------------------------------------------------------------------
def predict(wrapped: Any, args: tuple, kwargs: dict[str, Any], return_risk: bool, tile_and_reduce: bool | None) -> Any:
    """See `Wrapped.forward`."""
    record, scaling = wrapped._workbench, wrapped.scaling if "extras@workbench" in wrapped._modules else None
    given = args
    if scaling is not None:
        args = scaling.inputs(args)
    neo = next((method for method in record.methods if method.name == "neo"), None)
    if neo is not None and return_risk:
        neo.check_ready(wrapped)
    if neo is not None and return_risk and len(record.methods) == 1:
        y, vacuitic = neo.measure(wrapped, args, kwargs)
        _warn_nan(wrapped, given, vacuitic)
        return (scaling.prediction(y) if scaling is not None else y), vacuitic
    vote = next((method for method in record.methods if method.name == "vote"), None)
    rows = None
    if vote is not None:
        deal = not tile_and_reduce and vote.independent and wrapped.training and not return_risk
        if deal or tile_and_reduce is False:
            rows = _deal(wrapped, vote, args, kwargs)
    call = Call(wrapped.training, return_risk, dealt=rows is not None)
    branched, _ = _run(wrapped, plan_of(wrapped, call, rows), args, kwargs)
    y, risks = reduced(record, branched, return_risk)
    if scaling is not None:
        y = scaling.prediction(y)
        if record.output == "values":
            risks = {name: scaling.risk(value) for name, value in risks.items()}
    if not return_risk:
        return y
    if neo is not None:
        risks["vacuitic"] = neo.measure(wrapped, args, kwargs)[1]
    _warn_nan(wrapped, given, risks)
    measured = [name for name in risks if name != "total"]
    if len(record.methods) == 1 and len(measured) == 1 and record.output == "values":
        return y, risks[measured[0]]
    return y, Risk(**risks)


def reduced(record: Any, branched: Branched, return_risk: bool) -> tuple[Any, dict[str, Any]]:
    """The prediction and the standard deviations by name (entropies for class outputs), with the branches' axes removed."""
    leaves: list[Any] = []
    risks: dict[str, list[Any]] = {}
    found = False
    for i, leaf in enumerate(branched.leaves):
        own: dict[str, Any] = {}
        if not isinstance(leaf, Tensor):
            leaves.append(leaf)
        elif not is_float(leaf):
            leaves.append(_majority(leaf, len(branched.axes)))
        else:
            found = True
            reduce = _values if record.output == "values" else _classes
            y, own = reduce(record, branched.axes, leaf, return_risk)
            leaves.append(y)
        for name, value in own.items():
            risks.setdefault(name, [None] * len(branched.leaves))[i] = value
    output = branched.rebuild(leaves)
    if not found:
        kinds = ", ".join(
            f"{path}: {str(leaf.dtype).removeprefix('torch.') if isinstance(leaf, Tensor) else type(leaf).__name__}"
            for path, leaf in zip(paths(output), leaves, strict=True)
        )
        raise TypeError(
            f"the output holds no floating-point tensor ({kinds}), so it has no risk; return the scores or values, and do argmax, rounding "
            "or decoding outside the wrapped model"
        )
    return output, {name: branched.rebuild(values) for name, values in risks.items()}


def _values(record: Any, axes: tuple[str, ...], leaf: Tensor, return_risk: bool) -> tuple[Tensor, dict[str, Tensor]]:
    parts = {"y": leaf}
    by_name = {method.name: method for method in record.methods}
    for dim in reversed(range(len(axes))):
        parts = by_name[axes[dim]].reduce(parts, dim)
    y = parts.pop("y")
    if not return_risk:
        return y, {}
    out = {name: sqrt(variance) for name, variance in parts.items()}
    if parts:
        out["total"] = sqrt(sum(parts.values()))  # type: ignore[arg-type]
    return y, out


def _classes(record: Any, axes: tuple[str, ...], leaf: Tensor, return_risk: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Entropies in nats (Depeweg et al. 2018): total H(E p), aleatoric E H(p), epistemic the mutual information between class and model."""
    logits = record.output == "logits"
    if leaf.dim() - len(axes) < 1:
        raise ValueError(f'output="{record.output}" wants class scores [rows, classes], not shape {tuple(leaf.shape[len(axes):])}')
    if not logits and bool(((leaf < 0) | (leaf > 1)).any()):
        raise ValueError('output="probs", but the model gives numbers outside [0, 1]; use output="logits"')
    if "sculpt" in axes:
        method = next(method for method in record.methods if method.name == "sculpt")
        loc, risk = leaf.unbind(len(axes) - 1)
        axes = tuple(axis for axis in axes if axis != "sculpt")
        probs = method.probs(loc if logits else loc.clamp_min(torch.finfo(loc.dtype).tiny).log(), method.distribution.to_risk(risk))
        own = loc
    else:
        probs, own = (leaf.softmax(-1) if logits else leaf), leaf
    if axes:
        mean = probs.flatten(0, len(axes) - 1).mean(0)
        y = mean.clamp_min(torch.finfo(mean.dtype).tiny).log() if logits else mean
    else:
        mean, y = probs, own
    if not return_risk:
        return y, {}
    total = torch.special.entr(mean).sum(-1)
    each = torch.special.entr(probs).sum(-1)
    aleatoric = each.flatten(0, len(axes) - 1).mean(0) if axes else each
    out = {"aleatoric": aleatoric, "total": total}
    if axes:
        out["epistemic"] = (total - aleatoric).clamp_min(0)
    return y, out


def _majority(leaf: Tensor, axes: int) -> Tensor:
    """Whole numbers and truth values: what most branches say."""
    if not axes:
        return leaf
    flat = leaf.flatten(0, axes - 1)
    if flat.shape[0] == 1:
        return flat[0]
    return flat.to(torch.int64).mode(0).values.to(leaf.dtype)


def _warn_nan(wrapped: Any, args: tuple, risks: Any) -> None:
    if "nan" in wrapped._workbench.told:
        return
    leaves = [leaf for leaf in tensors(list(risks.values()) if isinstance(risks, dict) else risks) if is_float(leaf)]
    if any(leaf.device.type == "cpu" and bool(leaf.isnan().any()) for leaf in leaves):  # elsewhere it would make every call wait
        rows = [int(x.flatten(1).isnan().any(1).sum()) for x in tensors(args) if is_float(x) and x.dim() > 1]
        _tell(wrapped, "nan", f"the risk is NaN in some rows; {max(rows, default=0)} rows of the input hold NaN. Other rows are not affected")


# ---- training --------------------------------------------------------------------------------------------------------------------------
def loss(wrapped: Any, criterion: Callable[[Any, Any], Tensor], args: tuple, y: Any) -> Tensor:
    """See `Wrapped.loss`."""
    record, scaling = wrapped._workbench, wrapped.scaling if "extras@workbench" in wrapped._modules else None
    if scaling is not None:
        args, y = scaling.inputs(args), scaling.targets(y)
    branched, _ = _run(wrapped, plan_of(wrapped, Call(wrapped.training, True, loss=True)), args, {})
    sculpt = next((method for method in record.methods if method.name == "sculpt"), None)
    axes = branched.axes
    sizes = next(leaf.shape[: len(axes)] for leaf in branched.leaves if isinstance(leaf, Tensor))
    heads = sculpt is not None and "sculpt" in axes
    models = sizes[:-1] if heads else sizes
    terms: list[Tensor] = []
    for k in range(int(torch.Size(models).numel())):
        at = [leaf.reshape(-1, *leaf.shape[len(models) :])[k] if isinstance(leaf, Tensor) else leaf for leaf in branched.leaves]
        if not heads:
            terms.append(criterion(branched.rebuild(at), y))
            continue
        prediction = branched.rebuild([leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in at])
        risk = branched.rebuild([sculpt.distribution.to_risk(leaf[1]) if is_float(leaf) else leaf for leaf in at])
        terms.append(criterion(prediction, y) + sculpt.distribution.loss_function(y, prediction, risk))
    total = torch.stack(terms).mean()
    from .wrapped import table_of

    for method in record.methods:
        if (term := method.regularizer(table_of(wrapped), None)) is not None:
            total = total + term
    return total


def fit(wrapped: Any, inputs: Any) -> None:
    """See `Wrapped.fit`."""
    for method in wrapped._workbench.methods:
        if method.name == "neo":
            method.fit(wrapped, inputs)


# ---- parts and state -------------------------------------------------------------------------------------------------------------------
def branch_model(wrapped: Any, index: dict[str, int], own: bool) -> nn.Module:
    """One branch as a model by itself.

    Args:
        index: axis -> position.
        own: whether all its tensors are its own; else those that no method took over are shared.
    """
    from .wrapped import _build, adopt, table_of, wrapped_class

    table, record = table_of(wrapped), wrapped._workbench
    new, _, _ = _build(wrapped)
    new.__class__ = type(wrapped)._plain_class
    bank = Bank(table.get)
    for slot in record.slots.values():
        rule = record.rules.get(slot.name)
        if rule is None and not own:
            continue
        value = (table.get(slot.name) if rule is None else rule.pick(bank, index)).detach().clone()
        if rule is not None and not own and slot.name not in record.released:
            value = table.get(slot.name)
        elif not slot.buffer:
            value = nn.Parameter(value, requires_grad=_learns(table, slot.name, rule))
        _place(new, slot, value)
    scaling = wrapped.scaling
    if scaling is not None:
        new = adopt(new, wrapped_class(type(new)))
        new.__dict__["_engine"].table.show()
        type(new).scale(new, **{name: getattr(scaling, name) for name in scaling.NAMES})
    return new


def _learns(table: Any, name: str, rule: Any) -> bool:
    return any(table.get(n).requires_grad for n in rule.names()) if rule is not None else table.get(name).requires_grad


def _place(module: nn.Module, slot: Any, value: Tensor) -> None:
    from .engine.clone import places

    path, attribute = slot.owners[0]
    owner = module.get_submodule(path) if path else module
    old = (owner._buffers if slot.buffer else owner._parameters)[attribute]
    for container, key, _ in places(module, {id(old): slot.name}):
        container[key] = value


def voters(wrapped: Any) -> list[nn.Module]:
    """See `Wrapped.voters`."""
    vote = next((method for method in wrapped._workbench.methods if method.name == "vote"), None)
    return [branch_model(wrapped, {"vote": i}, own=True) for i in range(vote.n_voters if vote is not None else 1)]


def prepare_state(wrapped: Any, state: dict[str, Any], prefix: str) -> None:
    """Before a state_dict is loaded: compare the settings, and spread the state of a plain model over the branches."""
    from .scaling import Scaling
    from .wrapped import EXTRAS, SETTINGS, _settings, table_of

    record, table = wrapped._workbench, table_of(wrapped)
    stored = state.pop(prefix + SETTINGS, None)
    if stored is not None:
        theirs, ours = json.loads(bytes(stored.cpu().tolist()).decode()), json.loads(json.dumps(_settings(wrapped)))
        differing = [
            f"{name}: the file has {theirs.get(name, 'no such method')}, this object {ours.get(name, 'no such method')}"
            for name in sorted(theirs.keys() | ours.keys())
            if theirs.get(name) != ours.get(name)
        ]
        if theirs and differing:
            raise ValueError("the state was saved with other wrapper settings; wrap the model alike before loading. " + "; ".join(differing))
    for key in [key for key in state if key.startswith(prefix) and "_orig_mod." in key]:
        state[key.replace("_orig_mod.", "")] = state.pop(key)
    scaled = [key for key in state if key.startswith(f"{prefix}{EXTRAS}.scaling.")]
    if scaled:
        present = wrapped.scaling
        if present is None or any(getattr(present, key.rpartition(".")[2]) is None for key in scaled):
            type(wrapped).scale(wrapped, **{key.rpartition(".")[2]: state[key] for key in scaled}) if _all_known(scaled) else None
    elif wrapped.scaling is not None:
        for name in Scaling.NAMES:  # a state from before the scaling was set keeps it
            if (value := getattr(wrapped.scaling, name)) is not None:
                state[f"{prefix}{EXTRAS}.scaling.{name}"] = value
    plain = any(prefix + name in state for name in record.released) or (stored is None and bool(record.methods))
    if not plain:
        return
    for name in record.rules:
        rule, slot = record.rules[name], record.slots[name]
        source = next((state[f"{prefix}{p}.{a}" if p else prefix + a] for p, a in slot.owners if (f"{prefix}{p}.{a}" if p else prefix + a) in state), None)
        for target in _leaves(rule):
            if prefix + target in state:
                continue
            current = table.get(target)
            spread = source is not None and target.split("@")[0] == name and target != name and target.endswith("@vote") and "@sculpt" not in target
            state[prefix + target] = source.expand(current.shape).clone() if spread and source is not None else current.detach().clone()
        if name in record.released:
            for path, attribute in slot.owners:
                state.pop(f"{prefix}{path}.{attribute}" if path else prefix + attribute, None)
    for key, value in wrapped.state_dict().items():  # what is learned beside the model (noise scales, signatures) stays as it is
        if "@" in key and key != SETTINGS and prefix + key not in state:
            state[prefix + key] = value


def _all_known(keys: list[str]) -> bool:
    from .scaling import Scaling

    return all(key.rpartition(".")[2] in Scaling.NAMES for key in keys)


def _leaves(rule: Any) -> list[str]:
    """Every registered tensor behind a rule."""
    if hasattr(rule, "options"):
        return [name for option in rule.options for name in _leaves(option)]
    return [name for name in (rule.name, getattr(rule, "left", None), getattr(rule, "right", None)) if name]


