"""What users call: wrappers, alone or composed, on a model, a function or a class."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .engine.clone import is_scripted
from .engine.run import STRATEGIES
from .function import Function
from .guard import watch
from .method import Method
from .table import table_of
from .wrapped import Wrapped, adopt, begin, is_wrapped, unwrap

T = TypeVar("T")
OUTPUTS = ("values", "logits", "probs")


class Wrapper:
    """What can be called on a model, on a function or on a class, to make it say its risk.

    Args:
        output: what the model gives: "values" (risk is a standard deviation), class "logits" or "probs" (risks are entropies).
        strategy: how branches are run: "auto", "loop" (one pass each) or "vmap" (all in one).
        verbose: 1 prints what was wrapped.
        example: example inputs, a tensor or a tuple; the wrapped model is called with them once, so that what does not work shows at once.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        target = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(target, nn.Module | types.FunctionType) or (
            isinstance(target, type) and issubclass(target, nn.Module)
        ):
            return cls()(target)  # used as a decorator without parentheses
        return super().__new__(cls)

    def __init__(self, output: str = "values", strategy: str = "auto", verbose: int = 0, example: Any = None) -> None:
        if output not in OUTPUTS:
            raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, not {output!r}")
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
        self.output, self.strategy, self.verbose, self.example = output, strategy, verbose, example

    def make(self) -> list[Method]:
        """The methods that this wrapper puts on a model, new ones at each call."""
        raise TypeError(
            f"{type(self).__name__} is no wrapper by itself; use vote.Wrapper, sample.Wrapper, sculpt.Wrapper or neo.Wrapper"
        )

    def __call__(self, target: T) -> T:
        """Wrap a model, a function of tensors, or a class of models.

        Args:
            target: an `nn.Module` (it stays as it is; a new object over the same tensors is returned), a function that uses modules (they are
                found and shared), or a subclass of `nn.Module` (its instances are built wrapped).

        Returns:
            The wrapped object; of the class of the model if it is one.

        Raises:
            TypeError: if the target is none of these, or a scripted module.
            ValueError: if the model has uninitialised lazy parameters, no parameters, or carries this method already.
        """
        if isinstance(target, type) and issubclass(target, nn.Module):
            return _decorated(target, self)  # type: ignore[return-value]
        if isinstance(target, types.FunctionType | types.MethodType | functools.partial):
            return self._on(Function(target))
        if not isinstance(target, nn.Module):
            what = (
                f"the class {target.__name__}"
                if isinstance(target, type)
                else f"{type(target).__name__} {target!r:.60}"
            )
            raise TypeError(
                f"{type(self).__module__.rpartition('.')[2]}.Wrapper wraps an nn.Module, a subclass of it, or a function that "
                f"uses one; not {what}"
            )
        return self._on(target)

    def _on(self, model: nn.Module) -> Any:
        self._check(model)
        wrapped: Any = begin(model)
        attach(wrapped, self)
        if self.example is not None:
            inputs = self.example if isinstance(self.example, tuple) else (self.example,)
            training = wrapped.training
            with torch.no_grad():
                probe = wrapped.__copy__().eval()
                nn.Module.__call__(probe, *inputs)
            wrapped.train(training)
        if self.verbose:
            print(Wrapped.explain(wrapped))
        return wrapped

    def _check(self, model: nn.Module) -> None:
        names = [name for name, p in model.named_parameters() if is_lazy(p)]
        if names:
            raise ValueError(
                f"{type(model).__name__} has parameters without a shape yet ({', '.join(names[:3])}): call the model once with real inputs "
                "before wrapping it"
            )
        scripted = [name or "the model itself" for name, module in model.named_modules() if is_scripted(module)]
        if scripted:
            raise TypeError(
                f"{type(model).__name__} is scripted (torch.jit) in: {scripted[0]}. Scripted code cannot be run with other parameters; wrap the "
                "model before scripting it"
            )
        inside = [name for name, module in model.named_modules() if module is not model and is_wrapped(module)]
        if inside:
            raise ValueError(
                f"the sub-module {inside[0]!r} of {type(model).__name__} is wrapped already; wrap the whole model once, with "
                "compose(...), or put the plain sub-module back first (workbench.unwrap)"
            )
        if not any(p.is_floating_point() or p.is_complex() for p in model.parameters()) and self.make():
            raise ValueError(f"{type(model).__name__} has no floating-point parameters, so there is nothing to wrap")
        present = {method.name for method in model._workbench.methods} if is_wrapped(model) else set()  # type: ignore[union-attr]
        for method in self.make():
            if method.name in present:
                raise ValueError(
                    f"the model carries {method.name} already; wrap the plain model (`workbench.unwrap(model)`), or choose other settings there"
                )
            present.add(method.name)

    def __repr__(self) -> str:
        return f"{type(self).__module__.rpartition('.')[2]}.Wrapper({', '.join(map(repr, self.make()))})"


