"""Conversion of graphs of tensor operations to TorchScript functions, whose interpreter runs them without Python."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

# integer codes in TorchScript: c10::ScalarType, c10::Layout and c10::MemoryFormat
_CODES: dict[Any, int] = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.strided: 0,
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


class RefusedError(Exception):
    """Raised if a computation cannot be recorded: it may differ for other values, or can be run by Python only."""


def script(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> Callable[..., Any]:
    """Return a graph as a TorchScript function, which takes a microsecond less per operation than Python.

    Args:
        graph: the graph.
        values: length of the list that a node returns, for nodes that return lists.

    Raises:
        RefusedError: if a constant cannot be expressed in TorchScript.
    """
    lines: list[str] = []
    names: dict[fx.Node, str] = {}
    parts: dict[fx.Node, list[str]] = {}
    inputs, outputs = [], []
    numbers = iter(range(10**9))

    def new_name() -> str:
        return f"%v{next(numbers)}"

    def define(value: Any, kind: str) -> str:
        """Return the name of an argument; a constant is defined first."""
        if isinstance(value, fx.Node):
            return names[value]
        name = new_name()
        if isinstance(value, list | tuple):
            item_type = next((k for k in ("Optional[Tensor]", "Tensor", "bool", "float", "int") if k in kind), "int")
            items = [define(item, item_type) for item in value]
            word = "Tensor?" if item_type == "Optional[Tensor]" else item_type
            lines.append(f"{name} : {word}[] = prim::ListConstruct({', '.join(items)})")
            return name
        word, text = _constant(value, kind)
        lines.append(f"{name} : {word} = prim::Constant{text}()")
        return name

    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = new_name()
            inputs.append(names[node])
        elif node.op == "output":
            outputs = [names[item] for item in node.args[0]]
        elif node.target is operator.getitem:
            names[node] = parts[node.args[0]][node.args[1]]
        else:
            schema = node.target._schema
            arguments = [
                define(node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value), str(a.type))
                for i, a in enumerate(schema.arguments)
            ]
            results = [new_name() for _ in schema.returns]
            is_list = len(results) == 1 and "List" in str(schema.returns[0].type)
            typed = ", ".join(f"{result} : {'Tensor[]' if is_list else 'Tensor'}" for result in results)
            lines.append(
                f"{typed} = {schema.name}({', '.join(arguments)})"
                if typed
                else f"{schema.name}({', '.join(arguments)})"
            )
            parts[node] = results
            if results:
                names[node] = results[0]
            if is_list:
                parts[node] = [new_name() for _ in range(values[node])]
                lines.append(
                    f"{', '.join(f'{part} : Tensor' for part in parts[node])} = prim::ListUnpack({results[0]})"
                )
    lines.append(f"%out : Tensor[] = prim::ListConstruct({', '.join(outputs)})")
    head = ", ".join(f"{name} : Tensor" for name in inputs)
    text = f"graph({head}):\n  " + "\n  ".join(lines) + "\n  return (%out)\n"
    return torch._C._create_function_from_graph("step", torch._C.parse_ir(text))


def _constant(value: Any, kind: str) -> tuple[str, str]:
    """Return the type and the value of a constant in TorchScript."""
    if value is None:
        return "NoneType", ""
    if isinstance(value, bool):
        return "bool", f"[value={int(value)}]"
    if isinstance(value, float) or (isinstance(value, int) and "float" in kind):
        if math.isnan(value):
            raise RefusedError("NaN")
        return "float", f"[value={float(value)!r}]"
    if isinstance(value, int):
        return "int", f"[value={value}]"
    if isinstance(value, torch.device):
        return "Device", f'[value="{value}"]'
    if isinstance(value, str) and value.isidentifier():
        return "str", f'[value="{value}"]'
    try:
        return "int", f"[value={_CODES[value]}]"
    except (KeyError, TypeError):
        raise RefusedError(f"a constant {value!r}") from None


__all__ = ["RefusedError", "script"]
