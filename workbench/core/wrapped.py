"""Wrapped objects: models of the user's own class that say how far to trust them."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..deprecation import warn_deprecated
from ..engine.clone import structural_copy
from ..engine.effects.attributes import modules
from ..engine.surroundings import Surroundings
from .batches.call_arguments import opened, positional_names
from .batches.own_loss import LABELS
from .calls import labelled_calls
from .calls import predict as calling
from .calls.frozen import asked, refuse_change
from .calls.recorded_calls import Taken
from .calls.surrounding import current_thread, entered, hooked, refuse_proxies, surrounded
from .copying import Persistent
from .members import predictive
from .method import Call
from .ownership import MARK, Record, add_extra, engine_of, extra, remove_extra, table_of
from .parameters import WrappedParameters
from .prior import NAME as PRIOR
from .prior import install
from .quantised import own_scales
from .runtime import HOOKS, Runtime, copy_rest, finish_load, plain_clone, restore
from .saving.savepoint import Savepoint
from .saving.state_dict import add_registered, extract, saves_itself
from .standardize import Scaling
from .subclasses import subclass

if TYPE_CHECKING:
    from ..distributions.mixture import Mixture
    from .explain import Explanation


class Wrapped(WrappedParameters, Persistent):
    """Mixed into the class of the model that is wrapped; see `Wrapper`.

    Call it as the model itself for the prediction, with `return_risk=True` for the pair of prediction and risk. All attributes, methods,
    sub-modules and the `state_dict` keys of shared parameters are the model's own. Where the model has a name of its own that is also
    one of those below, the model's wins; `Wrapped.loss(model, ...)` reaches ours.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """The user's class may ask for arguments here that only its own subclasses know."""

    def forward(self, *args: Any, return_risk: bool = False, tile_and_reduce: bool | None = None, **kwargs: Any) -> Any:
        """The prediction of the model, and with `return_risk=True` its risk beside it.

        Args:
            args, kwargs: as for the model.
            return_risk: whether to return (prediction, risk). One wrapper: the risk has the structure and shapes of the prediction; several,
                or class outputs: a `Risk`.
            tile_and_reduce: for vote: True answers with the mean of all voters also in training mode, False deals the rows of the batch out
                to the voters, None (default) deals in training mode and averages in evaluation mode.
        """
        return _answer(self, "forward", args, kwargs, return_risk, tile_and_reduce)

    def quantiles(self, *args: Any, **kwargs: Any) -> Any:
        """The quantiles of the targets that quantile heads predict, `sculpt.Wrapper(Quantiles(levels))`.

        Args:
            args, kwargs: as for the model.

        Returns:
            Like the prediction, each tensor [levels, ...] and rising, in its units; of voters and samples the mean for each level.

        Raises:
            ValueError: if the model has no quantile heads.

        Example:
            >>> import torch
            >>> from workbench import sculpt
            >>> model = sculpt.Wrapper(sculpt.Quantiles((0.1, 0.9)))(torch.nn.Linear(2, 1))
            >>> lower, upper = model.quantiles(torch.zeros(4, 2))
            >>> bool((lower < upper).all())
            True
        """
        return asked(calling.quantiles, self, *entered(self, args, kwargs))

    def predictive(self, *args: Any, **kwargs: Any) -> Mixture:
        """The predictive distribution of the targets: the exact mixture of what all voters and samples say, each with its own noise.

        Args:
            args, kwargs: as for the model.

        Returns:
            A `torch.distributions.Distribution`: log_prob, cdf, icdf, mean, variance, stddev and sample, in the units of the prediction.

        Raises:
            ValueError: if no member says a distribution (there is no sculpt), or the model gives several tensors or class outputs.

        Example:
            >>> import torch
            >>> from workbench import compose, sculpt, vote
            >>> model = compose(vote.Wrapper(5), sculpt.Wrapper())(torch.nn.Linear(2, 1)).eval()
            >>> found = model.predictive(torch.zeros(4, 2))
            >>> found.log_prob(torch.zeros(4, 1)).shape, bool((found.icdf(0.05) < found.icdf(0.95)).all())
            (torch.Size([4, 1]), True)
        """
        return asked(predictive, self, *entered(self, args, kwargs))

    # ---- training
    def loss(self, criterion: Callable[[Any, Any], Tensor] | None, x: Any, y: Any) -> Tensor:
        """The training loss of all methods for a batch: each voter on every row with its own loss, sculpt's likelihood added.

        Args:
            criterion: `criterion(prediction, target)`, such as `nn.MSELoss()`, called once for each voter, in the order of `voters()`; None
                for the likelihood of the risk heads alone.
            x: the input, a tuple of positional inputs, or a dict of keyword inputs.
            y: the target.

        Returns:
            A scalar. With a scaling set it is computed in standardised units.
        """
        return asked(calling.loss, self, criterion, *entered(self, *opened(self, x)), y)

    def fit(self, inputs: Any) -> Any:
        """Fit what is learned in closed form from the training data: neo's signature, laplace's posterior, swag's models.

        Args:
            inputs: a tensor [rows, ...], an iterable of input batches or of (input, target) pairs, or rows in any form that `workbench.fit`
                takes; laplace takes its noise from the targets.

        Returns:
            The object itself.

        Raises:
            ValueError: if no method learns anything in closed form; `workbench.fit` trains.
        """
        refuse_change(self, "fit()")
        savepoint = Savepoint(self, values=any(method.collects for method in self._workbench.methods))
        try:
            calling.fit(self, inputs)
        except BaseException as error:
            savepoint.restore(error)
            raise
        return self

    @property
    def needs_fit(self) -> bool:
        """Whether `fit` has something to learn in closed form."""
        return any(method.needs_fit for method in self._workbench.methods)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods, in canonical order."""
        return tuple(method.name for method in self._workbench.methods)

    # ---- units
    @property
    def scaling(self) -> Scaling | None:
        """The standardisation between the user's units and the model's, if there is one."""
        return extra(self, "scaling")

    def scale(self, *args: None, **values: Any) -> None:
        """Standardise inputs, and give predictions and risks in original units.

        Args:
            values: x_mean, x_scale (of the first input, or tuples or dicts of those of several), y_mean, y_scale and x_dtype; see `Scaling`.
        """
        refuse_change(self, "scale()")
        if args:
            warn_deprecated("scale(None)", "wrapped.unscale()")
            Wrapped.unscale(self)
            return
        for method in self._workbench.methods if values.get("y_mean") is not None else ():
            if not getattr(method.distribution, "standardizable", True):
                raise ValueError(
                    f"y_mean, y_scale: targets of {method.distribution} cannot be standardised; give x_mean and x_scale alone"
                )
        like = next((p for p in self.parameters() if p.is_floating_point()), None)
        scaling = Scaling(**{"names": positional_names(self), **values})
        add_extra(self, "scaling", scaling.to(like.device if like is not None else None))

    def unscale(self) -> None:
        """Remove the standardisation: inputs and outputs are in the model's own units again."""
        refuse_change(self, "unscale()")
        remove_extra(self, "scaling")

    @property
    def location_scale(self) -> bool:
        """Deprecated: whether targets may be shifted."""
        warn_deprecated("Wrapped.location_scale", "the attribute location_scale of the distribution")
        return self._location_scale

    @property
    def _location_scale(self) -> bool:
        """Whether targets may be shifted: False under a distribution of positive values or of class scores."""
        return all(getattr(method.distribution, "location_scale", True) for method in self._workbench.methods)

    # ---- parts
    def voters(self) -> list[nn.Module]:
        """Every voter as a plain model of the user's class, with tensors of its own; one model if nothing votes.

        With units (`scale`) or priors (`vote.Wrapper(prior=)`) each is a wrapped object without methods, which keeps them.
        """
        every = Call(training=False, return_risk=True)
        axes = [
            axis for method in self._workbench.methods if method.members and (axis := method.axis(every)) is not None
        ]
        places = [{axes[0].name: i} for i in range(axes[0].size)] if axes else [{}]
        return [_branch(self, place, independent=True) for place in places]

    def unwrap(self) -> nn.Module:
        """The plain model, over the parameters as they are now; see `unwrap`."""
        return unwrap(self)

    def explain(self) -> Explanation:
        """How calls so far were run, and why: a text, and a table in a notebook."""
        from .explain import explained

        return explained(self)

    # not by `_get_name`: transformers' Trainer looks the name up to find out whether labels are shifted
    def __repr__(self) -> str:
        plain, name = super().__repr__(), self._get_name()
        return self._workbench_name() + plain.removeprefix(name) if plain.startswith(f"{name}(") else plain

    def _workbench_name(self) -> str:
        """The name of the model's class, and the wrappers."""
        if "_workbench" not in self.__dict__:
            return self._get_name()
        names = ", ".join(repr(method) for method in self._workbench.methods)
        method = "" if self._workbench.method == "forward" else f".{self._workbench.method}"
        return f"{type(self)._plain_class.__name__}{method}[{names}]"

    # ---- what others put around a call
    def __setattr__(self, name: str, value: Any) -> None:
        record = self.__dict__.get("_workbench")
        if record is not None:
            refuse_change(self, f"setting {name}")
        if record is not None and name == record.method and callable(value):
            value = surrounded(self, name, value)
            if value is None:
                self.__dict__.pop(name, None)
                return
        super().__setattr__(name, value)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_risk") and self._forward_hooks and "_workbench" in self.__dict__:
            return hooked(self, super()._call_impl, args, kwargs)
        return super()._call_impl(*args, **kwargs)


