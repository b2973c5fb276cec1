"""Diagnosis of a model before it is wrapped: what limits wrapping, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..core.additions import extra
from ..core.batches.call_arguments import takes
from ..core.function import Function
from ..core.wrapped import Wrapped, is_wrapped, unwrap
from ..engine.clone import eager
from ..engine.tree import flatten
from ..introspect.objects import is_scripted
from .candidates import candidates
from .described_outputs import meaning_of_numbers
from .findings import KINDS, Finding, Means, for_wrappers, make_finding
from .isolation import copy_with_tensors, preserved, wrapped_function
from .observed_run import ExampleCall
from .report import Diagnosis, sort_findings
from .run_checks import Seen, check_runs
from .static_checks import check_unrun
from .trials import Trials, judge


def diagnose(model: nn.Module | Callable[..., Any], *example: Any, **kw: Any) -> Diagnosis:
    """Report what limits wrapping a model: on which line, what it means for each wrapper, and how each output is interpreted.

    Copies of the model run on the example about twenty times, in both modes. Each registered wrapper is put on a copy, with its default
    settings and few branches, and runs as well. This needs memory for a few copies. Model, example, hooks, modes and global random states stay
    as they are. What forward prints is discarded, but other side effects outside Python, such as writing files, do happen.

    Args:
        model: a module, a function that uses modules, or a wrapped model (whose plain model is diagnosed).
        example, kw: inputs for one call of the model; two or more rows reveal more than one. A single tuple holds positional inputs and a
            single dict keyword inputs, if forward takes them that way. Without inputs, only the checks that do not run the model are made.

    Returns:
        The findings and verdicts; `print` it, or show it in a notebook.

    Raises:
        TypeError: if `model` is neither a module nor a function that uses one.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Sigmoid())
        >>> diagnosis = diagnose(model, torch.zeros(4, 2))
        >>> diagnosis.verdicts["neo"], diagnosis.verdicts["sample"]
        ('ok', 'note')
        >>> print(diagnosis.find("probabilities")[0].what)
        output: made by sigmoid
        >>> diagnosis.outputs[0].lines
        ('output=Binary(logits=False)  # probabilities of a yes or no',)
    """
    target = model if isinstance(model, nn.Module) else _function(model)
    name = _name(target)
    args, kwargs = _inputs(target, example, kw)
    has_example = bool(example or kw)
    present: tuple[str, ...] = Wrapped.methods.fget(target) if is_wrapped(target) else ()  # type: ignore[attr-defined]
    wrappers = candidates()
    roles = {wrapper.name: wrapper.roles for wrapper in wrappers}
    with preserved(target):
        plain, args = _plain(target, args)
        findings = [for_wrappers(finding, roles) for finding in _findings_before_running(target, plain, name, present)]
        refused_by_all = all(any(finding.means[name] == "refused" for finding in findings) for name in roles)
        call = ExampleCall(plain, name, args, kwargs) if has_example else None
        seen = Seen([], [], [])
        if call is not None and not refused_by_all and _can_be_copied(plain):
            seen = check_runs(call)
        findings += [for_wrappers(finding, roles) for finding in seen.findings]
        keeps_state = any(finding.kind in ("state", "grows", "buffers") for finding in findings)
        setup = Trials(target if present else plain, call, seen.modes, keeps_state, meaning_of_numbers(seen.outputs))
        trials = {wrapper.name: setup.of(wrapper) for wrapper in wrappers}
        findings, verdicts = judge(findings, trials, roles, name)
    description = _describe_inputs(args, kwargs) if has_example else ""
    remarks = [*_remarks(call, refused_by_all), *(trial.settings for trial in trials.values() if trial.settings)]
    return Diagnosis(name, sort_findings(findings), verdicts, description, remarks, seen.outputs)


def _findings_before_running(
    target: nn.Module, plain: nn.Module, name: str, present: tuple[str, ...]
) -> Iterator[Finding]:
    yield from check_unrun(plain, name)
    if present:
        means: Means = dict.fromkeys(present, "refused")
        yield make_finding("wrapped", name, f"with {', '.join(present)}", means=means)
    elif plain is not target and not is_wrapped(target):
        yield make_finding("compiled", name)


def _remarks(call: ExampleCall | None, refused_by_all: bool) -> list[str]:
    """Checks that were not made, and why."""
    if call is None:
        return ["Not run, since there is no example: pass inputs, diagnose(model, x), to see the rest."]
    if refused_by_all:
        return ["Not run, since no wrapper takes the model as it is."]
    if call.n_rows() == 1:
        return ["One row can't show whether rows depend on each other: pass two or more."]
    return []


def _can_be_copied(model: nn.Module) -> bool:
    """Whether the model can be copied; if not, the trials of the wrappers report why."""
    try:
        copy_with_tensors(model)
    except Exception:
        return False
    return True


def _function(target: Any) -> nn.Module:
    if callable(target) and not isinstance(target, type):
        return Function(target)
    raise TypeError(f"diagnose takes an nn.Module or a function that uses one, not {type(target).__name__}")


def _name(model: nn.Module) -> str:
    if isinstance(model, Function):
        return getattr(model, "__name__", "function")
    return str(model.original_name) if is_scripted(model) else type(eager(model)).__name__


def _plain(target: nn.Module, args: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model inside a wrapped or compiled one, and the (scaled) inputs that it gets."""
    if not is_wrapped(target):
        return target if is_scripted(target) else eager(target), args
    scaling = extra(target, "scaling")
    plain: Any = unwrap(target)
    if scaling is None:
        return plain, args
    Wrapped.unscale(plain)
    return unwrap(plain), scaling.inputs(args, {})[0]


def _inputs(model: nn.Module, example: tuple[Any, ...], kw: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs; a single tuple or dict is unpacked if forward takes its items."""
    if len(example) != 1 or kw:
        return example, kw
    single = example[0]
    forward = wrapped_function(model) or model.forward
    if type(single) is tuple and takes(forward, *single):
        return single, {}
    if isinstance(single, Mapping) and all(isinstance(key, str) for key in single) and takes(forward, **single):
        return (), dict(single)
    return example, kw


def _describe_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A short description of the inputs."""
    words = [_describe(arg) for arg in args] + [f"{name}={_describe(value)}" for name, value in kwargs.items()]
    return ", ".join(word for word in words if word) or "no inputs"


def _describe(tree: Any) -> str:
    leaves = flatten(tree)[0]
    words = [
        f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)[:30]
        for leaf in leaves[:4]
    ]
    text = ", ".join(words) + (", ..." if len(leaves) > 4 else "")
    return text if len(leaves) == 1 and leaves[0] is tree else f"({text})"


__all__ = ["KINDS", "Diagnosis", "Finding", "diagnose"]
