"""The training cases nearest to a case."""

from __future__ import annotations

import functools
import html
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.calibration.base import Calibrated
from workbench.core.additions import extra
from workbench.core.batches.rows import CHECKED_AT_ONCE
from workbench.core.wrapped import Wrapped, is_wrapped, unwrap
from workbench.data import Data
from workbench.engine.clone import eager
from workbench.errors import require
from workbench.widgets.common.cases import MAX_COLUMNS, format_number, table_head, thumbnail
from workbench.widgets.common.inputs import rows_at_once, sampled_rows

MAX_ROWS = 5000  # training rows that are searched


class Nearest(NamedTuple):
    """Training rows nearest to a case: row numbers (int64 [k]), distances (float [k]) and targets, nearest first."""

    indices: Tensor
    distances: Tensor
    targets: Tensor


class NeighbourSearch:
    """Search for the training cases nearest to a case.

    In "inputs" the distance is Euclidean after dividing each column by its standard deviation over the training rows (for pictures, all
    pixels by the same). In "features" it is the same for the inputs of the model's last linear layer, of its first voter if it votes.

    Args:
        wrapped: wrapped or calibrated model; it is not changed.
        x: inputs of the training rows [n, ...]; of more than 5,000 rows, a random 5,000 drawn with seed 0 are searched.
        y: targets of the training rows [n, ...].
        space: "inputs" or "features".

    Raises:
        ValueError: for another space, or if the model has no linear layer whose input is one feature vector for each row.

    Example:
        >>> from workbench import vote
        >>> x = torch.tensor([[0.0], [1.0], [5.0]])
        >>> search = NeighbourSearch(vote.Wrapper(3)(nn.Linear(1, 1)), x, x)
        >>> search.of(torch.tensor([1.2]), k=2).indices
        tensor([1, 0])
    """

    def __init__(self, wrapped: nn.Module, x: Tensor, y: Tensor, space: str = "inputs") -> None:
        if space not in ("inputs", "features"):
            raise ValueError(f"space must be 'inputs' or 'features'; found {space!r}")
        self.space, self.x, self.y = space, x, y
        self.rows = sampled_rows(len(x), MAX_ROWS)
        x = x if len(self.rows) == len(x) else x[self.rows]
        self._features = Features(wrapped) if space == "features" else None
        # a copy of scaled pixels in double precision would take several times their memory
        self._pixels = x.detach().flatten(1) if space == "inputs" and x.ndim > 2 else None
        if self._pixels is not None:
            mean = functools.reduce(Tensor.add_, (part.sum(0, dtype=torch.float64) for part in self._parts())) / len(x)
            spread = self._lengths(mean).square().mean().div(self._pixels.shape[1]).sqrt()
            self._scale = torch.where(spread > 0, spread, 1.0)
            return
        known = self._vectors(x)
        self._mean = known.mean(0)
        spread = known.std(0, correction=0)
        self._scale = torch.where(spread > 0, spread, 1.0)
        vectors = ((known - self._mean) / self._scale).numpy()
        self._tree = require("sklearn.neighbors").NearestNeighbors().fit(vectors)

    def of(self, x: Tensor, k: int = 5) -> Nearest:
        """Return the k training rows nearest to one row x [...]; ties are in no particular order."""
        k = min(k, len(self.rows))
        if self._pixels is not None:
            nearest = (self._lengths(x.detach().flatten()) / self._scale).topk(k, largest=False)
            distances, places = nearest.values, nearest.indices
        else:
            vector = (self._vectors(x[None]) - self._mean) / self._scale
            distances, places = (torch.from_numpy(part[0]) for part in self._tree.kneighbors(vector.numpy(), k))
        indices = self.rows[places]
        return Nearest(indices, distances, self.y[indices])

    def _parts(self) -> Sequence[Tensor]:
        """Return the pixels of the training rows [n, d] in parts of some rows."""
        assert self._pixels is not None
        return self._pixels.split(max(1, CHECKED_AT_ONCE // self._pixels.shape[1]))

    def _lengths(self, pixels: Tensor) -> Tensor:
        """Return the Euclidean distances of all training rows from pixels [d]."""
        assert self._pixels is not None
        pixels = pixels.to(self._pixels.device, torch.promote_types(self._pixels.dtype, torch.float32))
        lengths = [torch.linalg.vector_norm(part - pixels, dim=1, dtype=torch.float64) for part in self._parts()]
        return torch.cat(lengths).cpu()

    def _vectors(self, x: Tensor) -> Tensor:
        return (x.detach().cpu() if self._features is None else self._features(x)).flatten(1).double()


class Features:
    """The input of the last linear layer of a model, for each row.

    Args:
        wrapped: wrapped or calibrated model.

    Raises:
        ValueError: if the model has no linear layer.
    """

    def __init__(self, wrapped: Any) -> None:
        while isinstance(wrapped, Calibrated):
            wrapped = wrapped.wrapped
        # a structural copy that shares the tensors, so that the user's layers get no hook
        model: Any = unwrap(eager(wrapped))
        self._scaling = None
        if is_wrapped(model):  # the remaining wrapper only scales inputs and outputs
            self._scaling = extra(model, "scaling")
            Wrapped.unscale(model)
            model = unwrap(model)
        self._model = model.eval()
        linear = [module for module in self._model.modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise ValueError(
                f"space='features' needs a linear layer, and {type(self._model).__name__} has none; use space='inputs'"
            )
        self._seen: Tensor | None = None
        linear[-1].register_forward_pre_hook(self._keep)
        like = next(self._model.parameters())
        self._device, self._dtype = like.device, like.dtype

    def _keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._seen = args[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Return features [n, d] of inputs x [n, ...], on the CPU."""
        parts: list[Tensor] = []
        with torch.no_grad():
            for batch in x.split(rows_at_once(x, 512)):
                self._seen = None
                inputs = (batch.to(self._device, self._dtype),)
                self._model(*(inputs if self._scaling is None else self._scaling.inputs(inputs, {}, exact=False)[0]))
                if self._seen is None or len(self._seen) != len(batch):
                    raise ValueError(
                        "space='features' needs one feature vector for each row before the last linear layer; use space='inputs'"
                    )
                parts.append(self._seen.flatten(1).cpu())
        return torch.cat(parts)


def page(nearest: Nearest, data: Data, space: str, x: Tensor | None = None) -> str:
    """Return training cases with their targets and distances as HTML: thumbnails, or rows of a table.

    Args:
        nearest: training cases.
        data: data set of the training rows.
        space: space of the distances, for the caption.
        x: case that they are nearest to [features], shown above them with the features; only distances and targets if None.
    """
    near = data.train.x[nearest.indices]
    targets = [
        format_number(y.item(), data.target.unit) if data.classes is None else data.classes[int(y)]
        for y in nearest.targets
    ]
    distances = [f"{distance:.3g}" for distance in nearest.distances.tolist()]
    caption = f"nearest training cases{' with their distance' if near.ndim > 2 else ''}, by {space}"
    if near.ndim > 2:
        cards = "".join(
            f'<div class="wb-case wb-near">{thumbnail(row, data.train.x, f"training row {index}")}'
            f'<b>{html.escape(target)}</b><br><span class="wb-name">{distance}</span></div>'
            for row, index, target, distance in zip(near, nearest.indices.tolist(), targets, distances, strict=True)
        )
        return f'<div class="wb-caption">{caption}</div><div class="wb-cases">{cards}</div>'
    columns = list(map(str, data.features))[: MAX_COLUMNS if x is not None else 0]
    if x is not None and len(data.features) > MAX_COLUMNS:
        caption += f" ({MAX_COLUMNS} of {len(data.features)} features shown)"
    heads = "".join(map(table_head, ("distance", str(data.target), *columns)))
    lines = list(zip(distances, targets, near, strict=True))
    if x is not None:
        lines.insert(0, ("this case", "", x))
    rows = "".join(
        f"<tr><td>{distance}</td><td><b>{html.escape(target)}</b></td>"
        f"{''.join(f'<td>{format_number(value)}</td>' for value in row[: len(columns)].tolist())}</tr>"
        for distance, target, row in lines
    )
    return (
        f'<div class="wb-wide"><table class="wb-listing"><caption>{caption}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


__all__ = ["Features", "Nearest", "NeighbourSearch", "page"]
