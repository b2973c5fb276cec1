"""What users call: wrappers, alone or composed, on a model, a function or a class."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY
from typing import Any, Literal, Self, TypeVar, overload

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from ..engine.effects.private_random import CPU, generator_of, own_random
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
from .quantised import own_scales
from .refusals import check_model, part_at
from .settings import Settings, setting, settings_of
from .wrapped import Wrapped, adopt, copied, is_wrapped, unwrap

M = TypeVar("M", bound=nn.Module)
Strategy = Literal["auto", "vmap", "rescue", "replay", "loop", "tune"]
Purity = Literal["once", "warn", "raise", "allow"]


class Wrapper(Settings):
    """What can be called on a model, on a function or on a class, to make it say its risk.

    A subclass declares its settings as annotated fields, and says which methods it puts on a model (`make`). The options here are those of
    all wrappers, given by name. With the defaults a wrapper is also a decorator without parentheses, `@vote.Wrapper`.
    """

    _: KW_ONLY
    output: Output = setting(
        default=None,
        read=read,
        help='what the outputs mean: "values" (risk is a standard deviation; what None is taken for), class "logits" or "probs" (risks are '
        'entropies), "binary" (one score for each yes or no), a meaning of `workbench.outputs` such as Logits(dim=1), or a dict from the name, '
        "index or dotted path of an output to one of these; outputs that it does not name are averaged, without a risk.",
    )
    state: Any = setting(
        default=None,
        read=state_paths,
        help="which outputs are state that the caller hands on from call to call, such as that of a recurrent cell or a cache: an index, name "
        "or dotted path, or a tuple of them. It is handed back as an opaque `BranchedState`, of which each voter or sample takes its own when "
        "it comes back. () says that none is, so that a mean that comes back is data.",
    )
    strategy: Strategy = setting(
        default="auto",
        help='how branches are run: "auto", "tune" (measures what is possible at the first call of each kind, and takes the fastest), or one '
        'rung of the ladder: "vmap" (all in one pass), "rescue" (the same, with operations that vmap lacks in other words), "replay" (one '
        'pass each, what they share handed out from the first), "loop" (one pass each).',
    )
    verbose: int | bool = setting(default=0, help="1 prints what was wrapped.")
    example: Any = setting(
        default=None,
        help="example inputs, a tensor or a tuple; the wrapped model is called with them once, so that what does not work shows at once, and "
        "which layers are the last is told by the order in which they run, not in which they are registered. "
        "They are those of the method that is wrapped; with `at=` those of the whole model.",
    )
    purity: Purity = setting(
        default="once",
        help='what is made of attributes that forward changes, such as a counter or a list that grows: "once" (they end as if the model had '
        'been called once), "warn" (the same, and says which, before and after), "raise" (`PurityError`), "allow" (each pass changes them).',
    )
    chunk: int | None = setting(
        default=None,
        least=1,
        help="how many voters or samples run at once under vmap, which bounds the memory of a prediction (a training step keeps all "
        "activations for its backward pass); None for all, or for as many as there is memory for. Where it is set, only running means and "
        "variances of large maps are kept.",
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
        """The same wrapper with other options of those that all wrappers have.

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
            raise TypeError(f"{next(iter(options))} is no option of all wrappers; there are {', '.join(COMMON)}")
        return new

    def alone(self) -> Self:
        """The same wrapper with the defaults of the options that all wrappers have."""
        return self.with_options(**COMMON)

    def own(self) -> dict[str, Any]:
        """The settings that not all wrappers have, by name."""
        return {d.name: getattr(self, d.name) for d in settings_of(type(self)) if d.name not in COMMON}

    def make(self) -> list[Method]:
        """The methods that this wrapper puts on a model, new ones at each call."""
        raise TypeError(
            f"{type(self).__name__} is no wrapper by itself; use that of a method, such as vote.Wrapper or sculpt.Wrapper"
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
            target: an `nn.Module` (it stays as it is; a new object over the same tensors is returned), a function that uses modules (they are
                found and shared), or a subclass of `nn.Module` (its instances are built wrapped).
            method: name of the method that answers with risk. If it is not forward, all other methods and forward are the model's own: where
                they call this one they get its wrapped prediction, and layers that it does not use stay shared with the given model.
            at: dotted name of a sub-module: that one is wrapped, inside a new object of the model's class over the same tensors, which calls it
                as ever. `wrapped.get_submodule(at)(x, return_risk=True)` gives its risk.

        Returns:
            The wrapped object, of the class of the model if it is one. A type checker sees it as Any, since Python has no type for an object
            that is both the user's and `workbench.Wrapped`.

        Raises:
            TypeError: if the target is none of these, is scripted or sharded, or if the function trains a model.
            ValueError: if the model has uninitialised lazy parameters, no parameters, carries this method already, or has no such method or
                sub-module.

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
                f"{self._name()} wraps an nn.Module, a subclass of it, or a function that uses one; not {what}"
            )
        if self._has_inputs() and any(map(is_lazy, (*target.parameters(), *target.buffers()))):
            target = self._with_shapes(target, method, at)
        check_model(part_at(target, at), method, self.make())
        surroundings = Surroundings()
        try:
            execution = self._watched(target, method, at)
            whole: Any = copied(target)
            part: Any = self._put(part_at(whole, at), method, execution)
        except BaseException as error:
            surroundings.restore(error)
            raise
        if self._has_inputs():
            self._call_example(copied(whole), method, at)
        if self.verbose:
            print(Wrapped.explain(part))
        return whole

    def _has_inputs(self) -> bool:
        return self.example is not None and not isinstance(self.example, Execution)

    def _example_inputs(self) -> tuple[Any, ...]:
        return self.example if isinstance(self.example, tuple) else (self.example,)

    def _watched(self, target: nn.Module, method: str, at: str | None) -> Execution | None:
        """What the example shows about the order in which layers run; neither the model nor random numbers change by it."""
        if self.example is None or isinstance(self.example, Execution):
            return self.example
        whole: Any = copied(target).eval()
        part: Any = part_at(whole, at)
        calls: list[tuple[tuple, dict[str, Any]]] = [(self._example_inputs(), {})]
        devices = sorted({p.device for p in part.parameters()}, key=str)
        with own_random(0, *devices), torch.no_grad():
            if at is not None:
                handle = part.register_forward_pre_hook(
                    lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
                )
                try:
                    whole(*self._example_inputs())
                except Exception:  # told where the wrapped model is called with it
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

    def _with_shapes(self, model: nn.Module, method: str, at: str | None) -> nn.Module:
        """A copy of a model with lazy layers whose shapes the example gives."""
        # buffers without a shape have no copy of their own in torch
        new: Any = UninitializedBuffer
        buffers = {id(b): new(b.requires_grad, b.device, b.dtype) for b in model.buffers() if is_lazy(b)}
        model = copy.deepcopy(model, buffers)
        modes = [(module, module.training) for module in model.modules()]
        with _own_numbers(p.device for p in model.parameters()):
            self._call_example(model, method, at)
        for module, mode in modes:
            module.training = mode
        return model

    def _wrap_in_place(self, whole: nn.Module, method: str, at: str | None) -> None:
        part = part_at(whole, at)
        check_model(part, method, self.make())
        own_scales(whole)
        self._put(part, method, self._watched(whole, method, at))

    def _put(self, part: nn.Module, method: str, execution: Execution | None) -> nn.Module:
        """Wrap a module that nobody else uses, in place."""
        if not is_wrapped(part):
            adopt(part, method)
        part._workbench.execution = execution or part._workbench.execution  # type: ignore[union-attr]
        attach(part, self)
        return part

    def __repr__(self) -> str:
        return f"{self._name()}({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"

    def _name(self) -> str:
        module = type(self).__module__
        return f"{module.rpartition('.')[2]}.Wrapper" if module.startswith("workbench.") else type(self).__name__