PUBLIC = tuple(
    name
    for name in (*vars(Wrapped), *vars(WrappedParameters), "frozen")
    if not name.startswith("_") and name != "forward"
)


# ---- building
_CLASSES: dict[tuple[type, frozenset[str], str], type[Wrapped]] = {}


def wrapped_class(cls: type[nn.Module], theirs: frozenset[str] = frozenset(), method: str = "forward") -> type[Wrapped]:
    """The subclass of the user's class that its wrapped objects have.

    Args:
        cls: the user's class.
        theirs: names of ours that the object to be wrapped holds itself.
        method: name of the method that answers with risk.
    """
    if (cls, theirs, method) not in _CLASSES:
        _CLASSES[cls, theirs, method] = subclass(Wrapped, PUBLIC, _answer, cls, theirs, method)
    return _CLASSES[cls, theirs, method]


def _answer(wrapped: Any, method: str, args: tuple, kwargs: dict[str, Any], risk: bool, tile: bool | None) -> Any:
    # a branch, or an object that is still being built
    if "_workbench" not in wrapped.__dict__ or engine_of(wrapped).traced.inside:
        return getattr(super(Wrapped, wrapped), method)(*args, **kwargs)
    runtime, compiling = wrapped.__dict__["_engine"], torch.compiler.is_compiling()
    frozen = runtime.frozen
    trial = None if compiling or kwargs else runtime.recorded.begin(args, risk, tile, frozen)
    if type(trial) is Taken:
        return trial.answer
    refuse_proxies(wrapped, args, kwargs)
    if method in wrapped.__dict__ or (risk and wrapped._forward_hooks):
        runtime.asked[current_thread()] = risk
    # where the graph may break, Dynamo goes on within `no_grad`, but not within a context that a name holds
    if compiling:
        # a first call looks at the model, and the losses of transformers break the graph: else Dynamo goes on with our functions one by one
        labelled = isinstance(kwargs.get(LABELS), torch.Tensor)
        if torch.compiler.is_dynamo_compiling() and (labelled or not runtime.engine.traced.knows(wrapped.training)):
            from ..engine.executors import graph_break

            return graph_break.outside(_answer, wrapped, method, args, kwargs, risk, tile)
        if frozen is None:
            return labelled_calls.predict(wrapped, args, kwargs, risk, tile)
        with torch.no_grad():
            return labelled_calls.predict(wrapped, args, kwargs, risk, tile)
    gradients = nullcontext() if frozen is None else torch.no_grad()
    surroundings = Surroundings()
    try:  # `guarded` would be one more frame between warnings and the line that they name
        if frozen is not None:
            frozen.check()
        with gradients:
            answer = labelled_calls.predict(wrapped, args, kwargs, risk, tile)
            if trial is not None:
                trial.end(answer)
        if frozen is not None:
            frozen.go_on()
        return answer
    except BaseException as error:
        surroundings.restore(error)
        raise


