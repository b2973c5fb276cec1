"""Trees of inputs and outputs.

Nodes are mappings, lists, tuples, namedtuples, dataclasses and torch distributions; everything else is a leaf. A dict or dataclass may also hold
tensors in attributes that are no item or field: these are values of the node too.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
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
        items = [(f"[{key!r}]", value) for key, value in node.items()]
        return items + [(f".{name}", value) for name, value in _extras(node).items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{key}", value) for key, value in zip(node._fields, node, strict=True)]
    if isinstance(node, list | tuple) and not isinstance(node, torch.Size):
        return [(f"[{i}]", value) for i, value in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{name}", value) for name, value in {**_fields(node), **_extras(node)}.items()]
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

    def __init__(self, items: dict[str, Any], extras: dict[str, Any], kept: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.extras, self.kept = extras, kept


def _fields(node: Any) -> dict[str, Any]:
    """Return the fields of a dataclass."""
    return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}


def _attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of an object; a plain dict has none, which Dynamo does not know."""
    return {} if type(node) is dict else getattr(node, "__dict__", {})


def _extras(node: Any) -> dict[str, Any]:
    """Return the attributes of a dict or dataclass that hold tensors which are in none of its items or fields."""
    if type(node) is _Items:
        return node.extras
    attributes = _attributes(node)
    if not attributes or attributes is node:
        return {}
    if isinstance(node, Mapping) and (dataclasses.is_dataclass(node) or not isinstance(node, dict)):
        return {}  # built by its constructor, or a mapping that keeps its items in attributes
    known = node if isinstance(node, Mapping) else _fields(node)
    others = {
        name: direct
        for name, value in attributes.items()
        if name not in known and (direct := _direct_tensors(value)) and not _is_cached(node, name)
    }
    ids = {id(tensor) for tensor in tensors(list(known.values()))} if others else set()
    return {
        name: attributes[name] for name, direct in others.items() if any(id(tensor) not in ids for tensor in direct)
    }


def _direct_tensors(value: Any) -> list[Tensor]:
    """Return a tensor, or those in a list, tuple or dict; not those further in, since objects may refer to each other in circles."""
    values = values_of(value) if type(value) in (list, tuple, dict) else [value]
    return [each for each in values or () if isinstance(each, Tensor)]


def _is_cached(node: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(type(node), name, None), functools.cached_property)


def _renewed(node: Any) -> Any:
    """Return a shallow copy that will compute its cached properties from its own values."""
    new = copy.copy(node)
    attributes = _attributes(node)
    if attributes is node:  # items are attributes as well
        new.__dict__ = new
        return new
    for name in attributes:
        if _is_cached(node, name):
            new.__dict__.pop(name, None)
    return new


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
        items = dict(zip(node.keys(), values, strict=False))  # iterating over a TensorDict gives its rows
        extras = dict(zip(_extras(node), values[len(items) :], strict=True))
        kept = node.kept if type(node) is _Items else node
        try:
            new: Any = _renewed(kept)
            for key, value in items.items():
                new[key] = value
        except Exception:
            return _Items(items, extras, kept)
        if isinstance(kept, dict) and (attributes := _attributes(new)):
            # an item may be an attribute as well, which setting the item has not changed
            same = {name: items[name] for name, value in attributes.items() if name in items and value is kept[name]}
            attributes.update(same | extras)
        return new
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)._make(values)  # type: ignore[attr-defined]  # bypasses constructors that check or compute, as PackedSequence's does
    if isinstance(node, list | tuple):
        return type(node)(values)
    if isinstance(node, Distribution):
        return _rebuild_distribution(node, values)
    new = _renewed(node)
    for name, value in zip({**_fields(node), **_extras(node)}, values, strict=True):
        object.__setattr__(new, name, value)
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
    kind: Any = type(node)
    if not kind.__module__.startswith("torch.distributions."):
        return {}
    names = list(node.arg_constraints)
    if not _required(kind) <= {*names}:  # a temperature, say, of which the class does not tell
        return {}
    for one, other in (("probs", "logits"), ("covariance_matrix", "scale_tril"), ("precision_matrix", "scale_tril")):
        if one in names and other in names:
            names.remove(one if other in node.__dict__ or one != "probs" else other)
    return {name: getattr(node, name) for name in names}


@functools.cache
def _required(kind: type[Distribution]) -> frozenset[str]:
    """Return the names of the constructor's arguments without default."""
    arguments = inspect.signature(kind).parameters.items()
    return frozenset(name for name, argument in arguments if argument.default is argument.empty)


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
