"""Wrappers, the main user interface: applied alone or composed to a model, a function or a class of models."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, Literal, Self, TypeVar, overload

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from ..engine.effects.private_random import own_random, private_stream
from ..engine.execution import Execution
from ..engine.surroundings import Surroundings
from ..introspect.objects import is_keras
from .calls.lone_calls import watch_layers
from .decorated import decorated
from .frameworks import wrap_foreign, wrap_foreign_function
from .function import Function
from .layer_order import watched
from .method import Method
from .optimizer_guard import watch
from .outputs.options import Output, has_detections, read, states_of
from .outputs.state_paths import state_paths
from .ownership import table_of
from .peft_layers import merge_for_voters
from .quantized import own_scales
from .reached_outputs import keep_settled
from .refusals import check_model, check_processes, part_at
from .settings import Settings, setting, settings_of
from .wrapped import Wrapped, adopt, copied, is_wrapped, unwrap

M = TypeVar("M", bound=nn.Module)
Strategy = Literal["auto", "vmap", "rescue", "replay", "loop", "tune"]
Purity = Literal["once", "warn", "raise", "allow"]


class Wrapper(Settings):
    """Base class of wrappers, which are called with a model, a function or a class of models to make it report its risk.

    A subclass declares its settings as annotated fields, and creates the methods that it attaches to a model in `make`. The options below are
    common to all wrappers and keyword-only. A wrapper class with default settings can also be used as a decorator without parentheses,
    `@vote.Wrapper`.
    """

    _: KW_ONLY
    output: Output = setting(
        default=None,
        read=read,
        help='what the outputs mean: "values" (risk is a standard deviation; also the meaning of None), class "logits" or "probs" (risks are '
        'entropies), "binary" (one score for each yes or no), a meaning of `workbench.outputs` such as Logits(dim=1), or a dict from the name, '
        "index or dotted path of an output to one of these; outputs not in the dict are averaged and have no risk.",
    )
    state: Any = setting(
        default=None,
        read=state_paths,
        help="which outputs are state that the caller passes to the next call, such as the hidden state of a recurrent cell or a cache: an "
        "index, name or dotted path, or a tuple of them. State is returned as an opaque `BranchedState`; when it is passed back, each voter or "
        "sample continues with its own. () means that no output is state: an averaged output that is passed back is ordinary data.",
    )
    strategy: Strategy = setting(
        default="auto",
        help='how branches are run: "auto", "tune" (time all possible executors at the first call of each kind and keep the fastest), or one '
        'executor: "vmap" (all in one pass), "rescue" (like vmap, with equivalents for operations that vmap does not support), '
        '"replay" (one pass each, reusing from the first pass what branches share), "loop" (one pass each).',
    )
    verbose: int | bool = setting(default=0, help="1 prints what was wrapped.")
    example: Any = setting(
        default=None,
        help="example inputs, a tensor or a tuple. The wrapped model is called with them once, so that errors appear immediately, and the "
        "last layers are found by the order in which layers run instead of the order in which they are registered. "
        "They are inputs of the wrapped method; with `at=` inputs of the whole model.",
    )
    purity: Purity = setting(
        default="once",
        help='how to treat attributes that forward changes, such as a counter or a growing list: "once" (they end as if the model had been '
        'called once), "warn" (the same, with a warning that shows them before and after), "raise" (`PurityError`), "allow" (every pass '
        "changes them).",
    )
    chunk: int | None = setting(
        default=None,
        least=1,
        help="maximum number of voters or samples run at once under vmap, to bound the memory of a prediction (a training step still keeps "
        "all activations for its backward pass); None for all, or as many as fit in memory. If it is set, only running means and variances "
        "of large maps are kept.",
    )

    @overload
    def __new__(cls, target: type[M], /) -> type[M]: ...  # type: ignore[misc]  # as a decorator
    @overload
    def __new__(cls, target: nn.Module, /) -> Any: ...
    @overload
    def __new__(cls, *args: Any, **kwargs: Any) -> Self: ...
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        target: Any = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(target, (nn.Module, *_FUNCTIONS)) or _is_class_of_models(target) or is_keras(target):
            return cls()(target)  # used as a decorator without parentheses
        return super().__new__(cls)

    def with_options(self, **options: Any) -> Self:
        """Return a copy of the wrapper with some of the common options changed.

        Example:
            >>> from workbench import vote
            >>> vote.Wrapper(5).with_options(strategy="loop")
            vote.Wrapper(n_voters=5, strategy='loop')
        """
        new = copy.copy(self)
        for described in settings_of(Wrapper):
            if described.name in options:
                object.__setattr__(new, described.name, described.check(options.pop(described.name)))
        if options:
            raise TypeError(f"{next(iter(options))} is not a common option of wrappers; these are {', '.join(COMMON)}")
        return new

    def alone(self) -> Self:
        """Return a copy of the wrapper with the common options reset to their defaults."""
        return self.with_options(**COMMON)

    def own(self) -> dict[str, Any]:
        """Return the settings specific to this wrapper by name, without the common options."""
        return {d.name: getattr(self, d.name) for d in settings_of(type(self)) if d.name not in COMMON}

    def make(self) -> list[Method]:
        """Create the methods that this wrapper attaches to a model; new instances at each call."""
        raise TypeError(
            f"{type(self).__name__} attaches no method; use the wrapper of a method, such as vote.Wrapper or sculpt.Wrapper"
        )

    @overload
    def __call__(self, target: type[M], *, method: str = "forward", at: str | None = None) -> type[M]: ...
    @overload
    def __call__(
        self, target: nn.Module | Callable[..., Any], *, method: str = "forward", at: str | None = None
    ) -> Any: ...
    def __call__(self, target: Any, *, method: str = "forward", at: str | None = None) -> Any:
        """Wrap a model, a function of tensors, or a class of models.

        Args:
            target: an `nn.Module` (not modified; a new object that shares its tensors is returned), a function that uses modules (they are
                found and shared), or a subclass of `nn.Module` (its instances are wrapped on construction).
            method: name of the method that answers with risk. If it is not forward, forward and all other methods are unchanged: where they
                call this method they get its wrapped prediction, and layers that it does not use stay shared with the given model.
            at: dotted name of a sub-module to wrap, inside a new object of the model's class that shares its tensors and calls the sub-module
                as before. `wrapped.get_submodule(at)(x, return_risk=True)` returns its risk.

        Returns:
            The wrapped object, an instance of the model's class if the target is a model. Annotated as Any, since Python cannot express the
            type of an object that is both of the user's class and a `workbench.Wrapped`.

        Raises:
            TypeError: if the target is none of these, is scripted, sharded or trained in several processes, or if the function trains a model.
            ValueError: if the model has uninitialized lazy parameters, has no parameters, already carries this method, or has no such method
                or sub-module.

        Example:
            >>> import torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 1))
            >>> from workbench import vote
            >>> part = vote.Wrapper(3)(model, at="0")
            >>> h, risk = part[0](torch.zeros(4, 3), return_risk=True)
            >>> h.shape, part(torch.zeros(4, 3)).shape
            (torch.Size([4, 8]), torch.Size([4, 1]))
        """
        if (foreign := wrap_foreign(self, target, method, at)) is not None:
            return foreign
        if _is_class_of_models(target):
            return decorated(target, lambda instance: self._wrap_in_place(instance, method, at))
        if isinstance(target, _FUNCTIONS) or (callable(target) and not isinstance(target, nn.Module | type)):
            function, target = target, Function(target)
            if (foreign := wrap_foreign_function(self, function, [*target.children()])) is not None:
                return foreign
        if not isinstance(target, nn.Module):
            what = (
                f"the class {target.__name__}"
                if isinstance(target, type)
                else f"{type(target).__name__} {target!r:.60}"
            )
            raise TypeError(
                f"{self._display_name()} wraps an nn.Module, a subclass of it, or a function that uses one; not {what}"
            )
        if self._has_inputs() and any(map(is_lazy, (*target.parameters(), *target.buffers()))):
            target = self._materialized(target, method, at)
        check_processes(target)
        check_model(part_at(target, at), method, self.make())
        surroundings = Surroundings()
        try:
            execution = self._trace_example(target, method, at)
            model: Any = copied(target)
            part: Any = self._attach_to(part_at(model, at), method, execution)
        except BaseException as error:
            surroundings.restore(error)
            raise
        if self._has_inputs():
            trial = copied(model)
            self._call_example(trial, method, at)
            keep_settled(part_at(trial, at), part)
        if self.verbose:
            print(Wrapped.explain(part))
        return model

    def _has_inputs(self) -> bool:
        return self.example is not None and not isinstance(self.example, Execution)

    def _example_inputs(self) -> tuple[Any, ...]:
        return self.example if isinstance(self.example, tuple) else (self.example,)

    def _trace_example(self, target: nn.Module, method: str, at: str | None) -> Execution | None:
        """Run the example to see the order in which layers run; changes neither the model nor the random number generators.

        Returns:
            None without an example, or if the call fails.
        """
        if self.example is None or isinstance(self.example, Execution):
            return self.example
        model: Any = copied(target).eval()
        part: Any = part_at(model, at)
        calls: list[tuple[tuple, dict[str, Any]]] = [(self._example_inputs(), {})]
        devices = sorted({p.device for p in part.parameters()}, key=str)
        with own_random(0, *devices), torch.no_grad():
            if at is not None:
                handle = part.register_forward_pre_hook(
                    lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
                )
                try:
                    model(*self._example_inputs())
                except Exception:  # `_call_example` raises it again, from the wrapped model
                    return None
                finally:
                    handle.remove()
                if len(calls) == 1:
                    return None
            return watched(part if is_wrapped(part) else adopt(part, method), *calls[-1], self.output)

    def _call_example(self, model: Any, method: str, at: str | None) -> None:
        inputs = self._example_inputs()
        model.eval()
        with torch.no_grad():
            getattr(model, method)(*inputs) if at is None and method != "forward" else nn.Module.__call__(
                model, *inputs
            )
            for kind in model._workbench.methods if is_wrapped(model) else ():
                kind.check(model, inputs, {})

    def _materialized(self, model: nn.Module, method: str, at: str | None) -> nn.Module:
        """Return a copy of a model whose lazy layers are initialized by a call with the example."""
        # torch cannot deep-copy uninitialized buffers
        new_buffer: Any = UninitializedBuffer
        buffers = {id(b): new_buffer(b.requires_grad, b.device, b.dtype) for b in model.buffers() if is_lazy(b)}
        model = copy.deepcopy(model, buffers)
        modes = [(module, module.training) for module in model.modules()]
        with private_stream(p.device for p in model.parameters()):
            self._call_example(model, method, at)
        for module, mode in modes:
            module.training = mode
        return model

    def _wrap_in_place(self, model: nn.Module, method: str, at: str | None) -> None:
        part = part_at(model, at)
        check_processes(model)
        check_model(part, method, self.make())
        own_scales(model)
        self._attach_to(part, method, self._trace_example(model, method, at))

    def _attach_to(self, part: nn.Module, method: str, execution: Execution | None) -> nn.Module:
        """Wrap in place a module that is not shared with the user's model."""
        if not is_wrapped(part):
            adopt(part, method)
        part._workbench.execution = execution or part._workbench.execution  # type: ignore[union-attr]
        attach(part, self)
        return part