def copied(model: nn.Module) -> nn.Module:
    """A structural copy of a model that may be wrapped, or have wrapped parts."""
    new = structural_copy(model)
    own_scales(new)
    for path, inner in model.named_modules():
        if is_wrapped(inner):
            table = table_of(inner)
            restore(new.get_submodule(path.replace("_orig_mod.", "")), table.given, table.views)
    return new


def adopt(module: nn.Module, method: str = "forward") -> Any:
    """Make a module that nobody else uses a wrapped one without methods.

    Args:
        module: it is changed in place.
        method: name of its method that answers with risk.
    """
    record = Record.of(module, method)
    attributes = {*module.__dict__, *module._modules, *module._parameters, *module._buffers}
    module.__class__ = wrapped_class(type(module), frozenset(name for name in PUBLIC if name in attributes), method)
    if method in module.__dict__:  # set on the object: it would hide ours
        module.__dict__[method + MARK] = module.__dict__.pop(method)
    # the model's own hooks belong to its forward, once a branch; those set on the wrapped object fire once a call
    for key in HOOKS:
        if method == "forward" and module.__dict__.get(key):
            module.__dict__[key + MARK] = module.__dict__[key]
            module.__dict__[key] = OrderedDict()
    # fires last, also when the module is part of a larger one that loads
    module.register_load_state_dict_post_hook(finish_load)
    if any(map(saves_itself, module.modules())):
        module.register_state_dict_post_hook(add_registered)
    module.__dict__["_workbench"] = record
    module.__dict__["_engine"] = runtime = Runtime(module, {}, {})
    runtime.table.given.update({name: weakref.ref(runtime.table.get(name)) for name in record.slots})
    return module