class _Composed(Wrapper):
    def __init__(self, wrappers: tuple[Wrapper, ...]) -> None:
        super().__init__()
        self.wrappers = wrappers
        for name, plain in (("output", "values"), ("strategy", "auto"), ("verbose", 0), ("example", None)):
            chosen = [getattr(w, name) for w in wrappers if getattr(w, name) is not plain and getattr(w, name) != plain]
            if name != "example" and len({str(value) for value in chosen}) > 1:
                raise ValueError(f"the wrappers ask for different {name}: {', '.join(map(repr, chosen))}")
            setattr(self, name, chosen[0] if chosen else plain)

    def make(self) -> list[Method]:
        return [method for wrapper in self.wrappers for method in wrapper.make()]

    def __repr__(self) -> str:
        return f"compose({', '.join(map(repr, self.wrappers))})"


def compose(*wrappers: Wrapper) -> Wrapper:
    """Several wrappers on one model; their order does not matter.

    Args:
        wrappers: at most one of each kind; none at all gives the plain model with the interface of a wrapped one, as a baseline.

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
    return _Composed(tuple(part for w in wrappers for part in (w.wrappers if isinstance(w, _Composed) else (w,))))


def attach(wrapped: Any, wrapper: Wrapper) -> None:
    """Put the methods of a wrapper on a wrapped object, in place."""
    record, table = wrapped._workbench, table_of(wrapped)
    if wrapper.output != "values":
        if record.output not in ("values", wrapper.output):
            raise ValueError(
                f'the model was wrapped with output="{record.output}", this wrapper asks for "{wrapper.output}"'
            )
        record.output = wrapper.output
    if wrapper.strategy != "auto":
        record.strategy = wrapper.strategy
    devices = sorted({p.device.index or 0 for p in wrapped.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        # a stream of its own, that does not repeat in what the user draws next
        seed = int(torch.randint(2**62, ()).item())
        for generator in (torch.default_generator, *(torch.cuda.default_generators[i] for i in devices)):
            generator.manual_seed(seed)
        for method in sorted(
            wrapper.make(), key=lambda method: -method.order
        ):  # heads first, so that voters get a risk head each
            before = set(record.rules)
            method.attach(table)
            record.methods.append(method)
            table.show()
            changed = [slot for slot in record.rules if slot not in before or method.name in record.rules[slot].axes()]
            for other in record.methods[:-1]:
                other.extend(table, changed)
    record.methods.sort(key=lambda method: method.order)
    watch(wrapped)
    table.show()


class _Past:
    """What `super(Net, self).name` finds in the methods of a decorated class Net: by then the name Net means the class that `_decorated` gave,
    and what comes next after that is the user's class itself, which must be passed over.
    """

    def __init__(self, cls: type, name: str) -> None:
        self.cls, self.name = cls, name

    def __get__(self, instance: Any, owner: type) -> Any:
        return getattr(super(self.cls, owner if instance is None else instance), self.name)


def _decorated(cls: type[nn.Module], wrapper: Wrapper) -> type[nn.Module]:
    """The class whose instances, and those of its subclasses, wrap themselves once they are built."""
    meta: Any = type(cls)

    class Built(meta):
        @property
        def __signature__(self) -> inspect.Signature:
            """Of the constructor, which __call__ would hide."""
            parameters = list(inspect.signature(self.__init__).parameters.values())  # type: ignore[misc]
            return inspect.Signature(parameters[1:])

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            instance = super().__call__(*args, **kwargs)
            wrapper._check(instance)
            if not is_wrapped(instance):
                adopt(instance)
            attach(instance, wrapper)
            return instance

    own = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__", "__slots__")}
    past: dict[str, Any] = {name: _Past(cls, name) for name, value in own.items() if hasattr(value, "__get__")}
    # the user's class may ask for arguments here that only its own subclasses know
    past["__init_subclass__"] = classmethod(lambda cls, **kwargs: None)
    own.pop("__init_subclass__", None)
    return Built(cls.__name__, (type("Past", (), past), cls), own)


__all__ = ["Wrapper", "compose", "unwrap"]
