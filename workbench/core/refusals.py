"""Checks before wrapping: models, methods and sub-modules that cannot be wrapped."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..engine.clone import eager, is_scripted
from ..introspect.listed_modules import warn_listed
from ..introspect.objects import is_keras
from ..introspect.references import used_by
from ..introspect.source_lines import some_of
from ..introspect.unregistered import warn_unregistered
from .additions import MARK
from .method import Method
from .offloaded import refuse_offloaded
from .peft_layers import refuse_rewritten
from .sharded import refuse_sharded
from .wrapped import Wrapped, is_wrapped


def check_model(model: nn.Module, method: str, additions: Sequence[Method]) -> None:
    """Raise an error if a model cannot be wrapped, before anything is changed.

    Args:
        model: the model, which may already be wrapped.
        method: name of the method that is to answer with risk.
        additions: the methods to attach.

    Raises:
        TypeError: if the model is scripted, sharded or offloaded, or has Keras layers.
        ValueError: if it has uninitialized lazy parameters or no floating-point parameters, already carries a method or has a wrapped
            sub-module, or has no such method.
    """
    _check_method(model, method)
    names = [name for name, p in model.named_parameters() if is_lazy(p)]
    if names:
        raise ValueError(
            f"{type(model).__name__} has parameters without a shape yet ({', '.join(names[:3])}): call the model once with real inputs "
            "before wrapping it, or give the wrapper example inputs, example=x; it then wraps a copy"
        )
    scripted = [name or "the model itself" for name, module in model.named_modules() if is_scripted(module)]
    if scripted:
        raise TypeError(
            f"{type(model).__name__} is scripted (torch.jit) in: {scripted[0]}. Scripted code cannot be run with other parameters: wrap the "
            "model as it was before scripting, and deploy the wrapped model with torch.export.export"
        )
    refuse_sharded(model, "a shard cannot be wrapped: wrap the model first, then shard the wrapped one")
    refuse_offloaded(model)
    refuse_rewritten(model)
    foreign = [name for name, module in model.named_modules() if is_keras(module)]
    if foreign:
        raise TypeError(
            f"the sub-module {foreign[0]!r} of {type(model).__name__} is a Keras layer, which does not read its weights from the module: wrap "
            "the Keras model separately, or write the whole model in one of the two frameworks"
        )
    inside = [name for name, module in model.named_modules() if module is not model and is_wrapped(module)]
    if inside:
        raise ValueError(
            f"the sub-module {inside[0]!r} of {type(model).__name__} is wrapped already; wrap the whole model once, with "
            "compose(...), or put the plain sub-module back first (workbench.unwrap)"
        )
    used = None if method == "forward" or is_wrapped(model) else used_by(model, method)
    tensors = (p for n, p in nn.Module.named_parameters(model, remove_duplicate=False) if used is None or n in used)
    if not any(p.is_floating_point() or p.is_complex() for p in tensors) and additions:
        what = f"{type(model).__name__} has" if used is None else f"{type(model).__name__}.{method} uses"
        raise ValueError(f"{what} no floating-point parameters, so there is nothing to wrap")
    record: Any = getattr(model, "_workbench", None)
    attached = {method.name for method in record.methods} if is_wrapped(model) else set()
    names = [new.name for new in additions]
    for name in names:
        if name in attached:
            raise ValueError(
                f"the model carries {name} already; to change its settings, wrap the plain model (`workbench.unwrap(model)`)"
            )
        if names.count(name) > 1:
            raise ValueError(
                f"{name} is composed {names.count(name)} times: give compose at most one wrapper of each kind"
            )
    if not is_wrapped(model):
        warn_unregistered(model)
        warn_listed(model)


def check_processes(model: nn.Module) -> None:
    """Raise TypeError if a model averages gradients over several processes, which it does with none but the parameters that it has now."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) and module.process_group.size() > 1:
            raise TypeError(
                f"{f'the sub-module {name}' if name else 'the model itself'} is a DistributedDataParallel, which would not average the "
                "gradients of parameters that a wrapper adds: wrap the plain model (its .module) first, then DistributedDataParallel(wrapped)"
            )


