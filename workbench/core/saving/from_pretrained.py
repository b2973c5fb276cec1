"""Loading of wrapped models from folders written by `save_pretrained`."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.effects.private_random import own_random
from ..wrapper import Wrapper
from .file_contents import checked, read
from .file_format import KEY
from .files import load_contents, load_with_outer
from .outer import check_outer, split_outer
from .save_pretrained import AROUND, TEXT, WHOLE, names_in, signature
from .wrapper_json import import_path


def from_pretrained(folder: str | os.PathLike[str], model: Any = None, wrapper: Wrapper | None = None) -> Any:
    """Load a wrapped model from a folder written by `save_pretrained` of a wrapped transformers or peft model.

    The model is complete, with all voters, what was fitted in closed form, its scaling and its calibration. No code is imported from the folder,
    and nothing pickled is read.

    Args:
        folder: a local folder; for a model of the hub, the result of `huggingface_hub.snapshot_download`.
        model: for classes that are not in transformers, or models with several adapters: the class, or a plain model built as the saved one;
            or a model calibrated in the same way, which is required if it was calibrated with functions (`groups=`, `weight=`).
        wrapper: as for `load`, for wrappers that are not registered.

    Returns:
        The wrapped model, or the saved module around it, in evaluation mode.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if no wrapped model was saved there, or it does not fit the model; nothing is changed then.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from workbench import vote
        >>> config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> wrapped = vote.Wrapper(3)(BertForSequenceClassification(config))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     wrapped.save_pretrained(folder)
        ...     again = from_pretrained(folder)
        >>> len(again.voters())
        3
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}. If it is a model of the hub, download it first: "
            f"workbench.from_pretrained(huggingface_hub.snapshot_download({os.fspath(folder)!r}))"
        )
    path, (text, tensors) = _contents(folder)
    around, learned = _around(folder)
    outer, model = split_outer(model) if isinstance(model, nn.Module) else ([], model)
    check_outer(folder / AROUND, around, outer, "from_pretrained(folder, ")
    if model is None or isinstance(model, type):
        with own_random(0):
            model = _plain(folder, text, model)
    load_inner = functools.partial(load_contents, model, wrapper, text, tensors, path)
    if not around:
        return load_inner().eval()
    return load_with_outer(around, outer, load_inner, model, learned, folder / AROUND).eval()


def _around(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return the metadata and tensors of the modules around the model in a folder.

    Raises:
        ValueError: if they were saved with other weights than those in the folder.
    """
    path = folder / AROUND
    if not path.is_file():
        return [], {}
    text, tensors = read(path)
    if text.get("of") != signature(folder):
        raise ValueError(
            f"{path} belongs to other weights than those in {folder}, which were saved again without it: calibrate again, or delete the file "
            "and use the model without it"
        )
    return text["around"], tensors


def _contents(folder: Path) -> tuple[Path, tuple[dict[str, Any], dict[str, Tensor]]]:
    from safetensors import safe_open

    note, whole = folder / TEXT, folder / WHOLE
    if whole.is_file():
        return whole, read(whole)
    if not note.is_file():
        raise ValueError(
            f"{folder} names no wrappers: it was not written by save_pretrained of a wrapped model (of this version). Load it with "
            "from_pretrained of the plain class, and wrap the model; or decorate the class, wrapper(Class).from_pretrained(folder)"
        )
    try:
        metadata = json.loads(note.read_text(encoding="utf-8"))
        names = json.loads(metadata[KEY])["checksums"]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{note} is damaged ({error!r}): save the model again") from error
    tensors: dict[str, Tensor] = {}
    for name, file in names_in(folder).items():
        if name in names:
            with safe_open(file, "pt") as opened:
                tensors[name] = opened.get_tensor(name)
    return note, checked(note, metadata, tensors)


def _plain(folder: Path, text: dict[str, Any], cls: Any) -> nn.Module:
    """Build the plain model of a folder, with arbitrary weights."""
    import transformers

    named = text["model"]
    adapters = named.partition(".")[0] == "peft" and cls is None
    base = cls or getattr(transformers, str(text.get("base")).rpartition(".")[2], None)
    if not isinstance(base, type) or (cls is None and import_path(base) != text["base"]):
        raise ValueError(
            f"{folder} was saved from {named}, which is not a class of transformers, and code is never imported from a folder: give the class "
            "or a plain model, from_pretrained(folder, model)"
        )
    config: Any = base.config_class.from_pretrained(folder, local_files_only=True)  # type: ignore[attr-defined]
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        by = quantized.get("quant_method", "") if isinstance(quantized, dict) else quantized.quant_method
        raise ValueError(
            f"{folder} was saved from a model whose base was quantized ({getattr(by, 'value', by)}), which only its own loader can build: load "
            f"the base as it was loaded before, {base.__name__}.from_pretrained(name, quantization_config=...), put its adapters into it if it "
            "had any, and give it, from_pretrained(folder, model)"
        )
    config._attn_implementation = text.get("attention")
    model: Any = base(config)
    for name, buffer in model.named_buffers():
        if (kind := text.get("buffers", {}).get(name)) is not None:
            buffer.data = buffer.data.to(getattr(torch, kind))
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    if not adapters:
        return model
    import peft

    if not (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} was saved from {named} with several adapters: give a plain model with the same ones, from_pretrained(folder, model)"
        )
    return peft.get_peft_model(model, peft.PeftConfig.from_pretrained(os.fspath(folder)))


__all__ = ["from_pretrained"]