COMMON: dict[str, Any] = {described.name: described.default for described in settings_of(Wrapper)}


def _misused(value: Any) -> str:
    """Describe what was given in place of a wrapper; of a class of wrappers, or the module that has one, also say how to make one."""
    kind, cls = ("module", getattr(value, "Wrapper", None)) if isinstance(value, types.ModuleType) else ("class", value)
    if not (isinstance(cls, type) and issubclass(cls, Wrapper)):
        return type(value).__name__
    name = cls._display_name()
    return f"the {kind} {name.removesuffix('.Wrapper') if kind == 'module' else name}: write {name}()"


class _Composed(Wrapper):
    """Several wrappers combined by `compose`."""

    wrappers: tuple[Wrapper, ...] = ()

    def make(self) -> list[Method]:
        return [method for wrapper in self.wrappers for method in wrapper.make()]

    def __repr__(self) -> str:
        redundant = any(wrapper.output == self.output for wrapper in self.wrappers) or self.output is None
        arguments = [*map(repr, self.wrappers), *([] if redundant else [f"output={self.output!r}"])]
        return f"compose({', '.join(arguments)})"


def compose(*wrappers: Wrapper, output: Any = None) -> Wrapper:
    """Combine several wrappers into one; their order does not matter.

    Args:
        wrappers: at most one of each kind; without any, models get the interface of a wrapped model but no risk, as a baseline.
        output: meaning of the model's outputs, as in `Wrapper`; None for that of the wrappers.

    Returns:
        A wrapper. Models that it wraps return a `Risk` with those of aleatoric, epistemic and vacuitic that were measured, and total.

    Example:
        >>> import torch
        >>> from workbench import compose, sculpt, vote
        >>> model = compose(vote.Wrapper(3), sculpt.Wrapper())(torch.nn.Linear(2, 1))
        >>> y, risk = model(torch.zeros(4, 2), return_risk=True)
        >>> risk.names()
        ('aleatoric', 'epistemic', 'total')
    """
    for wrapper in wrappers:
        if not isinstance(wrapper, Wrapper):
            raise TypeError(f"compose takes wrappers such as vote.Wrapper(5), not {_misused(wrapper)}")
    single = tuple(part for w in wrappers for part in parts_of(w))
    options: dict[str, Any] = {}
    for name, default in COMMON.items():
        values = [getattr(w, name) for w in single] + ([read(output)] if name == "output" else [])
        chosen = [value for value in values if value is not default and value != default]
        if name != "example" and len({str(value) for value in chosen}) > 1:
            raise ValueError(f"the wrappers ask for different {name}: {', '.join(map(repr, chosen))}")
        options[name] = chosen[0] if chosen else default
    return _Composed(single, **options)