def words_of_plain(model: nn.Module) -> str:
    """What to say of a model that is not wrapped, where a wrapped one is needed."""
    name = type(model).__name__
    parts = [path for path, part in model.named_modules() if is_wrapped(part)]
    if parts:
        return f"{name} is not wrapped as a whole, its part {parts[0]!r} is: give model.get_submodule({parts[0]!r})"
    return (
        f"{name} is not wrapped: wrap it first, as in vote.Wrapper(5)(model); compose()(model) makes the plain baseline"
    )


def part_at(model: nn.Module, at: str | None) -> nn.Module:
    """Return the sub-module of a dotted name; the model itself for None.

    Raises:
        ValueError: if there is no such sub-module, or it lies inside a wrapped one.
    """
    if at is None:
        return model
    if not isinstance(at, str):
        raise ValueError(f"at: found {at!r}; give the dotted name of a sub-module as a text, such as at={str(at)!r}")
    model = part = eager(model)
    steps = at.split(".")
    for i, step in enumerate(steps):
        if is_wrapped(part):
            raise ValueError(
                f"at={at!r} lies inside {'.'.join(steps[:i]) or 'the model itself'}, which is wrapped already; wrap the whole model once, with "
                "compose(...), or wrap the plain model (workbench.unwrap)"
            )
        inner = part._modules.get(step) if not is_scripted(part) else None
        if inner is None:
            names = [name for name, _ in model.named_modules()]
            attribute = getattr(part, step, None) if step else None
            hint = (
                f"; {step!r} is a method, give method={step!r}" if inspect.ismethod(attribute) else nearest(at, names)
            )
            raise ValueError(f"at: {type(model).__name__} has no sub-module {at!r}{hint}")
        part = eager(inner)
    return part


def _check_method(model: nn.Module, method: str) -> None:
    name = type(model).__name__
    if is_wrapped(model) and model._workbench.method != method:  # type: ignore[union-attr]
        raise ValueError(
            f"this {name} answers with risk in {model._workbench.method}(), and an object does so in one method only: give "  # type: ignore[union-attr]
            f"method={model._workbench.method!r}, or wrap the plain model twice"  # type: ignore[union-attr]
        )
    if method == "forward":
        return
    if method in model._modules:
        raise ValueError(f"method: {method!r} is a sub-module of {name}; give at={method!r}")
    attribute = model.__dict__.get(method, inspect.getattr_static(type(model), method, None))
    is_inherited = attribute is not None and attribute is inspect.getattr_static(nn.Module, method, None)
    if isinstance(attribute, property | staticmethod | classmethod) or not callable(attribute) or is_inherited:
        names = [n for n in dir(type(model)) if not hasattr(nn.Module, n) and not hasattr(Wrapped, n)]
        known = [n for n in names if inspect.isfunction(inspect.getattr_static(type(model), n))]
        raise ValueError(f"method: {name} defines no instance method {method!r}{nearest(method, known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the names that it resembles, or else the first ones that there are."""
    names = [n for n in known if n and MARK not in n]
    near = difflib.get_close_matches(name, names, 3, cutoff=0.4)
    if near:
        return f"; nearest: {', '.join(near)}"
    return f"; it has {some_of(names, 6) or 'none'}"


def not_linear(layer: Any, remedies: str) -> str:
    """Return the end of an error: of what class a layer is that should be an `nn.Linear`, and what to do.

    Args:
        layer: a module.
        remedies: what else to do.
    """
    cls = type(layer)
    kind = cls.__name__ if cls.__module__.startswith("torch.") else f"{cls.__module__}.{cls.__name__}"
    if isinstance(layer, nn.Linear):
        return f"a {kind} of {layer.weight.dtype}; {remedies}"
    weight = layer._parameters.get("weight")
    if weight is not None and weight.dim() == 2 and "bias" in layer._parameters:  # of a library's own linear layer
        remedies = f"put an nn.Linear of the same weights in its place if it computes x @ weight.T + bias; {remedies}"
    return f"a {kind}; {remedies}"
