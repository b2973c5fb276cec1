"""Wrapped models on disk: one safetensors file that holds their tensors, and the wrappers to rebuild them with."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..atomic import replacing
from ..engine.clone import eager
from ..engine.execution import Execution
from .crossfit import members_axis
from .function import Function
from .method import Method
from .outputs import from_json, to_json
from .ownership import MARK
from .registry import wrapper_class, wrapper_names
from .settings import settings_of
from .state_dict import adapt, check_settings, complete, stored_settings
from .wrapped import is_wrapped
from .wrapper import Wrapper, compose

KEY = "workbench"  # in the file's metadata
VERSION = 1
OPTIONS = ("output", "state", "strategy", "purity", "chunk")  # settings that all wrappers of a model share


# ---- saving
def save(wrapped: Any, path: str | os.PathLike[str]) -> None:
    """Write a wrapped model to one safetensors file, whole or not at all.

    The file holds what `wrapped.state_dict()` holds, tied tensors once, each in its own dtype, and in its metadata the wrappers with all
    their settings. It holds no code, and none is run when it is read.

    Args:
        wrapped: what a wrapper gave.
        path: the file; missing folders are made, a file that is there is replaced.

    Raises:
        TypeError: if the model is not wrapped, or its state has parts that are no tensors.
        ValueError: if a tensor has no values (on the meta device).

    Example:
        >>> import tempfile
        >>> from workbench import compose, sculpt, vote
        >>> wrapped = compose(vote.Wrapper(5), sculpt.Wrapper())(torch.nn.Linear(2, 1)).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(wrapped, f"{folder}/model.safetensors")
        ...     again = load(f"{folder}/model.safetensors", torch.nn.Linear(2, 1)).eval()
        >>> again.methods
        ('vote', 'sculpt')
        >>> x = torch.ones(4, 2)
        >>> torch.equal(again(x), wrapped(x))
        True
    """
    from safetensors.torch import save_file

    wrapped = eager(wrapped) if isinstance(wrapped, nn.Module) else wrapped
    parts = _parts(wrapped)
    if not parts:
        raise TypeError(
            f"save takes what a wrapper gave, not {_kind(wrapped)}: wrap it first, or save a plain model with safetensors.torch.save_model"
        )
    tensors, split = _tensors(wrapped)
    text = {
        "version": VERSION,
        "model": _path(_plain_class(wrapped)),
        "parts": {at: _described(part) for at, part in parts.items()},
        "complex": split,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        save_file(tensors, unfinished, metadata={"format": "pt", KEY: json.dumps(text)})


def _tensors(wrapped: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The state, each tensor once and with memory of its own; and the names of those that are stored as pairs of real numbers."""
    tensors: dict[str, Tensor] = {}
    split: list[str] = []
    seen: set[int] = set()
    memory: set[int] = set()
    for name, tensor in wrapped.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} in the state_dict is a {type(tensor).__name__}, and safetensors files hold tensors only: return a tensor from "
                "get_extra_state, or save with torch.save(wrapped.state_dict(), path)"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values to save; load or initialise the model first"
            )
        if id(tensor) in seen:
            continue  # tied; loading gives it its other names
        seen.add(id(tensor))
        value = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if value.dtype == torch.complex128:  # the one dtype of torch that the format does not know
            split.append(name)
            value = torch.view_as_real(value).contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in memory or storage.nbytes() != value.numel() * value.element_size():
            value = value.clone()
        memory.add(value.untyped_storage().data_ptr())
        tensors[name] = value
    return tensors, split


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _kind(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a plain {type(thing).__name__}"


def _plain_class(model: Any) -> type:
    return type(model)._plain_class if is_wrapped(model) else type(model)


def _parts(model: Any) -> dict[str, Any]:
    """The wrapped parts of a model by path: "" if it is wrapped as a whole."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return {path: module for path, module in modules if is_wrapped(module)}


def _described(part: Any) -> dict[str, Any]:
    record = part._workbench
    return {
        "methods": {method.name: _arguments(part, method) for method in record.methods},
        "method": record.method,
        "rows": record.rows,
        **({} if record.execution is None else {"order": [record.execution.outputs, record.execution.names]}),
        **{name: getattr(record, name) for name in OPTIONS},
        "output": to_json(record.output),
    }


def _arguments(wrapped: Any, method: Method) -> dict[str, Any]:
    """The arguments of the wrapper that made a method; of what is not known by name the import path, for the message only."""
    known = method.name in wrapper_names() and type(method.wrapper) is wrapper_class(method.name)
    if not known or type(method) not in map(type, method.wrapper.make()):
        return {"foreign": _path(type(method))}
    classes = {described.name: described.classes for described in settings_of(type(method.wrapper))}
    arguments: dict[str, Any] = {}
    for name, value in method.arguments(wrapped).items():
        if type(value) in classes[name]:
            options = {key: getattr(value, key, None) for key in inspect.signature(type(value)).parameters}
            value = {"class": type(value).__name__, **{key: _number(option) for key, option in options.items()}}
        elif not all(
            isinstance(item, bool | int | float | str | None)
            for item in (value if isinstance(value, list | tuple) else (value,))
        ):
            return {"foreign": _path(type(value))}
        arguments[name] = value
    return {"arguments": arguments}


def _number(option: Any) -> Any:
    """An option as JSON: a number that is learned with its value now; generators are not kept."""
    if isinstance(option, nn.Parameter):
        return {"learned": option.item()}
    if isinstance(option, Tensor):
        return option.item()
    return None if isinstance(option, torch.Generator) else option


# ---- loading
def load(path: str | os.PathLike[str], model: Any, wrapper: Wrapper | None = None) -> Any:
    """A wrapped model from a file of `save`: the plain model is wrapped as the file says, and takes its tensors.

    As with `load_state_dict`, the tensors are copied into those of the model: what no method takes over is shared with the model that is
    given. They stay on its device, and take the dtype that they were saved in. On the meta device, the file's own tensors are used.

    Args:
        path: the file.
        model: the plain model, built as it was when it was saved; or one that is wrapped already, which is then loaded in place.
        wrapper: only for files of distributions or densities of your own, and of wrappers that are not registered (`workbench.register`), which
            are never imported from a file.

    Returns:
        The wrapped model.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not one of `save`, or does not fit the model or its wrappers; nothing is changed then.
        TypeError: if the model is neither a module nor a function.

    Example:
        >>> import tempfile
        >>> from workbench import vote
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(vote.Wrapper(3)(torch.nn.Linear(2, 1)), f"{folder}/model.safetensors")
        ...     len(load(f"{folder}/model.safetensors", torch.nn.Linear(2, 1)).voters())
        3
    """
    text, tensors = _read(Path(path))
    if callable(model) and not isinstance(model, nn.Module | type):
        model = Function(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"load takes the model that the file is of, {text['model']}, not {_kind(model)}")
    model = eager(model)
    if not _parts(model):
        for at, part in text["parts"].items():
            chosen = wrapper or _wrapper(part, path)
            if "order" in part:
                outputs, names = part["order"]
                chosen = chosen.with_options(example=Execution(tuple(map(tuple, outputs)), tuple(names)))
            try:
                model = _wrapped(model, chosen, at, part["method"], tensors)
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path} was saved from {text['model']}, and this {type(model).__name__} cannot be wrapped alike: {error}"
                ) from error
    elif wrapper is not None:
        raise ValueError("the model is wrapped already: give wrapper= together with a plain one")
    present = list(model.state_dict())
    _adapt(model, tensors)
    try:
        _check(model, text, tensors, path)
    except ValueError:
        _adapt(model, present)
        raise
    _cast(model, tensors)
    model.load_state_dict(tensors, assign=any(tensor.is_meta for tensor in model.state_dict().values()))
    for at, part in _parts(model).items():
        part._workbench.rows = text["parts"][at]["rows"]
    return model


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"{path} is {'a folder, not a file' if path.is_dir() else 'not there'}")
    try:
        with safe_open(path, framework="pt") as file:
            text = json.loads((file.metadata() or {}).get(KEY, "null"))
            names = list(file.keys())
            tensors = {} if text is None else {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        with path.open("rb") as raw:
            pickled = raw.read(4)[:2] in (b"PK", b"\x80\x02")
        raise ValueError(
            f"{path} is no safetensors file ({error}). "
            + (
                "It looks like one of torch.save: wrap the model, and wrapped.load_state_dict(torch.load(path, weights_only=True))"
                if pickled
                else "Give a file that workbench.save wrote"
            )
        ) from error
    if text is None:
        raise ValueError(
            f"{path} names no wrappers: it holds the weights of a plain model ({len(names)} tensors: {', '.join(names[:3])}, ...). Wrap the "
            "model, and wrapped.load_state_dict(safetensors.torch.load_file(path))"
        )
    if text["version"] > VERSION:
        raise ValueError(
            f"{path} was written by a newer workbench (format {text['version']}, this one reads {VERSION}): update workbench"
        )
    for name in text["complex"]:
        tensors[name] = torch.view_as_complex(tensors[name].clone())  # the file aligns to 8 bytes, not 16
    return text, tensors


def _wrapper(part: dict[str, Any], path: Any) -> Wrapper:
    """The wrappers that the file names."""
    foreign = [
        method.get("foreign", name)
        for name, method in part["methods"].items()
        if "foreign" in method or name not in wrapper_names()
    ]
    if foreign:
        raise ValueError(
            f"{path} was saved with {', '.join(foreign)}, which is not one of workbench's own, and code is never imported from a file: give "
            "the wrapper yourself, load(path, model, wrapper=...), or register it before (workbench.register)"
        )
    wrappers = [_built(wrapper_class(name), method["arguments"]) for name, method in part["methods"].items()]
    options = {name: part[name] for name in OPTIONS if name in part} | {"output": from_json(part["output"])}
    return compose(*wrappers).with_options(**options)


def _built(wrapper: type[Wrapper], arguments: dict[str, Any]) -> Wrapper:
    classes = {described.name: described.classes for described in settings_of(wrapper)}
    values = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, dict):
            cls = {cls.__name__: cls for cls in classes[name]}[value["class"]]
            options = {
                option: nn.Parameter(torch.tensor(number["learned"])) if isinstance(number, dict) else number
                for option, number in value.items()
                if option != "class" and number is not None
            }
            values[name] = cls(**options)
    return wrapper(**values)


def _wrapped(model: Any, wrapper: Wrapper, at: str, method: str, tensors: dict[str, Tensor]) -> Any:
    """Wrap a part of the model, and let members take over what they had taken over when the file was saved, whatever is frozen now."""
    part, prefix = model.get_submodule(at), f"{at}." if at else ""
    flags = {p: p.requires_grad for p in part.parameters()}
    names = dict(part.named_parameters(remove_duplicate=False))
    methods = wrapper.make()
    marks = [mark for method in methods for mark in method.member_marks]
    taken = {p for name, p in names.items() if any(f"{prefix}{name}{MARK}{mark}" in tensors for mark in marks)}
    try:
        for parameter in flags:
            if taken and (parameter.is_floating_point() or parameter.is_complex()):
                parameter.requires_grad_(parameter in taken)
        wrapped: Any = wrapper(model, method=method, at=at or None)
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
    registered = dict(wrapped.get_submodule(at).named_parameters())
    for name, parameter in names.items():
        if (members := registered.get(f"{name}{MARK}{members_axis(methods)}")) is not None:
            members.requires_grad_(flags[parameter])
    return wrapped


def _adapt(model: Any, names: Iterable[str]) -> None:
    for at, part in _parts(model).items():
        adapt(part, names, f"{at}." if at else "")


def _check(wrapped: Any, text: dict[str, Any], tensors: dict[str, Tensor], path: Any) -> None:
    """Raise what speaks against loading, before anything is changed."""
    parts = _parts(wrapped)
    if parts.keys() != text["parts"].keys():
        there, here = (" and ".join(at or "the whole" for at in sorted(paths)) for paths in (text["parts"], parts))
        raise ValueError(f"in {path} {there} of {text['model']} is wrapped, in this model {here}")
    for at, part in parts.items():
        check_settings(stored_settings(tensors, f"{at}." if at else "")[0], part)
        text_of_part, record = text["parts"][at], part._workbench
        for name, saved, present in (
            ("output", from_json(text_of_part["output"]) or "values", record.output or "values"),
            ("method", text_of_part["method"], record.method),
        ):
            if saved != present:
                raise ValueError(
                    f"{path} was saved with {name}={saved!r}, this model is wrapped with {name}={present!r}"
                )
    complete(tensors, wrapped)
    axes = {members_axis(part._workbench.methods) for part in parts.values()} - {""}
    stored, present = (
        dict(_plain(name, value, axes) for name, value in state.items() if f"{MARK}workbench" not in name)
        for state in (tensors, wrapped.state_dict())
    )
    wrong = [
        f"{name} {tuple(stored[name])} there, {tuple(present[name])} here"
        if name in stored and name in present
        else f"{name} only {'there' if name in stored else 'here'}"
        for name in dict.fromkeys([*present, *stored])
        if stored.get(name) != present.get(name)
    ]
    if wrong:
        more = f", and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise ValueError(
            f"{path} was saved from {text['model']} and does not fit this {type(wrapped).__name__}: {'; '.join(wrong[:4])}{more}. Build the "
            "model as it was when it was saved"
        )


def _plain(name: str, value: Tensor, axes: set[str]) -> tuple[str, torch.Size]:
    """Name and shape as the plain model has them, for what members have one each of."""
    stem, _, mark = name.rpartition(MARK)
    return (stem, value.shape[1:]) if mark in axes else (name, value.shape)


def _cast(wrapped: Any, tensors: dict[str, Tensor]) -> None:
    """Give every tensor the dtype that it was saved in."""
    state = nn.Module.state_dict(wrapped, keep_vars=True)
    dtypes = {id(tensor): tensors[name].dtype for name, tensor in state.items() if name in tensors}
    if any(dtypes.get(id(tensor), tensor.dtype) != tensor.dtype for tensor in state.values()):
        wrapped._apply(lambda tensor: tensor.to(dtypes.get(id(tensor), tensor.dtype)))


__all__ = ["load", "save"]
