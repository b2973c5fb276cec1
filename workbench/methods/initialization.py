"""Start values for the branches: each layer's own initialisation, drawn anew for each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.ownership import Table

_RESETS = ("reset_parameters", "_reset_parameters")


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias, by its name."""
    return name.rpartition(".")[2].rpartition("_")[2] == "bias"


class Draws:
    """Start values for the voters: each layer's own initialisation, drawn anew for each voter.

    Args:
        table: the tensors of the model.
        n: number of voters.
        fresh: False gives every voter the value that is there.
        zeros: slots of weights that are zero, and stay so where that is on purpose: where their layer's own initialisation draws something else
            (a zero-initialised residual scale or convolution), or beside frozen weights (the second factor of a LoRA).
    """

    def __init__(self, table: Table, n: int, fresh: bool, zeros: frozenset[str] = frozenset()) -> None:
        self._table, self._n, self._fresh, self._zeros = table, n, fresh, zeros
        self._frozen = bool(zeros) and not all(table.value(name).requires_grad for name in table.parameters())
        self._modules: dict[str, list[nn.Module] | None] = {}
        self._given: set[str] = set()

    def stacked(self, slot: str, current: Tensor, alpha: float) -> Tensor:
        """[n, *shape] start values for a slot."""
        drawn = self._stacked(slot, current.detach(), alpha)  # in any case, so that what is drawn next is the same
        return torch.zeros_like(drawn) if self._stays_zero(slot) and not bool(current.any()) else drawn

    def _stays_zero(self, slot: str) -> bool:
        """Whether a zero weight is zero on purpose, and of a bias, whether all weights of its layer are."""
        path, attribute = self._table.record.slots[slot].owners[0]
        if self._zeros and is_bias(slot):
            slots = self._table.record.slots.items()
            weights = [name for name, other in slots if other.owners[0][0] == path and not other.buffer]
            weights = [name for name in weights if not is_bias(name)]
            return bool(weights) and all(map(self._stays_zero, weights))
        if slot not in self._zeros:
            return False
        own = next(iter(self._modules.get(path) or ()), None)
        initial = None if own is None else own._parameters.get(attribute)
        return self._frozen or (initial is not None and bool(initial.any()))

    def _stacked(self, slot: str, current: Tensor, alpha: float) -> Tensor:
        if not self._fresh:
            return torch.stack([current] * self._n)
        path, attribute = self._table.record.slots[slot].owners[0]
        if path not in self._modules:
            self._modules[path] = self._reset(path)
        modules = self._modules[path]
        if modules is not None:
            rows = [module._parameters[attribute] for module in modules]
            if all(row is not None and row.shape == current.shape for row in rows):
                values = [row.detach() for row in rows if row is not None]
                alone = self._n == 1 and slot not in self._given  # its memory is given away, once
                self._given.add(slot)
                stacked = (values[0][None] if alone else torch.stack(values)).to(current)
                for row, own in zip(rows, stacked, strict=True):  # the values are not kept twice
                    if row is not None and type(own) is Tensor and (row.dtype, row.device) == (own.dtype, own.device):
                        row.data = own
                if (
                    self._n == 1
                    or current.numel() == 0
                    or current.is_meta
                    or any(not torch.equal(row, stacked[0]) for row in stacked[1:])
                ):
                    return stacked
                return self._jittered(stacked, alpha)
        return self._jittered(torch.stack([current] * self._n), alpha)

    def _jittered(self, stacked: Tensor, alpha: float) -> Tensor:
        """A layer whose initialisation is constant, or that has none: noise of a tenth of its size, or of 0.01 around zero."""
        if self._n == 1 or stacked.is_meta:
            return stacked
        size = stacked[0].abs().square().mean().sqrt()
        return stacked + alpha * torch.where(size > 0, 0.1 * size, 0.01) * torch.randn_like(stacked)

    def _reset(self, path: str) -> list[nn.Module] | None:
        module = self._table.module(path)
        name = next((name for name in _RESETS if callable(getattr(type(module), name, None))), None)
        if name is None:
            return None
        copies = [self._table.plain_module(path) for _ in range(self._n)]
        try:
            for copied in copies:
                getattr(copied, name)()
        except (
            Exception
        ):  # an initialisation that wants arguments or other state: noise around the values serves instead
            return None
        return copies