COMMON: dict[str, Any] = {described.name: described.default for described in settings_of(Wrapper)}


class _Composed(Wrapper):
    """Several wrappers at once."""

    wrappers: tuple[Wrapper, ...] = ()

    def make(self) -> list[Method]:
        return [method for wrapper in self.wrappers for method in wrapper.make()]

    def __repr__(self) -> str:
        said = any(wrapper.output == self.output for wrapper in self.wrappers) or self.output is None
        words = [*map(repr, self.wrappers), *([] if said else [f"output={self.output!r}"])]
        return f"compose({', '.join(words)})"


def compose(*wrappers: Wrapper, output: Any = None) -> Wrapper:
    """Several wrappers on one model; their order does not matter.

    Args:
        wrappers: at most one of each kind; none at all gives the plain model with the interface of a wrapped one, as a baseline.
        output: what the outputs of the model mean, as of any wrapper; None: what the wrappers say.

    Returns:
        A wrapper. What it wraps returns a `Risk` with aleatoric, epistemic, vacuitic (those that were measured) and total.

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
            raise TypeError(f"compose takes wrappers such as vote.Wrapper(5), not {type(wrapper).__name__}")
    single = tuple(part for w in wrappers for part in parts_of(w))
    options: dict[str, Any] = {}
    for name, default in COMMON.items():
        asked = [getattr(w, name) for w in single] + ([read(output)] if name == "output" else [])
        chosen = [value for value in asked if value is not default and value != default]
        if name != "example" and len({str(value) for value in chosen}) > 1:
            raise ValueError(f"the wrappers ask for different {name}: {', '.join(map(repr, chosen))}")
        options[name] = chosen[0] if chosen else default
    return _Composed(single, **options)


def parts_of(wrapper: Wrapper) -> tuple[Wrapper, ...]:
    """The wrappers that a wrapper is composed of; itself if it is a single one."""
    return wrapper.wrappers if isinstance(wrapper, _Composed) else (wrapper,)


def attach(wrapped: Any, wrapper: Wrapper) -> None:
    """Put the methods of a wrapper on a wrapped object, in place."""
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
    with _own_numbers(p.device for p in wrapped.parameters()), torch.no_grad():
        # heads first, so that voters get a risk head each
        for method in sorted(wrapper.make(), key=lambda method: -method.order):
            before = set(record.rules)
            method.attach(table)
            record.methods.append(method)
            table.show()
            changed = [slot for slot in record.rules if slot not in before or method.name in record.rules[slot].axes()]
            for other in record.methods[:-1]:
                other.extend(table, changed)
    record.methods.sort(key=lambda method: method.order)
    watch_layers(table)
    watch(wrapped)
    table.show()


def _own_numbers(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Random numbers of a stream of its own, that does not repeat in what the user draws next."""
    seed = int(torch.randint(2**62, (), generator=generator_of(CPU).clone_state(), device="cpu").item())
    return own_random(seed, *sorted(set(devices), key=str))


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def _is_class_of_models(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, nn.Module)


__all__ = ["Wrapper", "compose", "unwrap"]