def parts_of(wrapper: Wrapper) -> tuple[Wrapper, ...]:
    """Return the wrappers that a composed wrapper consists of; the wrapper itself if it is not composed."""
    return wrapper.wrappers if isinstance(wrapper, _Composed) else (wrapper,)


def attach(wrapped: Any, wrapper: Wrapper) -> None:
    """Attach the methods of a wrapper to a wrapped object, in place."""
    record, table = wrapped._workbench, table_of(wrapped)
    if wrapper.output is not None and record.output not in (None, wrapper.output):
        raise ValueError(
            f"the model was wrapped with output={record.output!r}, this wrapper asks for {wrapper.output!r}"
        )
    output = record.output if wrapper.output is None else wrapper.output
    for method in (*record.methods, *wrapper.make()) if has_detections(output) else ():
        if method.detections:
            raise ValueError(f"{method.name} with output=Detections(...): {method.detections}")
    record.output = output
    for name in ("state", "strategy", "purity", "chunk"):
        if getattr(wrapper, name) != COMMON[name]:
            setattr(record, name, getattr(wrapper, name))
    if names := states_of(output):
        record.state = tuple(dict.fromkeys([*(record.state or ()), *(state_paths(names) or ())]))
    with private_stream(p.device for p in wrapped.parameters()), torch.no_grad():
        # innermost axis first: risk heads must exist before voters are stacked, so that each voter gets its own heads
        for method in sorted(wrapper.make(), key=lambda method: -method.order):
            slots_before = set(record.rules)
            method.attach(table)
            record.methods.append(method)
            table.show()
            changed = [
                slot for slot in record.rules if slot not in slots_before or method.name in record.rules[slot].axes()
            ]
            for other in record.methods[:-1]:
                other.extend(table, changed)
    record.methods.sort(key=lambda method: method.order)
    watch_layers(table)
    merge_for_voters(wrapped)
    watch(wrapped)
    table.show()


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def _is_class_of_models(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, nn.Module)


__all__ = ["Wrapper", "compose", "unwrap"]
