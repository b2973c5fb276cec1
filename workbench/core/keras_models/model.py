"""The wrapped Keras model, an instance of the user's class, whose calls can also return risk."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import keras
import torch
from torch import Tensor, nn

from ...engine.execution import Execution
from ...errors import WorkbenchWarning
from ..additions import EXTRAS
from ..wrapped import PUBLIC
from .class_heads import noise_of
from .compiled import compile_alike
from .extras import KEY, gathering, losses_of, set_masks, without_extras
from .plain import is_built, new_like
from .saving import KerasFiles
from .tensors import KerasModule, refuse_layers
from .training import NO_LOSS, KerasTraining, as_tensor, name_of
from .variables import variables_of

_CLASSES: dict[type, type] = {}
# attributes of a wrapped model that a .keras file contains besides its own weights
SAVED = ("_workbench_plain", "optimizer")
_UNLIKE_KERAS = ("fit", "loss", "scale", "predict")  # names of `Wrapped` that mean something else in Keras


class WrappedKeras(KerasFiles, KerasTraining):
    """Mix-in for the class of a wrapped Keras model, before the user's class in the MRO.

    The layers are shared with the given model and never modified: each branch of a call runs them in a Keras scope with other tensors in place
    of their variables. `as_torch()` returns the underlying wrapped torch module, for `workbench.fit`, `calibrate` and the rest of workbench.
    """

    _workbench_plain: Any
    wrappers: tuple[Any, ...]
    _workbench_torch: Any = None
    _workbench_module: Any
    # in a training, test or predict step of Keras: whether it trains; None outside of steps
    _workbench_step: bool | None
    _workbench_noise: bool  # whether the step needs the noise of class scores in place of their risk

    # ---- calls
    def __call__(
        self, *args: Any, return_risk: bool | None = None, tile_and_reduce: bool | None = None, **kwargs: Any
    ) -> Any:
        """Call the model; with `return_risk=True` return the pair (prediction, risk).

        Args:
            args, kwargs: as for the model.
            return_risk: whether to return risk; by default only in training, evaluation and prediction steps of a model with a risk head.
            tile_and_reduce: as for any wrapped object.
        """
        if _is_symbolic((args, kwargs)):
            return self._symbolic_answer(args, kwargs)
        args, kwargs = keras.tree.map_structure(as_tensor, (args, kwargs))
        wrapped = self._materialize(args, kwargs)
        self.__dict__["_workbench_called"] = True
        step, training = self._workbench_step, kwargs.pop("training", None)
        outer_training = self._outer_training()
        if training is None and step is None:
            training = outer_training
        mode = bool(step if training is None and step is not None else training)
        # None keeps the default of the model; otherwise `training` follows the mode, which inspections of the model may change
        if training is None:
            kwargs["training"] = None
        if return_risk is None:
            return_risk = step is not None and self._head is not None
            if (
                return_risk
                and mode
                and tile_and_reduce is None
                and any(m.deals(True) for m in wrapped._workbench.methods)
            ):
                tile_and_reduce = False
        kind = self._workbench_module.leaves_extras(mode, args, kwargs)
        has_extras = kind is not None and issubclass(kind, Tensor | Mapping | list | tuple)
        self._workbench_module.notes.clear()
        original_mode, runtime = wrapped.training, wrapped.__dict__["_engine"]
        branches: list[Any] = []
        wrapped.train(mode)
        try:
            runtime.observe = branches.append if return_risk and self._workbench_noise else None
            with gathering(wrapped) if has_extras else nullcontext():
                if has_extras:
                    kwargs[KEY] = True
                answer = wrapped(*args, return_risk=return_risk, tile_and_reduce=tile_and_reduce, **kwargs)
        finally:
            runtime.observe = None
            wrapped.train(original_mode)
        noise = None
        if branches:
            noise, self.__dict__["_workbench_meaning"] = noise_of(wrapped, branches[-1])
        if not has_extras:
            return answer if noise is None else (answer[0], noise)
        self._workbench_module.notes.clear()  # set by additional passes that inspect the model without collecting extras
        y, risk, state = without_extras(answer, kind, return_risk)
        dealt = next((method.name for method in wrapped._workbench.methods if method.deals(True, True)), "")
        keras.layers.Layer.add_loss(self, losses_of(state, dealt))  # add_loss of Functional models raises an error
        set_masks(y, state, dealt)
        return (y, risk if noise is None else noise) if return_risk else y

    def _symbolic_answer(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Answer a symbolic call, as when a Keras model is built with this one or its layers as a part."""
        if self._workbench_torch is None or any(
            isinstance(leaf, Tensor) for leaf in keras.tree.flatten((args, kwargs))
        ):
            symbolic = self._workbench_plain(*args, **kwargs)
            if self._workbench_torch is not None or not is_built(self._workbench_plain):
                return symbolic
            self._make()
        was_warned = self.__dict__.get("_workbench_warned")
        self.__dict__["_workbench_warned"] = True
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.__dict__["_workbench_warned"] = was_warned

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        return self._workbench_plain.compute_output_spec(*args, **kwargs)

    def _outer_training(self) -> Any:
        """Return the `training` argument of the enclosing Keras call, if any; an outermost call resets the losses of earlier calls."""
        context = self._get_call_context()
        training = context.get_value("training")
        self._maybe_reset_call_context()
        return training

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _is_symbolic((args, kwargs)):
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # Keras records the node of the graph
        return self(*args, **kwargs)

    def _materialize(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the wrapped torch module; it is created at the first call, since a Keras model may get its weights only then."""
        if self._workbench_torch is None:
            plain = self._workbench_plain
            if not is_built(plain):
                with torch.no_grad():
                    plain(*args, **{**kwargs, "training": False})
        return self._made()

    def _make(self) -> None:
        plain = self._workbench_plain
        refuse_layers(plain)
        module = self._workbench_module or KerasModule([plain])
        wrapped = self._workbench_torch or module
        for wrapper in self.wrappers[self._workbench_done :]:
            wrapped = wrapper(wrapped)
        _refuse_methods(wrapped, module)
        module.belong_to(self)
        for name, value in plain.__dict__.items():
            if name not in self.__dict__ and name not in _BOUND:
                self.__dict__[name] = value
        for name, layer in plain._modules.items():
            self._modules.setdefault(name, layer)
        self.__dict__.update(
            built=True, _workbench_module=module, _workbench_torch=wrapped.eval(), _workbench_done=len(self.wrappers)
        )

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Build the model, so that it has weights."""
        self._workbench_plain.build(*args, **kwargs)
        if is_built(self._workbench_plain):
            self._made()

    @property
    def input(self) -> Any:
        return self._graph_end("input")

    @property
    def inputs(self) -> Any:
        return self._graph_end("inputs")

    def _graph_end(self, name: str) -> Any:
        """Return inputs of the graph of layers; warn once, since models built from it have the weights of the given model."""
        if not self.__dict__.get("_workbench_warned") and any(hasattr(v, "_workbench_slot") for v in self.weights):
            self.__dict__["_workbench_warned"] = True
            warnings.warn(
                f"{name} and the outputs of layers belong to the given model, whose weights are not those of the voters: to build models from "
                f"single layers, use those of a voter, model.voters()[0].{name}",
                WorkbenchWarning,
                stacklevel=3,
            )
        return getattr(self._workbench_plain, name)

    def as_torch(self) -> Any:
        """Return the wrapped torch module over the same variables, for `workbench.fit`, `calibrate` and the rest of workbench.

        Raises:
            RuntimeError: if the model has no weights yet.
        """
        wrapped = self._made()
        if any(v.regularizer is not None for v in self._workbench_plain.trainable_variables):
            warnings.warn(
                "weights of this Keras model have a regularizer, which only the model's own fit and train_on_batch add to the loss",
                WorkbenchWarning,
                stacklevel=2,
            )
        return wrapped

    def _made(self) -> Any:
        """Return the wrapped torch module; raise RuntimeError if the model has no weights yet."""
        if self._workbench_torch is None:
            if not is_built(self._workbench_plain):
                raise RuntimeError(f"{type(self).__name__} has no weights yet: call it once with inputs, or build it")
            self._make()
        self._refuse_changes()
        return self._workbench_torch

    def unwrap_shared(self) -> Any:
        """Return the given Keras model."""
        return self._workbench_plain

    def unwrap(self) -> Any:
        """Return a new plain Keras model, with the weights of the first voter if there are voters."""
        return self._plain_with(self._made().unwrap())

    def voters(self) -> list[Any]:
        """Return each voter as a plain Keras model with its own weights."""
        return [self._plain_with(voter) for voter in self._made().voters()]

    def _plain_with(self, module: Any) -> Any:
        plain = self._workbench_plain
        new = new_like(plain)
        places = {id(place.variable): place for place in self._workbench_module.places}
        for variable, old in zip(new.weights, plain.weights, strict=True):
            place = places[id(old)]
            holder: Any = module.get_submodule(place.path)
            variable.assign(getattr(holder, place.name).detach())
        return new

    def __getattr__(self, name: str) -> Any:
        if name in PUBLIC and name not in _UNLIKE_KERAS:
            return getattr(self._made(), name)
        return super().__getattr__(name)  # type: ignore[misc]

    # ---- variables
    @property
    def weights(self) -> list[Any]:
        if self._workbench_torch is None:
            return list(self._workbench_plain.weights)
        return variables_of(self)

    @property
    def variables(self) -> list[Any]:
        states = self._workbench_module.states if self._workbench_torch is not None else ()
        return [*self.weights, *states] if self._workbench_torch is not None else list(self._workbench_plain.variables)

    @property
    def trainable_weights(self) -> list[Any]:
        return [v for v in self.weights if _is_trainable(v)] if self.trainable else []

    @property
    def non_trainable_weights(self) -> list[Any]:
        trainable = set(map(id, self.trainable_weights))
        return [v for v in self.weights if id(v) not in trainable]

    @property
    def trainable_variables(self) -> list[Any]:
        return self.trainable_weights

    @property
    def non_trainable_variables(self) -> list[Any]:
        trainable = set(map(id, self.trainable_weights))
        return [v for v in self.variables if id(v) not in trainable]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        source = self._workbench_torch if self._workbench_torch is not None else self._workbench_plain
        return source.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._made().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._made().load_state_dict(*args, **kwargs)

    def _track_variables(self) -> None:
        """Do nothing: torch finds the parameters through `named_parameters`."""

    def train(self, mode: bool = True) -> Any:
        """Set only the flag of this model: Keras passes the mode as an argument of calls, and the layers are shared with the given model."""
        self.__dict__["training"] = mode
        return self

    @property
    def layers(self) -> list[Any]:
        return self._workbench_plain.layers


def twin(model: Any, cls: type) -> Any:
    """Return a model of class `cls` that shares the layers of a model, with its own bookkeeping."""
    new: Any = object.__new__(cls)
    new.__dict__.update(model.__dict__)
    for name in ("_modules", "_parameters", "_buffers"):
        new.__dict__[name] = dict(model.__dict__[name])
    new._modules.pop("_torch_params", None)
    for name in _BOUND:
        new.__dict__.pop(name, None)
    new.__dict__.update(_inbound_nodes=[], _outbound_nodes=[], _losses=[], _loss_ids=set())
    tracked = {name: list(model.__dict__[name]) for name in _TRACKED}
    new._initialize_tracker()
    for name, items in tracked.items():
        new.__dict__[name].extend(items)
    return new


_BOUND = ("build", "quantize", "_tracker")  # attributes of a model that are bound to it
_TRACKED = ("_trainable_variables", "_non_trainable_variables", "_layers", "_metrics", "_seed_generators")


def model_of(wrapped: Any) -> Any:
    """Return the wrapped Keras model whose `as_torch()` a torch module is; None for any other module, including copies."""
    if isinstance(wrapped, WrappedKeras):
        return wrapped
    owner = wrapped.owner if isinstance(wrapped, KerasModule) else None
    return owner if owner is not None and owner._workbench_torch is wrapped else None


def wrapped_twin(model: Any, wrappers: tuple[Any, ...], before: Any = None, decorated: bool = False) -> Any:
    """Wrap a Keras model.

    Args:
        model: the plain model; its layers are shared.
        wrappers: the wrappers to apply.
        before: wrapped model with all but the last of these wrappers; None if the model is not wrapped yet.
        decorated: whether the class is decorated, so that the model cannot be compiled yet.
    """
    refuse_layers(model)
    cls = type(model)
    if cls not in _CLASSES:
        _CLASSES[cls] = types.new_class(
            cls.__name__,
            (WrappedKeras, cls),
            exec_body=lambda ns: ns.update(__module__=cls.__module__, __doc__=cls.__doc__),
        )
    new = twin(model, _CLASSES[cls])
    new.__dict__.update(
        _workbench_plain=model,
        wrappers=wrappers,
        _workbench_torch=before and before._workbench_torch,
        _workbench_module=before and before._workbench_module,
        _workbench_done=before._workbench_done if before is not None and before._workbench_torch is not None else 0,
        _workbench_step=None,
        _workbench_noise=False,
        _compute_loss_has_training_arg=True,
    )
    example = next((w.example for w in wrappers if w.example is not None), None)
    if example is not None and not isinstance(example, Execution):
        new._materialize(
            *keras.tree.map_structure(as_tensor, (example if isinstance(example, tuple) else (example,), {}))
        )
    elif is_built(model):
        new._make()
    compile_alike(new, before if before is not None else model)
    if new._head is not None and not decorated and (not new.compiled or new._compile_loss is None):
        warnings.warn(NO_LOSS.format(name_of(new._head)), WorkbenchWarning, stacklevel=6)
    return new


# ---- checks and small pieces
def _refuse_methods(wrapped: Any, module: KerasModule) -> None:
    methods = wrapped._workbench.methods
    for method in methods:
        statistics = [p for p in module.places if p.buffer and p.variable._value.is_floating_point()]
        if method.collects and statistics:
            raise ValueError(
                f"{method.name} would have to recompute the statistics of {statistics[0].path} for each set of weights, which only works for "
                "torch layers: use vote or sample"
            )
        if method.channels_first and keras.config.image_data_format() != "channels_first":
            raise ValueError(
                f"{method.name} transforms images [rows, channels, height, width], but Keras is set to channels_last: give your own transforms, "
                "functions of the input, or call keras.config.set_image_data_format('channels_first')"
            )


def _is_symbolic(values: Any) -> bool:
    leaves = keras.tree.flatten(values)
    return any(isinstance(leaf, keras.KerasTensor) or (isinstance(leaf, Tensor) and leaf.is_meta) for leaf in leaves)


def _is_trainable(variable: Any) -> bool:
    if getattr(variable, "_workbench_slot", "").startswith(f"{EXTRAS}.density"):  # fitted in closed form
        return False
    source = getattr(variable, "_workbench_source", variable)
    return bool(variable.trainable and source.trainable)


__all__ = ["SAVED", "WrappedKeras", "model_of", "twin", "wrapped_twin"]
