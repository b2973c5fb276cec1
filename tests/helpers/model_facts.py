"""What a refused call could have changed in a model."""

from __future__ import annotations

from typing import Any

from torch import nn


def facts(model: nn.Module) -> tuple[Any, ...]:
    """Class, attributes by identity and values of tensors: all that a refused call could have changed."""
    held = [
        (path, type(m), sorted(m.__dict__), [(n, id(p)) for n, p in m._parameters.items()], sorted(m._modules))
        for path, m in model.named_modules()
    ]
    return held, {name: value.tolist() for name, value in model.state_dict().items()}
