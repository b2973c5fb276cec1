"""Adapters of peft in saved folders: those of the first branch, which peft and the Trainer can read, and loading of those of all branches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHOLE = "workbench.safetensors"  # complete wrapped state, in folders whose weights the plain class cannot read
ADAPTERS = "adapter_model.safetensors"  # file name of peft


def has_readable_adapters(wrapped: Any) -> bool:
    """Return whether the adapters of the first branch are a valid peft model: there is one set of them, and no scaling or prior."""
    return len(wrapped.peft_config) == 1 and "_workbench" not in super(type(wrapped), wrapped).unwrap().__dict__


def write_adapters(wrapped: Any, folder: Path) -> None:
    """Write the adapters of the first branch in the format of peft."""
    import peft
    from safetensors.torch import save_file

    (name,) = wrapped.peft_config
    tensors = peft.get_peft_model_state_dict(super(type(wrapped), wrapped).unwrap(), adapter_name=name)
    save_file(
        {key: value.detach().clone().contiguous() for key, value in tensors.items()},
        folder / ADAPTERS,
        {"format": "pt"},
    )


def loading_adapters(load: Callable[..., Any]) -> Callable[..., Any]:
    """Make `load_adapter` for wrapped objects of a peft class, which the Trainer calls to resume: it loads the adapters of every branch.

    Args:
        load: `load_adapter` of the class.
    """

    @functools.wraps(load)
    def load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        if "_workbench" not in self.__dict__:
            return load(self, model_id, adapter_name, *args, **kwargs)
        whole = Path(model_id) / WHOLE
        if whole.is_file() and [*self.peft_config] == [adapter_name]:
            from safetensors.torch import load_file

            return self.load_state_dict(load_file(whole))
        if self._workbench.released:
            raise TypeError(
                f"load_adapter of this wrapped {type(self).__name__} would load one set of adapters from {model_id}, but each branch has "
                "its own: load them into the plain model and wrap that with finetune=True, or give a folder written by save_pretrained of such "
                "a wrapped model, and the name of its only adapter"
            )
        return load(self, model_id, adapter_name, *args, **kwargs)

    return load_adapter


__all__ = ["WHOLE", "has_readable_adapters", "loading_adapters", "write_adapters"]
