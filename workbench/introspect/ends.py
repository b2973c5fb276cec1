"""The functions of limited range that the outputs of a model end in, judged by its source, without running it."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

MAX_DEPTH = 30  # of calls within calls
MAX_INPUTS = 50


class End(NamedTuple):
    """An output, or an intermediate result.

    Args:
        function: name of the function of limited range that it ends in, "" if it is the result of a layer.
        layer: path of the layer whose result it is, or that the function is applied to; None for inputs, and if that is unknown.
    """

    function: str
    layer: str | None


# what an expression stands for: an end, named parts, a module with its path, or None for all else
Value = Any

_FUNCTIONS = {
    F.softplus: "softplus",
    torch.relu: "relu",
    F.relu: "relu",
    torch.exp: "exp",
    torch.sigmoid: "sigmoid",
    torch.special.expit: "sigmoid",
    F.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    F.tanh: "tanh",
    F.elu: "elu",
}
_METHODS = {"relu": "relu", "exp": "exp", "sigmoid": "sigmoid", "tanh": "tanh"}
_MODULES = {nn.Softplus: "softplus", nn.ReLU: "relu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.ELU: "elu"}
# they change the shape or the dtype, and no number
_RESHAPES = frozenset([
    "squeeze", "unsqueeze", "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "t", "contiguous", "clone",
    "float", "double", "half", "bfloat16", "to", "T", "mT",
])  # fmt: skip
_SAME = (nn.Identity, nn.Flatten, nn.Unflatten)
_READING = ("torch", "builtins", "math")  # modules whose functions write only where their name or an argument says so


def ends_of(root: nn.Module, method: str = "forward") -> dict[str, End]:
    """Return the outputs that end in a function of limited range, by their dotted names ("" for a single one).

    Ends are left out wherever the source does not show them: behind arithmetic, loops, decorators, hooks, writes, or code of others.

    Args:
        root: the model.
        method: the method whose outputs are meant.

    Returns:
        The ends, with their layers where nothing else uses the layer's result.
    """
    if method == "forward" and _is_called_otherwise(root):
        return {}
    reader = _Reader()
    try:
        value = reader.method(_Part(root, ""), method, [End("", None)] * MAX_INPUTS, {})
    except (AttributeError, RecursionError, TypeError, ValueError):  # source of an unforeseen form
        return {}
    outputs = _named("", value)
    layers = [end.layer for end in outputs.values() if isinstance(end, End)]
    is_clear = len(layers) == len(outputs) and not reader.is_blind
    alone = [
        name
        for name in layers
        if name not in reader.used and (len(outputs) == 1 or (is_clear and layers.count(name) == 1))
    ]
    ends = {name: end for name, end in outputs.items() if isinstance(end, End) and end.function}
    return {name: end if end.layer in alone else End(end.function, None) for name, end in ends.items()}


def _named(name: str, value: Value) -> dict[str, Value]:
    if not isinstance(value, dict):
        return {name: value}
    return {
        inner: end for key, part in value.items() for inner, end in _named(f"{name}.{key}".strip("."), part).items()
    }


class _Part(NamedTuple):
    """A module of the model, with its path."""

    module: nn.Module
    path: str

    def child(self, name: str) -> Any:
        """Return a child of the module, None if it has none of that name."""
        module = self.module._modules.get(name)
        return None if module is None else _Part(module, f"{self.path}.{name}".strip("."))


class _Reader:
    """Follows the calls of a model."""

    def __init__(self) -> None:
        self.depth = 0
        self.used: set[str | None] = set()  # layers whose results other layers take
        self.is_blind = False  # whether layers take results that were not followed

    def call(self, part: _Part, arguments: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
        """Return what a call of a module stands for."""
        module = part.module
        if module._forward_hooks or "forward" in module.__dict__ or _is_called_otherwise(module):
            return None
        if module._forward_pre_hooks and not any(True for _ in module.parameters(recurse=False)):
            return None  # they may change what it takes
        if type(module) in _MODULES:
            has_defaults = getattr(module, "beta", 1) == 1 and getattr(module, "alpha", 1) == 1
            return _ended(_MODULES[type(module)], arguments[0]) if arguments and has_defaults else None
        if type(module) in _SAME:
            return arguments[0] if arguments else None
        return self.method(part, "forward", arguments, keywords)

    def method(
        self,
        part: _Part,
        name: str,
        arguments: Sequence[Value],
        keywords: Mapping[str, Value],
        after: type | None = None,
    ) -> Value:
        """Return what a call of a method stands for; with `after`, of the method that `super()` finds in this class."""
        module, path = part
        classes = getattr(type(module), "_plain_class", type(module)).__mro__
        classes = classes[classes.index(after) + 1 :] if after is not None else classes
        owner = next((cls for cls in classes if name in vars(cls)), nn.Module)
        function = vars(owner).get(name)
        if function is nn.Sequential.forward:
            value = arguments[0] if arguments else None
            for key in module._modules:
                value = self.call(part.child(key), [value], {})
            return value
        if owner.__module__.startswith("torch."):
            if name != "forward" or not any(True for _ in module.parameters()):
                return None
            inputs = [*arguments, *keywords.values()]
            self.used.update(value.layer for value in inputs if isinstance(value, End))
            self.is_blind |= not all(isinstance(value, End) for value in inputs)
            return End("", path)
        if not isinstance(function, FunctionType) or name in vars(module) or self.depth > MAX_DEPTH:
            return None
        definition = _definition(function)
        if definition is None:
            return None
        parameters = [argument.arg for argument in [*definition.args.posonlyargs, *definition.args.args]]
        body = _Body(self, function, owner, {**dict(zip(parameters, [part, *arguments], strict=False)), **keywords})
        self.depth += 1
        body.run(definition.body)
        self.depth -= 1
        return body.returned[0] if body.returned and all(_equal(body.returned[0], r) for r in body.returned) else None


class _Body:
    """The statements of one call of a function.

    Args:
        reader: follows further calls.
        function: the function.
        owner: the class that defines it.
        names: what its variables stand for.
    """

    def __init__(self, reader: _Reader, function: FunctionType, owner: type | None, names: dict[str, Value]) -> None:
        self.reader, self.function, self.owner, self.names = reader, function, owner, names
        self.returned: list[Value] = []
        code = function.__code__
        self.locals = frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars))  # they hide globals

    def run(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if _writes(statement):  # other variables may hold the same tensor
                self.names = {name: value for name, value in self.names.items() if isinstance(value, _Part)}
            match statement:
                case ast.Return(value=value):
                    self.returned.append(None if value is None else self.value(value))
                    return
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.names[name] = self.value(value)
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                    parts = self.value(value)
                    for i, target in enumerate(targets):
                        self._forget(target)
                        if isinstance(target, ast.Name) and isinstance(parts, dict):
                            self.names[target.id] = parts.get(str(i))
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.names[name] = self.value(value)
                case ast.If(body=body, orelse=orelse):
                    before = dict(self.names)
                    self.run(body)
                    after, self.names = self.names, before
                    self.run(orelse)
                    kept = {name for name in after if _equal(after[name], self.names.get(name))}
                    self.names = {name: value for name, value in after.items() if name in kept}
                case ast.With(body=body):
                    self.run(body)
                case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Assert() | ast.Raise():
                    pass
                case _:  # loops, writes in place, calls whose result is not used
                    self._forget(statement)
                    self.returned += [None for node in ast.walk(statement) if isinstance(node, ast.Return)]

    def _forget(self, node: ast.AST) -> None:
        """Forget all variables that a piece of code names, except the model itself."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and not isinstance(self.names.get(part.id), _Part):
                self.names.pop(part.id, None)

    def value(self, node: ast.expr) -> Value:
        """Return what an expression stands for."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return {str(i): self.value(part) for i, part in enumerate(parts)}
            case ast.Dict(keys=keys, values=values):
                named = [key.value for key in keys if isinstance(key, ast.Constant)]
                return (
                    None if len(named) < len(keys) else dict(zip(map(str, named), map(self.value, values), strict=True))
                )
            case ast.IfExp(body=body, orelse=orelse):
                one, other = self.value(body), self.value(orelse)
                return one if _equal(one, other) else None
            case ast.Attribute(value=inner, attr=attribute):
                return self._attribute(self.value(inner), attribute)
            case ast.Subscript(value=inner, slice=key):
                whole = self.value(inner)
                if isinstance(whole, dict):
                    return whole.get(str(key.value)) if isinstance(key, ast.Constant) else None
                if isinstance(whole, _Part) and isinstance(key, ast.Constant):
                    return self._attribute(whole, str(key.value))
                return whole if isinstance(whole, End) else None
            case ast.Call():
                result = self._call(node)
                if result is None and not self._only_reads(node.func):
                    self._forget(node)
                return result
        return None

    def _attribute(self, value: Value, attribute: str) -> Value:
        if isinstance(value, _Part):
            return value.child(attribute)
        return value if isinstance(value, End) and attribute in _RESHAPES else None

    def _only_reads(self, function: ast.expr) -> bool:
        """Return whether a function is one of torch, of Python or of tensors, which change nothing that they take; others may write into it."""
        outside = self._outside(function)
        if outside is not None:
            return str(getattr(outside, "__module__", "")).split(".")[0] in _READING
        return isinstance(function, ast.Attribute) and hasattr(torch.Tensor, function.attr)

    def _call(self, node: ast.Call) -> Value:
        if any(isinstance(argument, ast.Starred) for argument in node.args) or any(
            k.arg is None for k in node.keywords
        ):
            return None
        arguments = [self.value(argument) for argument in node.args]
        keywords = {str(keyword.arg): self.value(keyword.value) for keyword in node.keywords}
        called = self.value(node.func)
        if isinstance(called, _Part):
            if getattr(called.module, "inplace", False):  # other variables may hold the same tensor
                written = [argument for argument in arguments if isinstance(argument, End)]
                self.names = {name: value for name, value in self.names.items() if value not in written}
            return self.reader.call(called, arguments, keywords)
        if isinstance(node.func, ast.Attribute):
            inner, name = self.value(node.func.value), node.func.attr
            if isinstance(inner, _Part):
                if (function := vars(inner.module).get(name)) is not None:  # such as self.activation = torch.relu
                    return self._call_outside(function, arguments, keywords)
                return self.reader.method(inner, name, arguments, keywords)
            if isinstance(inner, End):
                return inner if name in _RESHAPES else _ended(_METHODS.get(name), inner) if not arguments else None
            if _is_super(node.func.value):
                model: Any = next(value for value in self.names.values() if isinstance(value, _Part))
                return self.reader.method(model, name, arguments, keywords, self.owner)
            if not arguments and not keywords and name in _METHODS and self._outside(node.func.value) is None:
                return End(_METHODS[name], None)  # of a result that is not followed, such as the sum of two layers
        return self._call_outside(self._outside(node.func), arguments, keywords)

    def _call_outside(self, function: Any, arguments: list[Value], keywords: dict[str, Value]) -> Value:
        """Return what a call of a function or class stands for that is no part of the model."""
        if function is dict and not arguments:
            return keywords
        if isinstance(function, type):
            fields = getattr(function, "_fields", None)
            # dataclasses that are dicts, such as the outputs of transformers, enter their fields there, others may change them
            is_kept = issubclass(function, dict) or not hasattr(function, "__post_init__")
            if fields is None and dataclasses.is_dataclass(function) and is_kept:
                fields = [field.name for field in dataclasses.fields(function) if field.init]
            return None if fields is None else {**dict(zip(fields, arguments, strict=False)), **keywords}
        if not arguments:
            return None
        is_plain = len(arguments) == 1 and not set(keywords) - {"inplace"}
        if isinstance(function, type(torch.relu) | FunctionType) and function in _FUNCTIONS:
            return _ended(_FUNCTIONS[function], arguments[0]) if is_plain else None
        name = getattr(function, "__name__", "")
        return arguments[0] if name in _RESHAPES and getattr(torch, name, None) is function else None

    def _outside(self, node: ast.expr) -> Any:
        """Return the object that a dotted name such as `torch.nn.functional.relu` has in the function's module, None if there is none."""
        match node:
            case ast.Name(id=name) if name not in self.locals:
                return self.function.__globals__.get(name, getattr(builtins, name, None))
            case ast.Attribute(value=inner, attr=attribute):
                holder = self._outside(inner)
                return None if holder is None else getattr(holder, attribute, None)
        return None


