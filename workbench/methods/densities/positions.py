"""Density of the features at each position of a map, for each layer at its own resolution."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.methods.densities.base import Density
from workbench.methods.densities.moments import full_precision, robust_moments
from workbench.methods.densities.reduce import Growing

_CHUNK = 1 << 16  # positions scored at a time, which bounds the memory
_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
TOP_SHARE = 0.05  # share of the riskiest positions of an image, whose mean risk is that of the image


class Positions(Growing):
    """One density per layer, of its input at single positions; the standardized scores are added at the output's positions.

    The score of each layer is computed at the layer's own resolution and then interpolated linearly (corners not aligned), so that features
    are never interpolated. The risk of a position is the sum over layers, standardized on held-out images; that of an image is the mean over
    the 5 % of its positions with the highest risk, standardized in the same way. AUROC of images, on cluttered scenes of discs, squares and
    bars, for scenes with a new shape: .895, against .860 by the mean over all positions, .805 by their maximum and .868 by mean entropy.

    Args:
        template: density that each layer gets a copy of.

    Example:
        >>> from workbench.methods.densities import Gaussian
        >>> maps = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
        >>> density = Positions(Gaussian())
        >>> density.fit([maps], None)
        >>> density.layer_map(0, torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 8, 8])
    """

    moments: Tensor

    def __init__(self, template: Density) -> None:
        super().__init__()
        self._template = (template,)  # in a tuple, so that it is not registered as a submodule
        self.layers = nn.ModuleList()
        self.register_buffer("moments", torch.tensor([0.0, 1.0, 0.0, 1.0]))  # centre and scale of positions, of images

    @property
    def template(self) -> Density:
        """The chosen density, unfitted."""
        return self._template[0]

    @property
    def fitted(self) -> bool:
        """Whether training data were seen."""
        return len(self.layers) > 0 and all(layer.fitted for layer in self.layers)

    def fit(self, features: Sequence[Tensor], logits: Tensor | None, seed: int = 0) -> None:
        """Learn each layer's density from a sample of positions.

        Args:
            features: one tensor [positions, channels] per layer, with the same positions; empty for densities of class scores.
            logits: class scores [positions, classes]; None without classes.
            seed: seed of the held-out rows.

        Raises:
            TypeError, ValueError: as `Density.fit`.
        """
        layers = [copy.deepcopy(self.template) for _ in features or (None,)]
        for i, layer in enumerate(layers):
            layer.fit([features[i]] if features else [], logits, seed=seed)
        self.layers = nn.ModuleList(layers)
        like = features[0] if features else logits
        self.moments = self.moments.new_tensor([0.0, 1.0, 0.0, 1.0]).to(like.device)  # type: ignore[union-attr]

    def layer_map(self, i: int, feature: Tensor) -> Tensor:
        """Return the standardized score of one layer at each of its positions.

        Args:
            i: index of the layer.
            feature: Tensor [n, channels, ...]; class scores for densities of class scores.

        Returns:
            Tensor [n, ...], float32 at least.
        """
        layer: Any = self.layers[i]
        flat = feature.movedim(1, -1).reshape(-1, feature.shape[1]).split(_CHUNK)
        scores = [layer.score([part]) if layer.needs_features else layer.score([], part) for part in flat]
        return ((torch.cat(scores) - layer.centre) / layer.scale).reshape(len(feature), *feature.shape[2:])

    def raw(self, maps: Sequence[Tensor], size: Sequence[int]) -> Tensor:
        """Return the sum over layers at the output's positions, not standardized.

        Args:
            maps: result of `layer_map` for each layer, [n, ...] at its own resolution.
            size: number of positions of the output along each axis.
        """
        with full_precision(maps[0]):
            return torch.stack([_resize(scores, tuple(size)) for scores in maps]).sum(0)

    def standardize(self, raw: Sequence[Tensor], keep: Sequence[Tensor | None]) -> None:
        """Set centre and scale from held-out images.

        Args:
            raw: result of `raw` for each batch.
            keep: for each batch, mask of the positions that are not padding, in the same shape; None for all.
        """
        flat = torch.cat(
            [(part if kept is None else part[kept]).flatten() for part, kept in zip(raw, keep, strict=True)]
        )
        position_moments = robust_moments(flat[:: 1 + len(flat) // 1_000_000])
        tops = torch.cat([_top_mean(part, kept) for part, kept in zip(raw, keep, strict=True)])
        image_moments = robust_moments((tops - position_moments[0]) / position_moments[1])
        self.moments = torch.stack([*position_moments, *image_moments]).to(self.moments)

    def of_positions(self, raw: Tensor) -> Tensor:
        """Return the risk of each position, from the result of `raw`."""
        return (raw - self.moments[0]) / self.moments[1]

    def of_images(self, raw: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return the risk [n] of each image, from the result of `raw`."""
        return (_top_mean(self.of_positions(raw), keep) - self.moments[2]) / self.moments[3]

    @property
    def needs_features(self) -> bool:
        """Whether features of layers are used."""
        return self.template.needs_features

    def forget(self) -> None:
        """Reset to the unfitted state."""
        self.layers = nn.ModuleList()
        self.moments.copy_(self.moments.new_tensor([0.0, 1.0, 0.0, 1.0]))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        start = f"{prefix}layers."
        count = len({key[len(start) :].split(".")[0] for key in state_dict if key.startswith(start)})
        if not self.fitted:  # children are loaded after their parent, so it is enough to create them here
            self.layers = nn.ModuleList(copy.deepcopy(self.template).to(self.moments) for _ in range(count))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _resize(scores: Tensor, size: tuple[int, ...]) -> Tensor:
    if tuple(scores.shape[1:]) == size:
        return scores
    return F.interpolate(scores[:, None], size=size, mode=_MODES[len(size)], align_corners=False)[:, 0]


def _top_mean(risk: Tensor, keep: Tensor | None) -> Tensor:
    """Return the mean [n] over the share `TOP_SHARE` of the riskiest positions of each row, at least one."""
    flat = risk.flatten(1)
    if keep is None:
        return flat.topk(max(1, round(TOP_SHARE * flat.shape[1])), 1).values.mean(1)
    keep = keep.flatten(1)
    ordered = flat.masked_fill(~keep, -torch.inf).sort(1, descending=True).values
    count = (TOP_SHARE * keep.sum(1)).round().clamp_min(1)
    chosen = torch.arange(flat.shape[1], device=flat.device) < count[:, None]
    return ordered.where(chosen & keep.any(1, keepdim=True), 0).sum(1) / count


__all__ = ["Positions"]
