"""Wrapped objects: instances of the user's model class that also report the risk of their predictions."""

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
from .additions import MARK, add_extra, extra, remove_extra
from .batches.call_arguments import as_arguments, positional_names
from .batches.own_loss import LABELS
from .calls import labelled_calls, training_losses
from .calls import predict as calling
from .calls.frozen import call_guarded, refuse_change
from .calls.recorded_calls import Taken
from .calls.surrounding import apply_pre_hooks, current_thread, hooked, refuse_proxies, surrounded
from .copying import Persistent
from .hidden_names import note_hidden
from .injected_layers import follow
from .members import predictive
from .method import Call
from .ownership import Record, engine_of, table_of
from .parameters import WrappedParameters
from .peft_calls import look_who_walks
from .prior import NAME as PRIOR
from .prior import install
from .quantized import own_scales
from .runtime import HOOKS, Runtime, copy_rest, finish_load, plain_clone, restore
from .saving.extraction import extract
from .saving.savepoint import Savepoint
from .saving.state_dict import add_registered, saves_itself
from .saving.training_data import note_fit
from .sharded import WHOLE, refuse_sharded
from .standardize import Scaling
from .subclasses import subclass

if TYPE_CHECKING:
    from ..distributions.mixture import Mixture
    from .explain import Explanation


