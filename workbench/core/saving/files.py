"""Saving and loading of wrapped models: one safetensors file with their tensors and their wrappers."""

from __future__ import annotations

import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.clone import eager
from ...engine.execution import Execution
from ..additions import MARK
from ..copying import load_state
from ..crossfit import members_axis
from ..frameworks import load_foreign, save_foreign
from ..function import Function
from ..outputs.options import from_json
from ..quantized import PACKED
from ..wrapped import is_wrapped
from ..wrapper import Wrapper
from . import entries
from .file_contents import named_wrapper, read
from .file_format import DEFAULT, write
from .outer import INNER, check_outer, contents_of, load_outer, split_outer
from .save_pretrained import AROUND
from .savepoint import Savepoint
from .state_dict import SETTINGS, adapt, check_settings, complete, stored_settings
from .wrapper_json import described, import_path, recall_data, unknown_methods


# ---- saving
def save(wrapped: Any, path: str | os.PathLike[str]) -> None:
    """Save a wrapped model, also a calibrated or selective one, to a safetensors file; the write is atomic.

    The file holds `wrapped.state_dict()` with tied tensors stored once, each in its own dtype, and in its metadata the wrappers with all
    settings and a checksum of each tensor. It contains no code, and loading it runs none.

    Args:
        wrapped: a wrapped model, or the result of `calibrate` or `Selective.predictor`.
        path: path of the file; missing folders are created, an existing file is replaced. A path that ends in .keras is for wrapped Keras
            models, in the format of their own `save`, including modules around their `as_torch()`.

    Raises:
        TypeError: if the model is not wrapped, or its state has parts other than tensors, numbers, texts, functions and classes, and lists,
            tuples and dicts of them.
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
    if isinstance(wrapped, str | os.PathLike):
        raise TypeError(f"save takes the model first, then the path: save(wrapped, {os.fspath(wrapped)!r})")
    outer, wrapped = split_outer(eager(wrapped) if isinstance(wrapped, nn.Module) else wrapped)
    if save_foreign(outer, wrapped, Path(path)):
        return
    parts = _parts(wrapped)
    if not parts:
        raise TypeError(
            f"save takes a wrapped model, not {_kind(wrapped)}: wrap it first, or save a plain model with safetensors.torch.save_model"
        )
    contents, tensors = contents_of(outer, wrapped)
    plain = _plain_class(wrapped)
    entries.check_loadable(contents.get("entries", {}), plain)
    text = {
        "model": import_path(plain),
        "parts": {at: described(part) for at, part in parts.items()},
        **contents,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, text, tensors)


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a plain {type(value).__name__}"


def _plain_class(model: Any) -> type:
    return type(model)._plain_class if is_wrapped(model) else type(model)


def _parts(model: Any) -> dict[str, Any]:
    """Return path -> module for the wrapped parts of a model; the path is "" if the whole model is wrapped."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return {path: module for path, module in modules if is_wrapped(module)}


