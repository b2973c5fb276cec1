"""What modules have registered, of which forward may create nothing but caches."""

from __future__ import annotations

from torch import nn

from .branch import replaced_parameter
from .effects.attributes import Attribute, Tree


def registered(tree: Tree) -> dict[Attribute, dict[str, int]]:
    """Return the ids of each module's registered tensors and sub-modules, by (path, kind) and name."""
    return {
        (path, kind): {name: id(item) for name, item in module.__dict__[kind].items() if item is not None}
        for path, module in tree.items()
        for kind in ("_parameters", "_buffers", "_modules")
    }


def new_caches(
    root: nn.Module,
    tree: Tree,
    before: dict[Attribute, dict],
    after: dict[Attribute, dict],
    taken_over: set[str],
) -> frozenset[Attribute]:
    """Return the buffers that forward created and that no file holds, of which each branch keeps its own; refuse other tensors and layers."""
    caches = set()
    for (path, kind), contents in after.items():
        earlier = before.get((path, kind), {})
        word = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "layer"}[kind]
        for name, key in contents.items():
            where = f"{path}.{name}" if path else name
            if name not in earlier:
                if kind == "_buffers" and name in tree[path]._non_persistent_buffers_set:
                    caches.add((path, name))
                    continue
                raise RuntimeError(
                    f"forward of {root._get_name()} creates the {word} {where!r}, which would be missing from optimizers, state_dict and "
                    "voters; call the model once with real inputs before wrapping it"
                )
            if kind == "_parameters" and earlier[name] != key and where not in taken_over:
                raise RuntimeError(replaced_parameter(root._get_name(), where))
            if kind == "_modules" and earlier[name] != key:
                raise RuntimeError(
                    f"forward of {root._get_name()} replaces the layer {where!r}, which would happen in one branch only; make the change "
                    "before wrapping"
                )
    return frozenset(caches)


__all__ = ["new_caches", "registered"]