class Wrapped(WrappedParameters, Persistent):
    """Mix-in for the class of a wrapped model; see `Wrapper`.

    Calling the object returns the prediction, as for the plain model; with `return_risk=True` the pair (prediction, risk). Attributes, methods,
    sub-modules and the `state_dict` keys of shared parameters are those of the model. If the model defines one of the names below itself, the
    model's attribute takes precedence; `Wrapped.loss(wrapped, ...)` still calls the method below.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do nothing: the user's class may require keyword arguments here that wrapping cannot give."""

    def forward(self, *args: Any, return_risk: bool = False, tile_and_reduce: bool | None = None, **kwargs: Any) -> Any:
        """Return the prediction of the model; with `return_risk=True` also its risk.

        Args:
            args, kwargs: inputs, as for the model.
            return_risk: whether to return (prediction, risk). With one wrapper the risk has the structure and shapes of the prediction; with
                several, or for class outputs, it is a `Risk`.
            tile_and_reduce: for vote: True returns the mean of all voters, also in training mode; False deals the rows of the batch out to
                the voters, each row to one; None (default) deals in training mode and averages in evaluation mode.
        """
        return _answer(self, "forward", args, kwargs, return_risk, tile_and_reduce)

    def quantiles(self, *args: Any, **kwargs: Any) -> Any:
        """Return the quantiles of the targets predicted by quantile heads, `sculpt.Wrapper(Quantiles(levels))`.

        Args:
            args, kwargs: inputs, as for the model.

        Returns:
            The structure of the prediction with each tensor [levels, ...], increasing along levels, in units of the prediction; each level is
            averaged over voters and samples.

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
        return call_guarded(calling.quantiles, self, *apply_pre_hooks(self, args, kwargs))

    def predictive(self, *args: Any, **kwargs: Any) -> Mixture:
        """Return the predictive distribution of the targets: the exact mixture of the distributions of all voters and samples.

        Args:
            args, kwargs: inputs, as for the model.

        Returns:
            A `torch.distributions.Distribution` with log_prob, cdf, icdf, mean, variance, stddev and sample, in units of the prediction.

        Raises:
            ValueError: if members predict no distribution (there is no sculpt), or the model returns several tensors or class outputs.

        Example:
            >>> import torch
            >>> from workbench import compose, sculpt, vote
            >>> model = compose(vote.Wrapper(5), sculpt.Wrapper())(torch.nn.Linear(2, 1)).eval()
            >>> predictive = model.predictive(torch.zeros(4, 2))
            >>> predictive.log_prob(torch.zeros(4, 1)).shape, bool((predictive.icdf(0.05) < predictive.icdf(0.95)).all())
            (torch.Size([4, 1]), True)
        """
        return call_guarded(predictive, self, *apply_pre_hooks(self, args, kwargs))

    # ---- training
    def loss(self, criterion: Callable[[Any, Any], Tensor] | None, x: Any, y: Any) -> Tensor:
        """Return the training loss of a batch: the loss of each voter on every row, plus the terms of other methods such as sculpt's likelihood.

        Args:
            criterion: `criterion(prediction, target)`, such as `nn.MSELoss()`, called once for each voter, in the order of `voters()`; None
                for the likelihood of the risk heads alone.
            x: the input, a tuple of positional inputs, or a dict of keyword inputs.
            y: the target.

        Returns:
            A scalar tensor, the mean over the voters; in standardized units if a scaling is set.
        """
        return call_guarded(training_losses.loss, self, criterion, *apply_pre_hooks(self, *as_arguments(self, x)), y)

    def fit(self, inputs: Any) -> Any:
        """Fit in closed form to the training data: neo's signature, laplace's posterior, swag's models.

        Args:
            inputs: a tensor [rows, ...], an iterable of input batches or of (input, target) pairs, or rows in any form that `workbench.fit`
                takes; laplace estimates its noise from the targets. Pairs for a model that needs two inputs are its inputs.

        Returns:
            The object itself.

        Raises:
            ValueError: if no method is fitted in closed form; use `workbench.fit` to train by gradient descent.
        """
        refuse_change(self, "fit()")
        refuse_sharded(self, WHOLE)
        with Savepoint(self, values=any(method.collects for method in self._workbench.methods)):
            calling.fit(self, inputs)
            note_fit(self, inputs)
        return self

    @property
    def needs_fit(self) -> bool:
        """Whether any method must be fitted in closed form with `fit`."""
        return any(method.needs_fit for method in self._workbench.methods)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the attached methods, in canonical order."""
        return tuple(method.name for method in self._workbench.methods)

    # ---- units
    @property
    def scaling(self) -> Scaling | None:
        """The standardization between the user's and the model's units, or None."""
        return extra(self, "scaling")

    def scale(self, *args: None, **values: Any) -> None:
        """Standardize inputs before the model, and convert predictions and risks back to original units.

        Args:
            values: x_mean, x_scale (of the first input, or tuples or dicts for several inputs), y_mean, y_scale and x_dtype; see `Scaling`.
        """
        refuse_change(self, "scale()")
        if args:
            warn_deprecated("scale(None)", "wrapped.unscale()")
            Wrapped.unscale(self)
            return
        for method in self._workbench.methods if values.get("y_mean") is not None else ():
            if not getattr(method.distribution, "standardizable", True):
                raise ValueError(
                    f"y_mean, y_scale: targets of {method.distribution} cannot be standardized; give only x_mean and x_scale"
                )
        like = next((p for p in self.parameters() if p.is_floating_point()), None)
        scaling = Scaling(**{"names": positional_names(self), **values})
        add_extra(self, "scaling", scaling.to(like.device if like is not None else None))

    def unscale(self) -> None:
        """Remove the standardization, so that inputs and outputs are in the model's own units again."""
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
        """Return each voter as a plain model of the user's class with its own copies of all tensors; a single model without voters.

        If the object has a scaling or a prior (`vote.Wrapper(prior=)`), the models keep them: each is a wrapped object without methods.

        Raises:
            TypeError: the object is sharded by `fully_shard`.
        """
        refuse_sharded(self, WHOLE)
        evaluation = Call(training=False, return_risk=True)
        axes = [
            axis
            for method in self._workbench.methods
            if method.members and (axis := method.axis(evaluation)) is not None
        ]
        indices = [{axes[0].name: i} for i in range(axes[0].size)] if axes else [{}]
        return [_branch(self, index, independent=True) for index in indices]

    def unwrap(self) -> nn.Module:
        """Return the plain model with the current parameters; see `unwrap`."""
        return unwrap(self)

    def explain(self) -> Explanation:
        """Explain how calls so far were run, and why, as text or as a table in a notebook."""
        from .explain import explained

        return explained(self)

    # `_get_name` stays as it is: transformers' Trainer uses it to decide whether labels are shifted
    def __repr__(self) -> str:
        plain, name = super().__repr__(), self._get_name()
        return self._workbench_name() + plain.removeprefix(name) if plain.startswith(f"{name}(") else plain

    def _workbench_name(self) -> str:
        """Return the name of the model's class with its methods, such as Net[vote(n_voters=5)]."""
        if "_workbench" not in self.__dict__:
            return self._get_name()
        names = ", ".join(repr(method) for method in self._workbench.methods)
        method = "" if self._workbench.method == "forward" else f".{self._workbench.method}"
        return f"{type(self)._plain_class.__name__}{method}[{names}]"

    # ---- hooks and functions that other libraries set around calls
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
        if record is not None and name == "peft_config":  # the last that peft does where it puts layers into a model
            follow(self)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name == "peft_config" and "_workbench" in self.__dict__:  # and where it takes them out
            follow(self)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Iterate over all modules, as for any module."""
        look_who_walks(self, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        return super().named_modules(*args, **kwargs)

    def named_children(self) -> Any:
        """Iterate over the modules directly below, as for any module."""
        look_who_walks(self, "")
        return super().named_children()

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_risk") and self._forward_hooks and "_workbench" in self.__dict__:
            return hooked(self, super()._call_impl, args, kwargs)
        return super()._call_impl(*args, **kwargs)


PUBLIC = tuple(
    name
    for name in (*vars(Wrapped), *vars(WrappedParameters), "frozen")
    if not name.startswith("_") and name not in ("forward", "named_modules", "named_children")
)


# ---- building
_CLASSES: dict[tuple[type, frozenset[str], str], type[Wrapped]] = {}


def wrapped_class(cls: type[nn.Module], overridden: frozenset[str], method: str) -> type[Wrapped]:
    """Return the (cached) class of wrapped objects of a user's class, a subclass of it and of `Wrapped`.

    Args:
        cls: the user's class.
        overridden: public names of `Wrapped` that the model to be wrapped has as instance attributes, which take precedence.
        method: name of the method that answers with risk.
    """
    if (cls, overridden, method) not in _CLASSES:
        _CLASSES[cls, overridden, method] = subclass(Wrapped, PUBLIC, _answer, cls, overridden, method)
    return _CLASSES[cls, overridden, method]


def _answer(wrapped: Any, method: str, args: tuple, kwargs: dict[str, Any], risk: bool, tile: bool | None) -> Any:
    # inside a branch, or while the object is still being built, the plain model answers
    if "_workbench" not in wrapped.__dict__ or engine_of(wrapped).traced.inside:
        return getattr(super(Wrapped, wrapped), method)(*args, **kwargs)
    runtime, compiling = wrapped.__dict__["_engine"], torch.compiler.is_compiling()
    frozen = runtime.frozen
    trial = None if compiling else runtime.recorded.begin(args, kwargs, risk, tile, frozen)
    if type(trial) is Taken:
        return trial.answer
    refuse_proxies(wrapped, args, kwargs)
    if method in wrapped.__dict__ or (risk and wrapped._forward_hooks):
        runtime.risk_requested[current_thread()] = risk
    # after a graph break Dynamo can resume inside a literal `torch.no_grad()`, but not inside a context manager held by a variable
    if compiling:
        # The first call inspects the model, and the losses of transformers break the graph: both run outside the graph, since otherwise
        # Dynamo would compile our functions one by one after the break.
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
    try:  # inlined, since a helper would add a stack frame between warnings and the user's line
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
        note_hidden(wrapped, error)
        raise


def copied(model: nn.Module) -> nn.Module:
    """Return a structural copy of a model, which may be wrapped or have wrapped parts."""
    new = structural_copy(model)
    own_scales(new)
    for path, inner in model.named_modules():
        if is_wrapped(inner):
            table = table_of(inner)
            restore(new.get_submodule(path.replace("_orig_mod.", "")), table.originals, table.views)
    return new


def adopt(module: nn.Module, method: str) -> Any:
    """Turn a module into a wrapped object without methods, in place.

    Args:
        module: the module, not shared with the user's model.
        method: name of its method that answers with risk.
    """
    record = Record.of(module, method)
    attributes = {*module.__dict__, *module._modules, *module._parameters, *module._buffers}
    module.__class__ = wrapped_class(type(module), frozenset(name for name in PUBLIC if name in attributes), method)
    if method in module.__dict__:  # an instance attribute would hide the wrapped method
        module.__dict__[method + MARK] = module.__dict__.pop(method)
    # hooks of the model run with its forward, once per branch; hooks registered on the wrapped object run once per call
    for key in HOOKS:
        if method == "forward" and module.__dict__.get(key):
            module.__dict__[key + MARK] = module.__dict__[key]
            module.__dict__[key] = OrderedDict()
    # runs after loading is complete, also if the module is part of a larger module
    module.register_load_state_dict_post_hook(finish_load)
    if any(map(saves_itself, module.modules())):
        module.register_state_dict_post_hook(add_registered)
    module.__dict__["_workbench"] = record
    module.__dict__["_engine"] = runtime = Runtime(module, {}, {})
    runtime.table.originals.update({name: weakref.ref(runtime.table.get(name)) for name in record.slots})
    return module


def blank(cls: type[nn.Module], overridden: frozenset[str], method: str = "forward") -> Any:
    """Create an uninitialized wrapped object, whose state unpickling sets."""
    return object.__new__(wrapped_class(cls, overridden, method))


Wrapped._blank = staticmethod(blank)


def unwrap(wrapped: Any) -> nn.Module:
    """Return the plain model inside a wrapped object.

    It shares the parameters that no method has taken over; of parameters taken over by vote it has copies of the first voter's
    (`wrapped.voters()` returns all). A scaling is kept, since otherwise the units would silently change, and so is the first voter's prior; the
    result is then a wrapped object without methods.

    Args:
        wrapped: a wrapped object.

    Returns:
        A module of the class that was wrapped.

    Raises:
        TypeError: if `wrapped` is not a wrapped object.
    """
    if not is_wrapped(wrapped):
        modules_by_name = wrapped.named_modules() if isinstance(wrapped, nn.Module) else ()
        parts = [name for name, part in modules_by_name if is_wrapped(part)]
        hint = f"; its wrapped part is {parts[0]!r}, unwrap that" if parts else ""
        raise TypeError(f"unwrap takes a wrapped object, not a plain {type(wrapped).__name__}{hint}")
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
    adopted = adopt(new, wrapped._workbench.method)
    if scaling is not None:
        add_extra(adopted, "scaling", copy.deepcopy(scaling))
    if prior is not None:
        install(adopted, prior.of_branch(index))
        adopted._workbench.output = wrapped._workbench.output
    return adopted


def is_wrapped(model: object) -> bool:
    """Return whether a model is a wrapped object.

    Raises:
        TypeError: for a wrapped Keras model, which only supports calls; its wrapped torch module is `model.as_torch()`.
    """
    if hasattr(type(model), "_workbench_torch"):
        raise TypeError(
            f"this {type(model).__name__} is a wrapped Keras model: give model.as_torch(), the wrapped torch module behind it, which has the "
            "same weights"
        )
    return isinstance(model, Wrapped) and "_workbench" in model.__dict__
