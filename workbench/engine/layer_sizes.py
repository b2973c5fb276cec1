"""Sizes of layers, from which it follows how fast the branches run at once."""

from __future__ import annotations

from math import prod

from torch import nn

from .effects.attributes import Tree


def linear_size(tree: Tree) -> tuple[int, int]:
    """Return the number of weights of a network with linear layers only, and the largest number of inputs or outputs of one; 0 for others."""
    layers = [module for module in tree.values() if module._parameters]
    if not layers or any(not isinstance(layer, nn.Linear) for layer in layers):
        return 0, 0
    sizes = [(layer.in_features, layer.out_features) for layer in layers if isinstance(layer, nn.Linear)]
    return sum(a * b for a, b in sizes), max(map(max, sizes))


def kernel_sizes(tree: Tree) -> dict[str, int]:
    """Return the number of weights of each convolution by slot."""
    return {
        f"{path}.weight".removeprefix("."): layer.out_channels
        * layer.in_channels
        // layer.groups
        * prod(layer.kernel_size)
        for path, layer in tree.items()
        if isinstance(layer, nn.modules.conv._ConvNd)
    }


__all__ = ["kernel_sizes", "linear_size"]