def blank(cls: type[nn.Module], theirs: frozenset[str], method: str = "forward") -> Any:
    """An object that a pickle fills."""
    return object.__new__(wrapped_class(cls, theirs, method))


Wrapped._blank = staticmethod(blank)


def unwrap(wrapped: Any) -> nn.Module:
    """The plain model inside a wrapped one.

    It shares the parameters that no method took over; of those that vote took over it has the first voter's, as tensors of its own
    (`wrapped.voters()` gives them all). If a scaling is set, the result keeps it, or its units would silently change, and so it does with
    the first voter's prior: it is then a wrapped object without methods.

    Args:
        wrapped: a wrapped object.

    Returns:
        A module of the class that was wrapped.
    """
    if not is_wrapped(wrapped):
        parts = (
            [name for name, part in wrapped.named_modules() if is_wrapped(part)]
            if isinstance(wrapped, nn.Module)
            else []
        )
        hint = f"; its wrapped part is {parts[0]!r}, unwrap that" if parts else ""
        raise TypeError(f"unwrap takes what a wrapper gave, not a plain {type(wrapped).__name__}{hint}")
    return _branch(wrapped, {}, independent=False)


def _branch(wrapped: Any, index: dict[str, int], independent: bool) -> nn.Module:
    new = plain_clone(wrapped)[0]
    new.__class__ = type(wrapped)._plain_class
    if independent:
        copy_rest(new, {id(table_of(wrapped).value(name)) for name in wrapped._workbench.slots})
    extract(new, table_of(wrapped), index, independent)
    if independent:
        engine_of(wrapped).clones.give(index, modules(new))
    scaling, prior = extra(wrapped, "scaling"), extra(wrapped, PRIOR)
    if scaling is None and prior is None:
        return new
    kept = adopt(new, wrapped._workbench.method)
    if scaling is not None:
        add_extra(kept, "scaling", copy.deepcopy(scaling))
    if prior is not None:
        install(kept, prior.of_branch(index))
        kept._workbench.output = wrapped._workbench.output
    return kept


def is_wrapped(model: object) -> bool:
    """Whether a model is a wrapped one.

    Raises:
        TypeError: if it stands for one, as a wrapped Keras model does, which knows no more than calls.
    """
    if hasattr(type(model), "_workbench_torch"):
        raise TypeError(
            f"this {type(model).__name__} is a wrapped Keras model: give model.as_torch(), the wrapped torch module behind it, which has the "
            "same weights"
        )
    return isinstance(model, Wrapped) and "_workbench" in model.__dict__
