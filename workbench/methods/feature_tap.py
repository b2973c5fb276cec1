"""Features, the inputs of a model's layers, collected while the model runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..engine.plan import Intervention
from ..engine.sites import Sites
from .densities import pool

if TYPE_CHECKING:
    from ..core.ownership import Table


@dataclass(frozen=True)
class FeatureMap:
    """Features of a layer at each position.

    Args:
        values: Tensor [rows, channels, ...] with one to three axes of positions.
        channels_first: whether the layer itself has the channels first, as convolutions do, or last.
        keep: mask of the steps of a sequence that are not padding [rows, t], if known.
    """

    values: Tensor
    channels_first: bool
    keep: Tensor | None = None


class FeatureTap(Intervention):
    """Pools the inputs of layers at the moment they are used, before anything else can write into them.

    Args:
        method: the method of neo, which names the sites, and keeps what shapes have shown about its layers.
        table: the tensors of the model.
        rows: expected number of rows of the batch.
        keep: mask of the steps of sequences that are not padding [rows, t], if known.
        take: function of a layer's name and its `FeatureMap`; None pools one vector per row.
    """

    only_records = True

    def __init__(
        self,
        method: Any,
        table: Table,
        rows: int | None,
        keep: Tensor | None,
        take: Callable[[str, FeatureMap], Tensor] | None = None,
    ) -> None:
        self.method, self.table, self.rows, self.keep, self.take = method, table, rows, keep, take
        self.taps: dict[str, Tensor] = {}
        self.layouts: dict[str, tuple[int, bool]] = {}  # of maps: number of axes, and whether the channels come first
        self.same: dict[str, str] = {}  # layers that have the same input as another one
        self.flattened: set[str] = set()  # features whose steps or tokens were told apart by the number of rows alone
        self.square: set[str] = set()  # features of as many steps as rows, so that either axis may have the rows
        self.calls: list[frozenset[str]] = []  # names of the parameters used by each call
        self.turns: dict[str, int] = {}  # how many calls of the layer came before the one whose input is the feature
        self.without_data: set[str] = set()  # names of the parameters in calls that see no data
        self.by_step: set[str] = set()  # features of recurrent layers whose steps were taken for rows

    def active(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor]
    ) -> AbstractContextManager[Any] | None:
        self.trail = ()
        wanted = self.method._sites
        counts: Counter[str] = Counter()  # calls of each layer so far
        seen: list[tuple[Tensor, str]] = []

        def at_site(names: frozenset[str], leaves: list[Any], live: list[int], raw: list[int]) -> list[Any]:
            self.trail = (*self.trail, (tuple(sorted(names)), tuple(live)))
            self.calls.append(names)
            name = min(names, key=lambda name: (not name.endswith("weight"), name))
            turn = counts[name]
            counts[name] += 1
            if any(isinstance(t, Tensor) and t.dtype == torch.int64 and t.dim() == 1 for t in leaves):
                return leaves  # packed sequence: its rows are steps, not rows of the batch
            if turn < self.method._turns.get(name, 0):
                return leaves  # constants or other inputs, which may have as many rows in this batch
            if not live or self.rows is None or name in self.taps or (wanted is not None and name not in wanted):
                return leaves
            feature = leaves[live[0]]
            if feature.is_nested:
                return leaves  # rows of different lengths
            if wanted is None:
                if (first := next((other for tensor, other in seen if tensor is feature), None)) is not None:
                    self.same.setdefault(name, first)
                seen.append((feature, name))
            feature = feature.detach()
            feature = torch.view_as_real(feature).flatten(-2) if feature.is_complex() else feature
            if self.take is not None:
                if (feature_map := self._map(feature, self.rows, name)) is not None:
                    self.layouts[name] = (feature_map.values.dim() - 2, feature_map.channels_first)
                    self.taps[name] = self.take(name, feature_map)
            elif (vector := self._pooled(feature, self.rows, name)) is not None:
                self.taps[name] = vector.clone() if feature.dim() <= 2 else vector  # must not share the layer's memory
            if name in self.taps:
                self.turns[name] = turn
            return leaves

        if wanted is not None and self.method._met:
            parameters = [(tensor, name) for tensor, name in parameters if name in self.method._met]
        sites = Sites(parameters, state, None, at_site, contractions=self.table.has_matrices(), wanted=wanted)
        self.without_data = sites.without_data
        return sites

    def _pooled(self, feature: Tensor, rows: int, name: str) -> Tensor | None:
        """Pool one vector per row; None if the feature has no axis of rows."""
        if not self._is_time_first(feature, rows, name):
            slot = self.table.record.slots.get(name)
            convolution = slot is not None and self.table.value(name).dim() == 3 and feature.dim() == 3
            if feature.dim() >= 2 and feature.shape[0] == rows:
                keep = None if convolution else self._keep(feature, rows)
                return pool(feature, rows, channel_dim=1 if convolution else None, keep=keep)
            if feature.dim() == 2 and feature.shape[0] and feature.shape[0] % rows == 0:
                self.flattened.add(name)
                feature = feature.reshape(rows, -1, feature.shape[-1])  # tokens were flattened: [rows * t, d]
                return pool(feature, rows, keep=self._keep(feature, rows))
            return None
        if feature.dim() == 2:
            feature = feature.reshape(-1, rows, feature.shape[-1])  # steps were flattened: [t * rows, d]
        return pool(feature, rows, row_dim=1, keep=self._keep(feature.movedim(1, 0), rows))

    def _map(self, feature: Tensor, rows: int, name: str) -> FeatureMap | None:
        """Return the feature map; None if the feature has no positions: one vector per row, or a map of a single position."""
        slot = self.table.record.slots.get(name)
        kernel = self.table.value(name).dim() - 2 if slot is not None else 0
        keep = None
        if self._is_time_first(feature, rows, name):
            feature = (feature.reshape(-1, rows, feature.shape[-1]) if feature.dim() == 2 else feature).movedim(1, 0)
            keep = self._keep(feature, rows)
        elif feature.dim() == 2 and feature.shape[0] != rows and feature.shape[0] % rows == 0:
            feature = feature.reshape(rows, -1, feature.shape[-1])  # tokens were flattened: [rows * t, d]
        channels_first = kernel > 0 and feature.dim() == kernel + 2
        if feature.dim() < 3 or feature.shape[0] != rows:
            return None
        if not channels_first:
            keep = self._keep(feature, rows)
            feature = feature.movedim(-1, 1)
        if feature.dim() > 5 or feature[0, 0].numel() < 2:
            return None
        return FeatureMap(feature, channels_first, keep)

    def _is_time_first(self, feature: Tensor, rows: int, name: str) -> bool:
        """Whether the rows are in the second dimension: known from the type of layer, otherwise from the first shapes that tell."""
        slot = self.table.record.slots.get(name)
        path = slot.owners[0][0] if slot is not None else ""
        if feature.dim() >= 2 and slot is not None:
            layer = self.table.module(path)
            if isinstance(layer, nn.RNNBase) and feature.dim() == 3:
                if not layer.batch_first and feature.shape[1] != rows and feature.shape[0] == rows:
                    self.by_step.add(name)
                return feature.shape[1] == rows and not (layer.batch_first and feature.shape[0] == rows)
            attention = layer if path else None
            if path.endswith("out_proj"):
                attention = self.table.module(path.rpartition(".")[0])
            if isinstance(attention, nn.MultiheadAttention) and rows > 0:
                # torch computes with [t, rows, d], and with [t * rows, d] in the output projection
                flat = feature.dim() == 2 and feature.shape[0] != rows and feature.shape[0] % rows == 0
                if flat:
                    self.flattened.add(name)
                return flat or (feature.dim() == 3 and feature.shape[1] == rows)
        if feature.dim() < 3:
            return False
        if feature.shape[0] != feature.shape[1] and rows in feature.shape[:2]:
            self.method._time_first.setdefault(name, feature.shape[1] == rows)
        elif feature.shape[0] == rows and name not in self.method._time_first:
            self.square.add(name)
        is_time_first = self.method._time_first.get(name, False) and feature.shape[1] == rows
        if is_time_first and feature.shape[0] % rows == 0:
            self.flattened.add(name)  # or [rows * windows, steps, d] with as many steps as rows
        return is_time_first

    def _keep(self, feature: Tensor, rows: int) -> Tensor | None:
        """Return the mask of steps if it matches the feature [rows, t, d], otherwise None."""
        keep = self.keep
        matches = keep is not None and feature.dim() == 3 and keep.shape == feature.shape[:2] and keep.shape[0] == rows
        return keep.to(feature.device) if matches and keep is not None else None


__all__ = ["FeatureMap", "FeatureTap"]
