"""`save_pretrained` of wrapped transformers and peft models: writes a folder for `workbench.from_pretrained`, with a model card."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...atomic import write as write_text
from .adapters import WHOLE, has_readable_adapters, write_adapters
from .entries import check_loadable, to_json
from .file_format import CHECKSUM, metadata_of, tensors_of, versions_of, write
from .model_card import write_card
from .outer import around_of, split_outer
from .training_data import note_trainer
from .wrapper_json import described, import_path

TEXT = "workbench.json"  # metadata, in folders whose weights the plain class can read
AROUND = "workbench_calibration.safetensors"  # modules around the model, such as a calibration
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # file names of transformers
# unsupported options and their defaults
_UNSUPPORTED = {"push_to_hub": False, "variant": None, "distributed_checkpoint": False}


def saving_pretrained(save: Callable[..., Any]) -> Callable[..., Any]:
    """Make `save_pretrained` for wrapped objects of a class, which writes the wrapped state along with that of `unwrap()`.

    The plain class can then load a model with trained weights from the same folder. If it would load a different model (because of scaling,
    rank-one voters or adapters), the folder has no weights that it finds. The option `data=`, a text, adds the user's description of the
    training data to the model card.

    Args:
        save: `save_pretrained` of the class.
    """

    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_workbench" not in self.__dict__:
            return save(self, *args, **kwargs)
        libraries = {base.__module__.partition(".")[0] for base in type(self).__mro__} & {"transformers", "peft"}
        if not libraries:
            raise TypeError(
                f"save_pretrained of this wrapped {type(self).__name__} would write files that the plain class reads as another model. "
                "Use workbench.save(wrapped, path), or wrapped.unwrap().save_pretrained(folder) for the plain model only"
            )
        options = _options(save, self, args, kwargs)
        data = options.pop("data", None)
        folder, main = Path(options.pop("save_directory")), options.get("is_main_process", True)
        by_trainer = "state_dict" in options  # the Trainer passes it (None in newer versions), users do not
        state = options.pop("state_dict", None)
        adapters = "peft" in libraries and has_readable_adapters(self)
        others = {name: value for name, value in self.state_dict().items() if not isinstance(value, Tensor)}
        for name, value in others.items():
            to_json(name, value)  # raises before anything is written
        check_loadable(others, type(self)._plain_class)
        if folder.is_file():
            raise NotADirectoryError(f"{folder} is a file: give a folder")
        if by_trainer:
            note_trainer(self, sys._getframe(1))
        self._workbench.data = data or self._workbench.data
        if "peft" not in libraries and (plain := _readable(self, state)) is not None:
            save(self, folder, state_dict={**plain, **(state or self.state_dict())}, **options)
            if main:
                _write_metadata(self, folder, state or self.state_dict())
        elif by_trainer and not adapters:
            raise TypeError(
                f"the plain class could not read the weights of this wrapped {type(self).__name__}, so that the Trainer could not resume from "
                'them: use save_strategy="no", and save_pretrained(folder) or workbench.save(wrapped, path) after the training'
            )
        elif main:
            _save_whole(self, folder, adapters)
        if main:
            # of an earlier save, which a refused one leaves
            (folder / AROUND).unlink(missing_ok=True)
            write_card(self, folder)
        return None

    return save_pretrained


def _options(save: Callable[..., Any], wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `save_pretrained` by name, once they are checked."""
    bound = inspect.signature(save).bind(wrapped, *args, **kwargs).arguments
    options = {name: value for name, value in bound.items() if name not in ("self", "kwargs")}
    options |= bound.get("kwargs", {})
    data = options.get("data")
    if data is not None and not (isinstance(data, str) and data.strip()):
        raise TypeError(f"data: found {data!r:.80}; give a text that says what the model was trained on")
    for name, value in _UNSUPPORTED.items():
        if options.get(name, value) != value:
            raise TypeError(
                f"save_pretrained of a wrapped {type(wrapped).__name__} does not support {name}: save to a folder, and upload that "
                "(huggingface_hub.upload_folder)"
            )
    return options


