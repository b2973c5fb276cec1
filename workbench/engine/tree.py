"""Trees of inputs and outputs.

Nodes are mappings, lists, tuples, namedtuples, dataclasses and torch distributions; everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MixtureSameFamily

Rebuild = Callable[[Iterator[Any]], Any]
_BRACKETS = "[].'\""
_LEAVES = frozenset([Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device])


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Return the named values of a container, None for a leaf."""
    if type(node) in _LEAVES:
        return None
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{key}", value) for key, value in zip(node._fields, node, strict=True)]
    if isinstance(node, list | tuple) and not isinstance(node, torch.Size):
        return [(f"[{i}]", value) for i, value in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    if isinstance(node, Distribution):
        return [(f".{name}", value) for name, value in _parameters(node).items()] or None
    return None


def values_of(node: Any) -> Sequence[Any] | None:
    """Return the values of a container without names, None for a leaf; has fast paths for common types, since it is called often."""
    kind = type(node)
    if kind in _LEAVES:
        return None
    if kind is tuple or kind is list:
        return node
    if kind is dict:
        return list(node.values())
    named = children(node)
    return None if named is None else [value for _, value in named]


class _Items(dict):
    """Items that a mapping does not take, such as tensors with the axes of branches in front; a tree like it is again of the mapping's class."""

    def __init__(self, items: dict[str, Any], kept: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.kept = kept


def like(node: Any, values: list[Any]) -> Any:
    """Return a container of the same type as `node` that holds `values`."""
    if type(node) is tuple:
        return tuple(values)
    if isinstance(node, Mapping):
        if type(node) is dict:
            return dict(zip(node, values, strict=True))
        # an output class that is both a mapping and a dataclass: only the constructor keeps the two consistent
        if dataclasses.is_dataclass(node):
            return type(node)(**dict(zip(node, values, strict=True)))
        items = dict(zip(node.keys(), values, strict=True))  # iterating over a TensorDict gives its rows
        kept = node.kept if type(node) is _Items else node
        new: Any = copy.copy(kept)
        try:
            for key, value in items.items():
                new[key] = value
        except Exception:
            return _Items(items, kept)
        return new
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)._make(values)  # type: ignore[attr-defined]  # bypasses constructors that check or compute, as PackedSequence's does
    if isinstance(node, list | tuple):
        return type(node)(values)
    if isinstance(node, Distribution):
        return _rebuild_distribution(node, values)
    new = copy.copy(node)
    for field, value in zip(dataclasses.fields(node), values, strict=True):
        object.__setattr__(new, field.name, value)
    return new


def _is_lazy(node: Distribution) -> bool:
    """Return whether a distribution is gpytorch's multivariate normal with a lazy covariance."""
    return type(node).__name__ == "MultivariateNormal" and hasattr(node, "lazy_covariance_matrix")


def _rebuild_distribution(node: Distribution, values: list[Any]) -> Distribution:
    if _is_lazy(node):
        # without noise, the covariance of a process is often singular in floating point, so it is not factorized
        mean, covariance = values
        lazy = sys.modules["linear_operator"].to_linear_operator(covariance)
        return type(node)(mean, lazy)
    return type(node)(**dict(zip(_parameters(node), values, strict=True)), validate_args=False)


def _parameters(node: Distribution) -> dict[str, Any]:
    """Return the constructor parameters of a torch distribution, expanded to its batch shape; {} if they are unknown."""
    if type(node) is Independent:
        return {"base_distribution": node.base_dist, "reinterpreted_batch_ndims": node.reinterpreted_batch_ndims}
    if type(node) is MixtureSameFamily:
        parts = node.component_distribution
        return {
            "mixture_distribution": node.mixture_distribution.expand(parts.batch_shape[:-1]),
            "component_distribution": parts,
        }
    if _is_lazy(node):
        return {"mean": node.mean, "covariance_matrix": node.covariance_matrix}  # type: ignore[attr-defined]
    if not type(node).__module__.startswith("torch.distributions."):
        return {}
    names = list(node.arg_constraints)
    for one, other in (("probs", "logits"), ("covariance_matrix", "scale_tril"), ("precision_matrix", "scale_tril")):
        if one in names and other in names:
            names.remove(one if other in node.__dict__ or one != "probs" else other)
    return {name: getattr(node, name) for name in names}


def flatten(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a tree in order, and a function that rebuilds the tree from a sequence of equally many leaves."""
    leaves: list[Any] = []
    rebuild = _flatten_node(tree, leaves)
    return leaves, lambda values: rebuild(iter(values))


def _flatten_node(node: Any, leaves: list[Any]) -> Rebuild:
    # not inside `flatten`: a recursive closure is a reference cycle, which would keep tensors alive until garbage collection
    values = values_of(node)
    if values is None:
        leaves.append(node)
        return next
    rebuilds = [_flatten_node(value, leaves) for value in values]
    return lambda iterator: like(node, [rebuild(iterator) for rebuild in rebuilds])


def paths(tree: Any, root: str = "output") -> list[str]:
    """Return the path of every leaf, in the order of `flatten`, such as "output['logits'][0]"."""
    items = children(tree)
    if items is None:
        return [root]
    return [path for name, value in items for path in paths(value, root + name)]


def names(tree: Any) -> list[str]:
    """Return the dotted name of every leaf, in the order of `flatten`, such as "heads.0"; "" if the tree is a leaf."""
    items = children(tree)
    if items is None:
        return [""]
    return [f"{name.strip(_BRACKETS)}.{rest}".strip(".") for name, value in items for rest in names(value)]


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` to the corresponding leaves of trees with the same structure."""
    if not others and type(tree) in _LEAVES:  # fast path for batches in training steps
        return function(tree)
    leaves, rebuild = flatten(tree)
    return rebuild([function(*items) for items in zip(leaves, *(flatten(other)[0] for other in others), strict=True)])


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `function` to the tensors of a tree; other leaves stay."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def replace_node(tree: Any, name: str, function: Callable[[Any], Any]) -> Any:
    """Return the tree with `function` applied to the node of a dotted name, "" for the whole tree."""
    if not name:
        return function(tree)
    items = [(key.strip(_BRACKETS), value) for key, value in children(tree) or ()]
    values = [
        replace_node(value, name[len(key) + 1 :], function) if name == key or name.startswith(f"{key}.") else value
        for key, value in items
    ]
    return like(tree, values)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves."""
    values = values_of(tree)
    if values is None:
        return [tree] if isinstance(tree, Tensor) else []
    return [leaf for value in values for leaf in tensors(value)]


def version(leaf: Any) -> int:
    """Return the version counter of a tensor, which counts in-place writes; 0 for inference tensors, which have none."""
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


def counting_writes(leaf: Any) -> Any:
    """Return a tensor on the same memory that counts writes, for a tensor created in inference mode; other leaves unchanged."""
    if type(leaf) is not Tensor or not leaf.is_inference() or leaf.layout is not torch.strided:
        return leaf
    if leaf.is_quantized or leaf.is_conj() or leaf.is_neg():
        return leaf
    with torch.inference_mode(False):
        return leaf.new_empty(0).set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())


def versions(leaves: Sequence[Any]) -> list[int]:
    """Return the version counter of every leaf, 0 for non-tensors."""
    return [version(leaf) for leaf in leaves]


def is_float(leaf: Any) -> bool:
    """Return whether a leaf is a floating-point or complex tensor."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def holds(condition: Tensor) -> bool:
    """Return whether a condition holds everywhere, or True where it should not be tested.

    It is not tested under torch.compile and torch.vmap, where values are unavailable; on devices other than the CPU, where each test would
    synchronize the device (results are NaN there instead); and under a dispatch mode, which would record the test, for example as part of a
    training step.
    """
    if torch.compiler.is_compiling() or condition.device.type != "cpu" or torch._C._len_torch_dispatch_stack():
        return True
    try:
        return bool(condition.all())
    except RuntimeError:
        return True
