"""Diagnosis of a model before it is wrapped: what limits wrapping, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..core.batches.call_arguments import takes
from ..core.function import Function
from ..core.ownership import extra
from ..core.wrapped import Wrapped, is_wrapped, unwrap
from ..engine.clone import eager
from ..engine.tree import flatten
from ..introspect.objects import is_scripted
from .candidates import candidates
from .described_outputs import DescribedOutput, meaning_of_numbers
from .findings import KINDS, Finding, Means, for_wrappers, make_finding
from .isolation import copy_with_tensors, preserved, wrapped_function
from .observed_run import ExampleCall
from .report import Diagnosis, sort_findings
from .run_checks import check_runs
from .static_checks import check_unrun
from .trials import Trials, judge


def diagnose(model: nn.Module | Callable[..., Any], *example: Any, **kw: Any) -> Diagnosis:
    """Say what wrapping a model meets: what limits it, in which line, what that means for each wrapper, what its outputs are taken for.

    Copies of the model are run on the example about twenty times, in both modes; each registered wrapper is put on a copy with its default
    settings and few branches, and is run as well. Needs memory for a few copies. Model, example, hooks, modes and global random states are left
    as they are; what forward prints is dropped, but other effects outside of Python, such as files that it writes, happen.

    Args:
        model: a module, a function that uses modules, or a wrapped model (of which the plain model is looked at).
        example, kw: inputs for one call, as for the model; two rows at least show more than one. A single tuple stands for positional, a
            single dict for keyword inputs, if forward takes them so. Without inputs, only what can be seen without running is found.

    Returns:
        The findings and verdicts; `print` it, or show it in a notebook.

    Raises:
        TypeError: if `model` is no module and no function that uses one.

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
    present: tuple[str, ...] = ()
    outputs: list[DescribedOutput] = []
    wrappers = candidates()
    roles = {wrapper.name: wrapper.roles for wrapper in wrappers}
    with preserved(target):
        plain = target if is_scripted(target) else eager(target)
        if is_wrapped(target):
            present = Wrapped.methods.fget(target)  # type: ignore[attr-defined]
            plain, args = _plain(target, args)
        findings = list(check_unrun(plain, name))
        if plain is not target and not present:
            findings.append(make_finding("compiled", name))
        if present:
            means: Means = dict.fromkeys(present, "refused")
            findings.append(make_finding("wrapped", name, f"with {', '.join(present)}", means=means))
        findings = [for_wrappers(finding, roles) for finding in findings]
        stuck = all(any(finding.means[name] == "refused" for finding in findings) for name in roles)
        call = ExampleCall(plain, name, args, kwargs) if has_example else None
        modes: list[bool] = []
        if call is not None and not stuck and _has_copies(plain):
            of_runs, modes, outputs = check_runs(call)
            findings += [for_wrappers(finding, roles) for finding in of_runs]
        keeps = any(finding.kind in ("state", "grows", "buffers") for finding in findings)
        tried = Trials(target if present else plain, call, modes, keeps, meaning_of_numbers(outputs))
        trials = {wrapper.name: tried.of(wrapper) for wrapper in wrappers}
        findings, verdicts = judge(findings, trials, roles, name)
    description = _describe_inputs(args, kwargs) if has_example else ""
    remarks = [*_remarks(call, stuck), *(trial.settings for trial in trials.values() if trial.settings)]
    return Diagnosis(name, sort_findings(findings), verdicts, description, remarks, outputs)


def _remarks(call: ExampleCall | None, stuck: bool) -> list[str]:
    """What could not be looked at, and why."""
    if call is None:
        return ["Not run, since there is no example: give inputs, diagnose(model, x), to see the rest."]
    if stuck:
        return ["Not run, since no wrapper takes it as it is."]
    if call.n_rows() == 1:
        return ["With one row it can't be seen whether rows depend on each other: give two or more."]
    return []


def _has_copies(model: nn.Module) -> bool:
    """Whether the model can be copied; if it can't, the wrappers say why."""
    try:
        copy_with_tensors(model)
    except Exception:
        return False
    return True


def _function(target: Any) -> nn.Module:
    if callable(target) and not isinstance(target, type):
        return Function(target)
    raise TypeError(f"diagnose looks at an nn.Module or a function that uses one, not at {type(target).__name__}")


def _name(model: nn.Module) -> str:
    if isinstance(model, Function):
        return getattr(model, "__name__", "function")
    return str(model.original_name) if is_scripted(model) else type(eager(model)).__name__


def _plain(wrapped: Any, args: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model inside, and the inputs that it gets."""
    scaling = extra(wrapped, "scaling")
    plain: Any = unwrap(wrapped)
    if scaling is None:
        return plain, args
    Wrapped.unscale(plain)
    return unwrap(plain), scaling.inputs(args, {})[0]


def _inputs(model: nn.Module, example: tuple[Any, ...], kw: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs; a single tuple or dict is opened where forward takes its items."""
    if len(example) != 1 or kw:
        return example, kw
    only = example[0]
    forward = wrapped_function(model) or model.forward
    if type(only) is tuple and takes(forward, *only):
        return only, {}
    if isinstance(only, Mapping) and all(isinstance(key, str) for key in only) and takes(forward, **only):
        return (), dict(only)
    return example, kw


def _describe_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The inputs in a few words."""
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
