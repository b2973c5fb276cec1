"""What wrapping adds to a module, under marked names: tensors of methods, and extra modules that belong to no single layer."""

from __future__ import annotations

from typing import Any

from torch import nn

MARK = "@"  # part of the name of everything that wrapping adds, as in fc.weight@vote; attribute names of users cannot contain it
EXTRAS = f"extras{MARK}workbench"  # name of the sub-module for what belongs to no single layer


def extra(root: nn.Module, name: str) -> Any:
    """Return an extra module of a wrapped object by name, such as "scaling" or "density"; None if there is none."""
    container: Any = root._modules.get(EXTRAS)
    return None if container is None else container._modules.get(name)


def add_extra(root: nn.Module, name: str, module: nn.Module) -> None:
    """Add an extra module to a wrapped object, set to the model's training mode."""
    if root._modules.get(EXTRAS) is None:
        root._modules[EXTRAS] = nn.Module().train(root.training)
    container: Any = root._modules[EXTRAS]
    container._modules[name] = module.train(root.training)


def remove_extra(root: nn.Module, name: str) -> Any:
    """Remove an extra module by name and return it; None if there is none."""
    container: Any = root._modules.get(EXTRAS)
    return None if container is None else container._modules.pop(name, None)
