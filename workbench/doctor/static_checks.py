"""Checks of a model that do not run it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..core.wrapped import is_wrapped
from ..introspect.bytecode import globals_assigned
from ..introspect.locations import Location, first_assignment
from ..introspect.objects import is_scripted
from ..introspect.source_lines import is_user_code
from ..introspect.unregistered import unregistered
from .findings import Finding, make_finding
from .isolation import user_functions

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MAX_LISTED = 4


def check_unrun(model: nn.Module, name: str) -> Iterator[Finding]:
    """Return all findings about a plain model that need no run.

    Args:
        model: the model; it is not run.
        name: its name in findings.
    """
    modules = dict(model.named_modules())
    yield from _foreign_modules(model, modules, name)
    lazy = [n for n, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        yield make_finding("lazy", _parent(lazy[0]) or name, _abbreviated(lazy))
        return
    unscripted = {path: module for path, module in modules.items() if not is_scripted(module)}
    yield from _unregistered_tensors(model, modules, name)
    yield from _parameters(model, name)
    yield from _hooks(unscripted, name)
    yield from _compiled(unscripted, name)
    yield from _global_writes(model, name)


def _foreign_modules(model: nn.Module, modules: dict[str, nn.Module], name: str) -> Iterator[Finding]:
    """Findings about the outermost scripted modules, and about wrapped ones."""
    for path, module in modules.items():
        parent = modules.get(_parent(path)) if path else None
        if is_scripted(module) and not (parent is not None and is_scripted(parent)):
            yield make_finding("scripted", path or name, type(module).__name__)
        if module is not model and is_wrapped(module):
            yield make_finding("wrapped_part", path)


def _unregistered_tensors(model: nn.Module, modules: dict[str, nn.Module], name: str) -> Iterator[Finding]:
    paths = {id(module): path for path, module in reversed(modules.items())}
    for entry in unregistered(model):
        location = first_assignment(type(entry.owner), entry.attribute)
        shape = f"{str(entry.tensor.dtype).removeprefix('torch.')} {list(entry.tensor.shape)}"
        what = f"{entry.name}, {shape}{', requires a gradient' if entry.requires_grad else ''}"
        yield make_finding("unregistered", paths[id(entry.owner)] or name, what, location)


def _parameters(model: nn.Module, name: str) -> Iterator[Finding]:
    """Missing, tied and frozen parameters."""
    weights = {n: p for n, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
    if not weights:
        yield make_finding("no_parameters", name)
    names: dict[int, list[str]] = {}
    for n, p in nn.Module.named_parameters(model, remove_duplicate=False):
        names.setdefault(id(p), []).append(n)
    for tied in names.values():
        if len(tied) > 1:
            yield make_finding("tied", _parent(tied[0]) or name, " = ".join(tied))
    frozen = [n for n, p in weights.items() if not p.requires_grad]
    if frozen:
        what = f"{_abbreviated(frozen)} ({len(frozen)} of {len(weights)})"
        yield make_finding("frozen", _parent(frozen[0]) or name, what)


def _hooks(modules: dict[str, nn.Module], name: str) -> Iterator[Finding]:
    for path, module in modules.items():
        for kind in _HOOKS:
            for hook in module.__dict__[kind].values():
                if str(getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch."):
                    continue
                code = getattr(inspect.unwrap(hook) if callable(hook) else hook, "__code__", None)
                location = Location(path)
                if isinstance(code, types.CodeType) and is_user_code(code.co_filename):
                    location = Location(path, code.co_filename, code.co_firstlineno)
                hook_name = getattr(hook, "__qualname__", type(hook).__name__)
                what = f"{hook_name}, a {kind.strip('_').removesuffix('s').replace('_', ' ')}"
                # the line is that of the hook's definition, whose source says no more than its name
                yield replace(make_finding("hooks", name, what, location), code="")


def _compiled(modules: dict[str, nn.Module], name: str) -> Iterator[Finding]:
    for path, module in modules.items():
        forward: Any = inspect.getattr_static(module, "forward", None)
        if isinstance(module._modules.get("_orig_mod"), nn.Module):
            yield make_finding("compiled", path or name)
        elif module.__dict__.get("_compiled_call_impl") is not None:
            yield make_finding("compiled", path or name, "by its method compile()")
        elif hasattr(forward, "_torchdynamo_orig_callable"):
            yield make_finding("compiled", path or name, "its forward is decorated; it stays compiled in each branch")


def _global_writes(model: nn.Module, name: str) -> Iterator[Finding]:
    paths = {type(module): path for path, module in reversed(dict(model.named_modules()).items())}
    for function in user_functions(model):
        for variable, line in globals_assigned(function.__code__):
            owner = next((path for cls, path in paths.items() if function in vars(cls).values()), "")
            location = Location(owner, function.__code__.co_filename, line)
            yield make_finding("global_write", name, f"the global variable {variable}", location)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _abbreviated(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
