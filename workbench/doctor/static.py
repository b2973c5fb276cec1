"""What can be found without running a model."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..core.wrapped import is_wrapped
from ..engine.clone import is_scripted
from ..introspect.bytecode import globals_assigned
from ..introspect.locations import Location, first_assignment
from ..introspect.source_lines import is_user_code
from ..introspect.unregistered import unregistered
from .report import Finding, finding
from .untouched import functions

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MOST = 4


def inspected(model: nn.Module, name: str) -> Iterator[Finding]:
    """All findings about a plain model as it stands."""
    modules = dict(model.named_modules())
    eager = {path: module for path, module in modules.items() if not is_scripted(module)}
    for path, module in modules.items():
        above = modules.get(path.rpartition(".")[0]) if path else None
        if is_scripted(module) and not (above is not None and is_scripted(above)):
            yield finding("scripted", path or name, what=type(module).__name__)
        if module is not model and is_wrapped(module):
            yield finding("wrapped_part", path)
    lazy = [n for n, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        yield finding("lazy", lazy[0].rpartition(".")[0] or name, what=_some(lazy))
        return
    if not any(p.is_floating_point() or p.is_complex() for p in model.parameters()):
        yield finding("no_parameters", name)
    yield from _tensors(model, modules, name)
    yield from _parameters(model, name)
    yield from _hooks(eager, name)
    yield from _compiled(eager, name)
    yield from _globals(model, name)


def _tensors(model: nn.Module, modules: dict[str, nn.Module], name: str) -> Iterator[Finding]:
    paths = {id(module): path for path, module in reversed(modules.items())}
    for entry in unregistered(model):
        place = first_assignment(type(entry.owner), entry.attribute)
        shape = f"{str(entry.tensor.dtype).removeprefix('torch.')} {list(entry.tensor.shape)}"
        what = f"{entry.name}, {shape}{', requires a gradient' if entry.requires_grad else ''}"
        yield finding("unregistered", paths[id(entry.owner)] or name, place.line, what, place.code)


def _parameters(model: nn.Module, name: str) -> Iterator[Finding]:
    names: dict[int, list[str]] = {}
    for n, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(n)
    for same in names.values():
        if len(same) > 1:
            yield finding("tied", same[0].rpartition(".")[0] or name, what=" = ".join(same))
    weights = {n: p for n, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
    frozen = [n for n, p in weights.items() if not p.requires_grad]
    if frozen:
        what = f"{_some(frozen)} ({len(frozen)} of {len(weights)})"
        yield finding("frozen", frozen[0].rpartition(".")[0] or name, what=what)


def _hooks(modules: dict[str, nn.Module], name: str) -> Iterator[Finding]:
    for path, module in modules.items():
        for kind in _HOOKS:
            for hook in module.__dict__[kind].values():
                code = getattr(inspect.unwrap(hook) if callable(hook) else hook, "__code__", None)
                if str(getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch."):
                    continue
                place = Location(path)
                if isinstance(code, types.CodeType) and is_user_code(code.co_filename):
                    place = Location(path, code.co_filename, code.co_firstlineno)
                called = getattr(hook, "__qualname__", type(hook).__name__)
                what = f"{called}, a {kind.strip('_').removesuffix('s').replace('_', ' ')}"
                yield finding("hooks", path or name, place.line, what)


def _compiled(modules: dict[str, nn.Module], name: str) -> Iterator[Finding]:
    for path, module in modules.items():
        forward: Any = inspect.getattr_static(module, "forward", None)
        if isinstance(module._modules.get("_orig_mod"), nn.Module):
            yield finding("compiled", path or name)
        elif module.__dict__.get("_compiled_call_impl") is not None:
            yield finding("compiled", path or name, what="by its method compile()")
        elif hasattr(forward, "_torchdynamo_orig_callable"):
            yield finding("compiled", path or name, what="its forward is decorated; it stays compiled in each branch")


def _globals(model: nn.Module, name: str) -> Iterator[Finding]:
    paths = {type(module): path for path, module in reversed(dict(model.named_modules()).items())}
    for function in functions(model):
        for variable, line in globals_assigned(function.__code__):
            place = Location("", function.__code__.co_filename, line)
            owner = next((p for cls, p in paths.items() if function in vars(cls).values()), "")
            yield finding("global_write", owner or name, place.line, f"the global variable {variable}", place.code)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more