def _ended(function: str | None, value: Value) -> End | None:
    """Return the end of a function that is applied to a value."""
    if function is None:
        return None
    return End(function, value.layer if isinstance(value, End) and not value.function else None)


def _is_called_otherwise(module: nn.Module) -> bool:
    """Return whether the class of a module defines calls itself, instead of torch."""
    cls: Any = getattr(type(module), "_plain_class", type(module))
    return not str(getattr(cls.__call__, "__module__", "")).startswith("torch.")


def _equal(one: Value, other: Value) -> bool:
    return one is other or (type(one) is type(other) and not isinstance(one, _Part) and one == other)


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args


@functools.cache
def _definition(function: FunctionType) -> ast.FunctionDef | None:
    """Return the parsed source of a function; None without source, and for decorated ones, which may return something else."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    node = tree.body[0] if tree.body else None
    return node if isinstance(node, ast.FunctionDef) and not node.decorator_list and not _yields(node) else None


def _writes(node: ast.AST) -> bool:
    """Return whether a statement writes into a tensor, as `y += 1`, `y[0] = 1`, `y.mul_(2)` and `out=y` do, or assigns within an expression.

    Of `if` and `with` it is that of their first line.
    """
    if isinstance(node, ast.If | ast.With):
        return any(map(_writes, [node.test] if isinstance(node, ast.If) else node.items))
    return any(
        isinstance(part, ast.AugAssign | ast.NamedExpr)
        or (isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store))
        or (isinstance(part, ast.Attribute) and part.attr.endswith("_") and not part.attr.endswith("__"))
        or (isinstance(part, ast.keyword) and part.arg == "out")
        for part in ast.walk(node)
    )


def _yields(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node))


__all__ = ["End", "ends_of"]
