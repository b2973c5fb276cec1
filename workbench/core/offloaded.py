"""Refusal of models offloaded by accelerate, whose parameters are loaded for each call of a layer."""

from __future__ import annotations

from torch import nn


def refuse_offloaded(model: nn.Module) -> None:
    """Raise TypeError if hooks of accelerate load parameters from host memory or disk for each call of a layer."""
    for path, module in model.named_modules():
        hook = module.__dict__.get("_hf_hook")
        if any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ()))):
            raise TypeError(
                f'{path or "the model itself"!r} in {type(model).__name__} is offloaded (a device_map with "cpu" beside a GPU or with "disk", '
                "cpu_offload or disk_offload of accelerate): its parameters are only loaded during the call of each layer, while branches and "
                "optimizers need them all the time. Give a device_map without \"disk\" (or one device for all, as in device_map={'': 0}), with "
                "fewer bits if it does not fit (BitsAndBytesConfig), or undo it with accelerate.hooks.remove_hook_from_submodules(model)"
            )


__all__ = ["refuse_offloaded"]
