"""Models whose parameters accelerate keeps elsewhere, and brings in for each call of a layer."""

from __future__ import annotations

from torch import nn


def refuse_offloaded(model: nn.Module) -> None:
    """Raise TypeError where hooks of accelerate bring parameters in for each call of a layer, from the memory of the host or from a disk."""
    for path, module in model.named_modules():
        hook = module.__dict__.get("_hf_hook")
        if any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ()))):
            raise TypeError(
                f'{path or "the model itself"!r} in {type(model).__name__} is offloaded (a device_map with "cpu" beside a GPU or with "disk", '
                "cpu_offload or disk_offload of accelerate): its parameters come for each call of a layer and go again, while branches and "
                "optimizers need them to stay. Give a device_map without \"disk\" (or a device for the whole, as in device_map={'': 0}), in "
                "fewer bits if it does not fit (BitsAndBytesConfig), or undo it with accelerate.hooks.remove_hook_from_submodules(model)"
            )


__all__ = ["refuse_offloaded"]
