"""Layers whose weights are computed from other tensors: spectral norm, weight norm, orthogonal and pruned weights.

They are computed by torch.nn.utils.parametrize or, as in older versions of torch and many models, by a hook before each call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..core.plain_copies import plain_module

if TYPE_CHECKING:
    from ..core.ownership import Table

_ITERATIONS = 15  # power iterations, as many as torch makes when a layer gets a spectral norm


def unparametrize(module: nn.Module) -> None:
    """Turn parametrized tensors of a module into parameters again; torch's own function would change all copies of the module."""
    parts = getattr(module, "parametrizations", None)
    if not isinstance(parts, nn.ModuleDict):
        return
    values = {name: getattr(module, name).detach().clone() for name in parts}
    module.__class__ = type_before_parametrizations(module)
    del module._modules["parametrizations"]
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))


def assign(module: nn.Module, name: str, value: Tensor) -> None:
    """Set the originals of a parametrized tensor, so that it has this value as far as the parametrization allows.

    Raises:
        Exception: of any type, from a parametrization that has no inverse or does not accept the value.
    """
    setattr(module, name, value.clone())
    for part in module.get_submodule(f"parametrizations.{name}").children():
        if isinstance(part, parametrizations._SpectralNorm) and value.dim() > 1:  # its vectors belong to the old weight
            part._power_method(part._reshape_weight_to_matrix(value), _ITERATIONS)


@torch.no_grad()
def assign_by_hooks(module: nn.Module) -> None:
    """Set the tensors that hooks compute from, so that each computed tensor keeps its current value."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            value = getattr(module, hook.name).clone()
            module.get_parameter(f"{hook.name}_v").copy_(value)
            module.get_parameter(f"{hook.name}_g").copy_(torch.norm_except_dim(value, 2, hook.dim))
        elif isinstance(hook, SpectralNorm):
            module.get_parameter(f"{hook.name}_orig").copy_(getattr(module, hook.name))
            for _ in range(_ITERATIONS):
                hook.compute_weight(module, do_power_iteration=True)
        elif isinstance(hook, BasePruningMethod):
            module.get_parameter(f"{hook._tensor_name}_orig").copy_(getattr(module, hook._tensor_name))


def vectors_of_hooks(module: nn.Module) -> set[str]:
    """Return the names of the buffers in which hooks keep the singular vectors of trainable weights."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
    learned = [hook.name for hook in hooks if module.get_parameter(f"{hook.name}_orig").requires_grad]
    return {f"{name}_{vector}" for name in learned for vector in "uv"}


def is_learned(module: nn.Module, name: str) -> bool:
    """Whether all originals of a parametrized tensor are trainable."""
    return all(p.requires_grad for p in module.get_submodule(f"parametrizations.{name}").parameters(recurse=False))


def refuse_signs(table: Table, slots: list[str], verb: str, remedy: str) -> None:
    """Refuse factors and noise on tensors whose diagonal holds signs, which torch rounds to whole numbers.

    Args:
        table: the tensors of the model.
        slots: slots of the tensors that would be changed.
        verb: what would change them, for the message.
        remedy: what to do instead, for the message.

    Raises:
        ValueError: for an orthogonal layer by Householder reflections.
    """
    for slot in slots:
        path = table.record.slots[slot].owners[0][0]
        parts = table.module(path)
        if isinstance(parts, ParametrizationList) and any(
            isinstance(part, parametrizations._Orthogonal) and part.orthogonal_map.name == "householder"
            for part in parts
        ):
            raise ValueError(
                f"{slot} is the original of an orthogonal layer by Householder reflections, with signs on its diagonal, and {verb} would "
                f'make columns of the weight zero: use torch.nn.utils.parametrizations.orthogonal(..., orthogonal_map="matrix_exp"), or {remedy}'
            )


def holder_of(table: Table, path: str) -> str | None:
    """Return the path of the ParametrizationList that a parametrization at a path belongs to; None for other modules."""
    parent = path.rpartition(".")[0]
    return parent if isinstance(table.module(parent), ParametrizationList) else None


def owner_of(table: Table, path: str) -> str | None:
    """Return the path of the layer that a parametrization, or its list, belongs to; None for other modules."""
    for holder in (path, holder_of(table, path)):
        if holder is not None and isinstance(table.module(holder), ParametrizationList):
            return f".{holder}".rpartition(".parametrizations.")[0][1:]
    return None


@torch.no_grad()
def value_of(table: Table, owner: str, name: str) -> Tensor:
    """Return the current value of a parametrized tensor."""
    value: Tensor = getattr(plain_module(table, owner), name)
    return value