# ---- loading
def load(path: str | os.PathLike[str], model: Any = None, wrapper: Wrapper | None = None) -> Any:
    """Load a model from a file of `save`: wrap (and calibrate) the plain model as the file says, and load its tensors.

    As with `load_state_dict`, values are copied into the tensors of the model, which stay on their device and are cast to the saved dtypes;
    tensors that no method has taken over are shared with the given model. For a model on the meta device, the tensors of the file are used.

    Args:
        path: path of the file.
        model: the plain model, built as when it was saved; or a wrapped model, which is loaded in place; or a model calibrated in the same way,
            which is required if it was calibrated with functions (`groups=`, `weight=`). None for a `.keras` file of a wrapped Keras model,
            which contains the model, as for `keras.saving.load_model`.
        wrapper: the wrapper; only needed for custom distributions or densities, and for wrappers that are not registered
            (`workbench.register`), which are never imported from a file.

    Returns:
        The wrapped model, or the saved module around it.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file was not written by `save`, or does not fit the model or its wrappers; nothing is changed then.
        TypeError: if the model is neither a module nor a function.

    Example:
        >>> import tempfile
        >>> from workbench import vote
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(vote.Wrapper(3)(torch.nn.Linear(2, 1)), f"{folder}/model.safetensors")
        ...     len(load(f"{folder}/model.safetensors", torch.nn.Linear(2, 1)).voters())
        3
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"load takes the path first, then the plain model: load(path, model); found {_kind(path)} as path"
        )
    path = Path(path)
    if (foreign := load_foreign(path, model, wrapper)) is not None:
        return _with_outer_of(path, foreign)
    text, tensors = read(path)
    if callable(model) and not isinstance(model, nn.Module | type):
        model = Function(model)
    if not isinstance(model, nn.Module):
        instead = "; give load(path, model)" if model is None else f", not {_kind(model)}"
        raise TypeError(f"load needs the plain model of the file, a {text['model']}{instead}")
    around = text.get("around", [])
    outer, model = split_outer(model)
    check_outer(path, around, outer)
    if not around:
        return load_contents(model, wrapper, text, tensors, path)
    prefix = INNER * len(around)
    inner = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return load_with_outer(
        around, outer, lambda: load_contents(model, wrapper, text, inner, path), model, tensors, path
    )


def _with_outer_of(path: Path, model: Any) -> Any:
    """Restore the modules around the torch module of a wrapped Keras model; return the Keras model if the file has none.

    Args:
        path: path of the file, a zip archive.
        model: the Keras model loaded from it.
    """
    with zipfile.ZipFile(path) as archive, TemporaryDirectory() as folder:
        if AROUND not in archive.namelist():
            return model
        try:
            text, tensors = read(Path(archive.extract(AROUND, folder)))
        except ValueError as error:
            raise ValueError(f"the modules around the model of {path} cannot be read: {error}") from error
    check_outer(path, text["around"], [])
    return load_outer(text["around"], [], model._made(), tensors)


def load_with_outer(
    around: list[dict[str, Any]],
    outer: list[Any],
    load_inner: Callable[[], Any],
    model: Any,
    tensors: dict[str, Tensor],
    path: Path,
) -> Any:
    """Load a wrapped model and the modules around it; if either fails, both are restored.

    Args:
        around: metadata of the modules around the model, as `described` of `load_outer`.
        outer, tensors: as for `load_outer`.
        load_inner: function that loads and returns the wrapped model.
        model: the model to restore after an error.
        path: path of the file, for errors.
    """
    try:
        with Savepoint(outer[0] if outer else model):
            return load_outer(around, outer, load_inner(), tensors)
    except (KeyError, TypeError, ValueError) as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: the modules around its model do not load: {error}") from error


def load_contents(
    model: Any, wrapper: Wrapper | None, text: dict[str, Any], tensors: dict[str, Tensor], path: Path
) -> Any:
    """Load a wrapped model from the contents of a file; after an error the model is restored.

    Args:
        model, wrapper: as for `load`.
        text, tensors: contents, as returned by `read`.
        path: path of the file, for errors.
    """
    model = eager(model)
    if _parts(model) and wrapper is not None:
        raise ValueError("the model is wrapped already: give wrapper= only with a plain model")
    try:
        with Savepoint(model):
            return _loaded(model, wrapper, text, tensors, path)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(
            f"{path} was saved from {text['model']} and does not load into this {type(model).__name__}: {error}"
        ) from error


def _loaded(model: Any, wrapper: Wrapper | None, text: dict[str, Any], tensors: dict[str, Tensor], path: Path) -> Any:
    """Wrap the model as the file says, unless it is wrapped, and load its tensors."""
    plain = not _parts(model)
    for at, part in text["parts"].items():
        named = wrapper
        if wrapper is None and (plain or not unknown_methods(part)):
            named = named_wrapper(path, part, at, tensors)
        if plain and named is not None:
            if "order" in part:
                outputs, names = part["order"]
                named = named.with_options(example=Execution(tuple(map(tuple, outputs)), tuple(names)))
            try:
                model = _wrapped(model, named, at, part["method"], tensors)
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path} was saved from {text['model']}, and this {type(model).__name__} cannot be wrapped in the same way: {error}"
                ) from error
    _adapt(model, tensors)
    _check(model, text, tensors, path)
    _cast(model, tensors)
    state = model.state_dict()
    rest = {name: entries.from_json(name, value, state.get(name)) for name, value in text.get("entries", {}).items()}
    new: Any = OrderedDict({**tensors, **rest})
    if "versions" in text:  # older files have none
        new._metadata = {path: {**DEFAULT} for path in getattr(state, "_metadata", ())} | text["versions"]
    load_state(model, new, assign=any(tensor.is_meta for tensor in _tensors(state).values()))
    for at, part in _parts(model).items():
        recall_data(part._workbench, text["parts"][at])
    return model


def _wrapped(model: Any, wrapper: Wrapper, at: str, method: str, tensors: dict[str, Tensor]) -> Any:
    """Wrap a part of the model so that members take over the same parameters as when the file was saved, whatever is frozen now."""
    part, prefix = model.get_submodule(at), f"{at}." if at else ""
    flags = {p: p.requires_grad for p in part.parameters()}
    names = dict(nn.Module.named_parameters(part, remove_duplicate=False))
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
    """Raise ValueError if the file does not fit the model, before any tensor is loaded."""
    _check_parts(_parts(wrapped), text, tensors, path)
    complete(tensors, wrapped)
    _check_tensors(wrapped, text, tensors, path)


def _check_parts(parts: dict[str, Any], text: dict[str, Any], tensors: dict[str, Tensor], path: Any) -> None:
    """Raise ValueError if other parts of the model are wrapped than in the file, or with other settings."""
    if parts.keys() != text["parts"].keys():
        in_file, in_model = (
            " and ".join(at or "the whole" for at in sorted(paths)) for paths in (text["parts"], parts)
        )
        raise ValueError(f"in {path} {in_file} of {text['model']} is wrapped, in this model {in_model}")
    for at, part in parts.items():
        if (f"{at}." if at else "") + SETTINGS not in tensors:
            raise ValueError(f"{path} is damaged: it holds no {SETTINGS} of {at or 'the whole'}")
        check_settings(stored_settings(tensors, f"{at}." if at else "")[0], part)
        text_of_part, record = text["parts"][at], part._workbench
        for name, saved, current in (
            ("output", from_json(text_of_part["output"]) or "values", record.output or "values"),
            ("method", text_of_part["method"], record.method),
        ):
            if saved != current:
                raise ValueError(
                    f"{path} was saved with {name}={saved!r}, this model is wrapped with {name}={current!r}"
                )


def _check_tensors(wrapped: Any, text: dict[str, Any], tensors: dict[str, Tensor], path: Any) -> None:
    """Raise ValueError if names, shapes or kinds of numbers differ between file and model."""
    axes = {members_axis(part._workbench.methods) for part in _parts(wrapped).values()} - {""}
    state = wrapped.state_dict()
    current, saved_entries = _tensors(state), text.get("entries", {}).keys()
    stored, current_shapes = (
        dict(
            _plain(name, value, axes)
            for name, value in state.items()
            if f"{MARK}workbench" not in name and PACKED not in name
        )
        for state in (tensors, current)
    )
    kinds = {name: value for name, value in current.items() if name in tensors}
    unlike = [name for name, value in kinds.items() if _number_kind(value) != _number_kind(tensors[name])]
    if unlike:
        name = unlike[0]
        raise ValueError(
            f"{path} holds {name} in {tensors[name].dtype}, which this {type(wrapped).__name__} has in {kinds[name].dtype}"
        )
    wrong = [
        f"{name} {tuple(stored[name])} in the file, {tuple(current_shapes[name])} in the model"
        if name in stored and name in current_shapes
        else f"{name} only in the {'file' if name in stored else 'model'}"
        for name in dict.fromkeys([*current_shapes, *stored])
        if stored.get(name) != current_shapes.get(name)
    ]
    wrong += [
        f"{name} only in the {'file' if name in saved_entries else 'model'}"
        for name in sorted(saved_entries ^ (state.keys() - current.keys()))
    ]
    if wrong:
        more = f", and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise ValueError(
            f"{path} was saved from {text['model']} and does not fit this {type(wrapped).__name__}: {'; '.join(wrong[:4])}{more}. Build the "
            "model as it was when it was saved"
        )


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _number_kind(tensor: Tensor) -> tuple[bool, ...]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype is torch.bool


def _plain(name: str, value: Tensor, axes: set[str]) -> tuple[str, torch.Size]:
    """Return name and shape of a tensor in the plain model, without the mark and dimension of members."""
    stem, _, mark = name.rpartition(MARK)
    return (stem, value.shape[1:]) if mark in axes else (name, value.shape)


def _cast(wrapped: Any, tensors: dict[str, Tensor]) -> None:
    """Cast every tensor to the dtype in which it was saved."""
    state = _tensors(nn.Module.state_dict(wrapped, keep_vars=True))
    dtypes = {id(tensor): tensors[name].dtype for name, tensor in state.items() if name in tensors}
    if any(dtypes.get(id(tensor), tensor.dtype) != tensor.dtype for tensor in state.values()):
        wrapped._apply(lambda tensor: tensor.to(dtypes.get(id(tensor), tensor.dtype)))


__all__ = ["load", "load_contents", "load_with_outer", "save"]