def _readable(wrapped: Any, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the state that the plain class can read from the folder; None if it would be a different model."""
    single = super(type(wrapped), wrapped).unwrap()  # a model may have its own unwrap
    # scaling or priors, which the plain class does not know, or adapters, which are saved separately
    if "_workbench" in single.__dict__ or getattr(wrapped, "_hf_peft_config_loaded", False):
        return None
    # of a quantized base transformers writes the weights that it finds, and not those of a voter
    if getattr(wrapped, "hf_quantizer", None) is not None:
        return None
    if any("lora_" in name or ".base_layer." in name for name in single.state_dict()):
        return None
    plain, state = single.state_dict(), state or wrapped.state_dict()
    if not all(isinstance(value, Tensor) for value in state.values()):  # of which transformers saves nothing
        return None
    # weights that have another meaning in the wrapped model, such as the shared ones of rank-one voters
    differs = any(name in state and not torch.equal(value, state[name]) for name, value in plain.items())
    return None if differs else plain


class SavesPretrained:
    """Mix-in for modules around a wrapped model, such as calibrations, that are saved with it."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Save the transformers or peft model, and the modules around it, to a folder for `workbench.from_pretrained`.

        Args:
            save_directory: the folder; a model card is written as well.
            options: as for `save_pretrained` of the model, and `data`, a text for the card that describes the training data.

        Raises:
            TypeError: if the model is neither of transformers nor of peft; `workbench.save` supports all models.
        """
        outer, model = split_outer(self)
        if not hasattr(model, "save_pretrained"):
            raise TypeError(
                f"save_pretrained supports models of transformers and peft, and this {type(self).__name__} is of a {type(model).__name__}: use "
                "workbench.save(calibrated, path)"
            )
        folder = Path(save_directory)
        model.save_pretrained(folder, **options)
        if not options.get("is_main_process", True):
            return
        around, tensors = around_of(outer)
        write(folder / AROUND, {**text_of(model, []), "around": around, "of": signature(folder)}, tensors)
        write_card(model, folder, around)


def signature(folder: Path) -> str:
    """Return the checksum of the metadata of a folder, which include that of each tensor."""
    from safetensors import safe_open

    if (folder / WHOLE).is_file():
        with safe_open(folder / WHOLE, "pt") as file:
            return str((file.metadata() or {}).get(CHECKSUM))
    return str(json.loads((folder / TEXT).read_text(encoding="utf-8")).get(CHECKSUM))


def text_of(wrapped: Any, split: list[str]) -> dict[str, Any]:
    """Return the metadata of a wrapped model, including how to build its plain model."""
    parts = {path: part for path, part in wrapped.named_modules() if "_workbench" in part.__dict__}
    base = (
        wrapped.get_base_model() if hasattr(wrapped, "peft_config") and hasattr(wrapped, "get_base_model") else wrapped
    )
    saved_names = {name for name, _ in base.state_dict().items()}
    return {
        "model": import_path(type(wrapped)._plain_class),
        "parts": {path: described(part) for path, part in parts.items()},
        "complex": split,
        "versions": versions_of(wrapped),
        "base": import_path(getattr(type(base), "_plain_class", type(base))),
        "attention": getattr(base.config, "_attn_implementation", None),
        "buffers": {
            name: str(buffer.dtype).removeprefix("torch.")
            for name, buffer in base.named_buffers()
            if name not in saved_names and buffer.is_floating_point()
        },
    }


def _write_metadata(wrapped: Any, folder: Path, state: dict[str, Tensor]) -> None:
    """Write the metadata for weights written by transformers; the complete state if transformers has omitted or renamed some."""
    weights, index = folder / WEIGHTS, folder / INDEX
    # the older one is from an earlier save, and transformers would still read it
    if weights.is_file() and index.is_file():
        min(weights, index, key=lambda path: path.stat().st_mtime_ns).unlink()
    written = names_in(folder)
    written_memory = {state[name].data_ptr() for name in written if name in state}
    if all(name in written or tensor.data_ptr() in written_memory for name, tensor in state.items()):
        tensors = {name: tensor.detach() for name, tensor in state.items() if name in written}
        write_text(folder / TEXT, json.dumps(metadata_of(text_of(wrapped, []), tensors)))
        (folder / WHOLE).unlink(missing_ok=True)
    else:
        _write_whole(wrapped, folder)


def names_in(folder: Path) -> dict[str, Path]:
    """Return name -> file for the tensors of the weights that transformers has written into a folder."""
    from safetensors import safe_open

    index, names = folder / INDEX, {}
    files = [folder / WEIGHTS]
    if index.is_file():
        files = [
            folder / file for file in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        ]
    for file in files:
        if file.is_file():
            with safe_open(file, "pt") as tensors:
                names.update(dict.fromkeys(tensors.keys(), file))
    return names


def _save_whole(wrapped: Any, folder: Path, readable: bool) -> None:
    """Write the configuration and the complete state in a workbench file; if `readable`, also the adapters of the first branch for peft."""
    others = ("adapter_model.bin",) if readable else ("adapter_model.*",)
    stale = [
        file.name for pattern in ("model*.safetensors", *others, "pytorch_model*.bin") for file in folder.glob(pattern)
    ]
    if stale:
        raise ValueError(
            f"{folder} contains {stale[0]}, which the plain class would read in place of this wrapped {type(wrapped).__name__}: give an empty "
            "folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    adapters = getattr(wrapped, "peft_config", None) or {}
    base: nn.Module = wrapped.get_base_model() if adapters and hasattr(wrapped, "get_base_model") else wrapped
    config: Any = copy.deepcopy(base.config)
    config.architectures = [getattr(type(base), "_plain_class", type(base)).__name__]
    config.save_pretrained(folder)
    for adapter in adapters.values() if len(adapters) == 1 else ():
        adapter.save_pretrained(folder)
    if readable:
        write_adapters(wrapped, folder)
    if (generation := getattr(base, "generation_config", None)) is not None:
        generation.save_pretrained(folder)
    _write_whole(wrapped, folder)


def _write_whole(wrapped: Any, folder: Path) -> None:
    tensors, split, entries = tensors_of(wrapped)
    text = text_of(wrapped, split) | ({"entries": entries} if entries else {})
    write(folder / WHOLE, text, tensors)
    (folder / TEXT).unlink(missing_ok=True)


__all__ = ["AROUND", "TEXT", "WHOLE", "SavesPretrained", "names_in", "saving_pretrained", "signature"]
