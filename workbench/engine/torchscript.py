"""Graphs of tensor operations as functions of TorchScript, whose interpreter runs them without Python."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

# numbers that TorchScript has for them, in the order of c10::ScalarType and its likes
_NUMBERS: dict[Any, int] = {
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
    """What was recorded would not be the same for other numbers, or cannot be run otherwise than by Python."""


def script(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> Callable[..., Any]:
    """The same as a function of TorchScript, whose interpreter takes a microsecond less for each operation than Python does."""
    lines: list[str] = []
    names: dict[fx.Node, str] = {}
    parts: dict[fx.Node, list[str]] = {}
    inputs, outputs = [], []
    numbers = iter(range(10**9))

    def new() -> str:
        return f"%v{next(numbers)}"

    def put(value: Any, kind: str) -> str:
        """The name of an argument, which is written down first if it is a constant."""
        if isinstance(value, fx.Node):
            return names[value]
        name = new()
        if isinstance(value, list | tuple):
            item = next((k for k in ("Optional[Tensor]", "Tensor", "bool", "float", "int") if k in kind), "int")
            items = [put(each, item) for each in value]
            word = "Tensor?" if item == "Optional[Tensor]" else item
            lines.append(f"{name} : {word}[] = prim::ListConstruct({', '.join(items)})")
            return name
        word, text = _constant(value, kind)
        lines.append(f"{name} : {word} = prim::Constant{text}()")
        return name

    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = new()
            inputs.append(names[node])
        elif node.op == "output":
            outputs = [names[each] for each in node.args[0]]
        elif node.target is operator.getitem:
            names[node] = parts[node.args[0]][node.args[1]]
        else:
            schema = node.target._schema
            arguments = [
                put(node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value), str(a.type))
                for i, a in enumerate(schema.arguments)
            ]
            results = [new() for _ in schema.returns]
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
                parts[node] = [new() for _ in range(values[node])]
                lines.append(
                    f"{', '.join(f'{part} : Tensor' for part in parts[node])} = prim::ListUnpack({results[0]})"
                )
    lines.append(f"%out : Tensor[] = prim::ListConstruct({', '.join(outputs)})")
    head = ", ".join(f"{name} : Tensor" for name in inputs)
    text = f"graph({head}):\n  " + "\n  ".join(lines) + "\n  return (%out)\n"
    return torch._C._create_function_from_graph("step", torch._C.parse_ir(text))


def _constant(value: Any, kind: str) -> tuple[str, str]:
    """Type and value of a constant in TorchScript."""
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
        return "int", f"[value={_NUMBERS[value]}]"
    except (KeyError, TypeError):
        raise RefusedError(f"a constant {value!r}") from None


__all__ = ["RefusedError", "script"]
