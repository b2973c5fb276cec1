"""The wrapped Keras model: of the user's class, it is called, compiled, trained and saved as any, and its calls may give risk."""

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
from ..ownership import EXTRAS
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
SAVED = ("_workbench_plain", "optimizer")  # what a .keras file has of a wrapped model beside its own weights
_UNLIKE_KERAS = ("fit", "loss", "scale", "predict")  # names that Keras has for something else


class WrappedKeras(KerasFiles, KerasTraining):
    """What a Keras model is after wrapping; its class comes before the user's.

    The layers are those of the given model, and are never written into: each branch of a call runs them in a scope of Keras that has other
    tensors in place of their variables. `as_torch()` is the wrapped torch module behind it, which `workbench.fit`, `calibrate` and all else
    take.
    """

    _workbench_plain: Any
    wrappers: tuple[Any, ...]
    _workbench_torch: Any = None
    _workbench_module: Any
    _workbench_step: bool | None  # in a step of Keras: whether it trains
    _workbench_noise: bool  # whether it needs the noise of class scores in the place of their risk

    # ---- calls
    def __call__(
        self, *args: Any, return_risk: bool | None = None, tile_and_reduce: bool | None = None, **kwargs: Any
    ) -> Any:
        """As the model itself; with `return_risk=True` the pair (prediction, risk).

        Args:
            args, kwargs: as of the model.
            return_risk: whether risk is wanted; by default only in the steps of training, evaluation and prediction of a model with a risk
                head.
            tile_and_reduce: as of any wrapped object.
        """
        if _is_symbolic((args, kwargs)):
            return self._symbolic_answer(args, kwargs)
        args, kwargs = keras.tree.map_structure(as_tensor, (args, kwargs))
        wrapped = self._materialize(args, kwargs)
        self.__dict__["_workbench_called"] = True
        step, training = self._workbench_step, kwargs.pop("training", None)
        outside = self._training_outside()
        if training is None and step is None:
            training = outside
        mode = bool(step if training is None and step is not None else training)
        # what the model takes by default; else the mode says it, which looks at a model may change
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
        gathers = kind is not None and issubclass(kind, Tensor | Mapping | list | tuple)
        self._workbench_module.notes.clear()
        before, runtime = wrapped.training, wrapped.__dict__["_engine"]
        branches: list[Any] = []
        wrapped.train(mode)
        try:
            runtime.observe = branches.append if return_risk and self._workbench_noise else None
            with gathering(wrapped) if gathers else nullcontext():
                if gathers:
                    kwargs[KEY] = True
                answer = wrapped(*args, return_risk=return_risk, tile_and_reduce=tile_and_reduce, **kwargs)
        finally:
            runtime.observe = None
            wrapped.train(before)
        noise = None
        if branches:
            noise, self.__dict__["_workbench_meaning"] = noise_of(wrapped, branches[-1])
        if not gathers:
            return answer if noise is None else (answer[0], noise)
        self._workbench_module.notes.clear()  # looks at the model beside the call gather nothing
        y, risk, state = without_extras(answer, kind, return_risk)
        dealt = next((method.name for method in wrapped._workbench.methods if method.deals(True, True)), "")
        keras.layers.Layer.add_loss(self, losses_of(state, dealt))  # which Functional models refuse of users
        set_masks(y, state, dealt)
        return (y, risk if noise is None else noise) if return_risk else y

    def _symbolic_answer(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What Keras asks for when a model is made: of the wrapped one as a layer of another, and of its own layers."""
        if self._workbench_torch is None or any(
            isinstance(leaf, Tensor) for leaf in keras.tree.flatten((args, kwargs))
        ):
            symbolic = self._workbench_plain(*args, **kwargs)
            if self._workbench_torch is not None or not is_built(self._workbench_plain):
                return symbolic
            self._make()
        told = self.__dict__.get("_workbench_told")
        self.__dict__["_workbench_told"] = True
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.__dict__["_workbench_told"] = told

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        return self._workbench_plain.compute_output_spec(*args, **kwargs)

    def _training_outside(self) -> Any:
        """What a call says about training that this one is part of; at one that is not, losses of earlier calls are forgotten."""
        context = self._get_call_context()
        training = context.get_value("training")
        self._maybe_reset_call_context()
        return training

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _is_symbolic((args, kwargs)):
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # of Keras, which notes the node
        return self(*args, **kwargs)

    def _materialize(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The wrapped torch module, made at the first call, since a Keras model may get its weights only then."""
        if self._workbench_torch is None:
            plain = self._workbench_plain
            if not is_built(plain):
                with torch.no_grad():
                    plain(*args, **{**kwargs, "training": False})
            self._make()
        return self._workbench_torch

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
            if name not in self.__dict__:
                self.__dict__[name] = value
        for name, layer in plain._modules.items():
            self._modules.setdefault(name, layer)
        self.__dict__.update(
            built=True, _workbench_module=module, _workbench_torch=wrapped.eval(), _workbench_done=len(self.wrappers)
        )

    def build(self, *args: Any, **kwargs: Any) -> None:
        """As of the model itself, so that there are weights."""
        self._workbench_plain.build(*args, **kwargs)
        if is_built(self._workbench_plain):
            self._made()

    @property
    def input(self) -> Any:
        return self._of_graph("input")

    @property
    def inputs(self) -> Any:
        return self._of_graph("inputs")

    def _of_graph(self, name: str) -> Any:
        """An end of the graph of layers; who makes a model of it gets the weights of the given one."""
        if not self.__dict__.get("_workbench_told") and any(hasattr(v, "_workbench_slot") for v in self.weights):
            self.__dict__["_workbench_told"] = True
            warnings.warn(
                f"{name} and the outputs of layers belong to the given model, whose weights are not those of the voters: make models of single "
                f"layers of a voter, model.voters()[0].{name}",
                WorkbenchWarning,
                stacklevel=3,
            )
        return getattr(self._workbench_plain, name)

    def as_torch(self) -> Any:
        """The wrapped torch module over the same variables: what `workbench.fit`, `calibrate` and all else of workbench take.

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
        """The wrapped torch module, made by now if the model has weights."""
        if self._workbench_torch is None:
            if not is_built(self._workbench_plain):
                raise RuntimeError(f"{type(self).__name__} has no weights yet: call it once with inputs, or build it")
            self._make()
        return self._workbench_torch

    def unwrap_shared(self) -> Any:
        """The given Keras model."""
        return self._workbench_plain

    def unwrap(self) -> Any:
        """A plain Keras model, with the weights of the first voter if any vote."""
        return self._plain_with(self._made().unwrap())

    def voters(self) -> list[Any]:
        """Every voter as a plain Keras model with weights of its own."""
        return [self._plain_with(voter) for voter in self._made().voters()]

    def _plain_with(self, module: Any) -> Any:
        plain = self._workbench_plain
        new = new_like(plain)
        places = {id(place.variable): place for place in self._workbench_module.places}
        for variable, old in zip(new.weights, plain.weights, strict=True):
            place = places[id(old)]
            holder: Any = module.get_submodule(place.path) if place.path else module
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
        return [v for v in self.weights if _learns(v)] if self.trainable else []

    @property
    def non_trainable_weights(self) -> list[Any]:
        learning = set(map(id, self.trainable_weights))
        return [v for v in self.weights if id(v) not in learning]

    @property
    def trainable_variables(self) -> list[Any]:
        return self.trainable_weights

    @property
    def non_trainable_variables(self) -> list[Any]:
        learning = set(map(id, self.trainable_weights))
        return [v for v in self.variables if id(v) not in learning]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        source = self._workbench_torch if self._workbench_torch is not None else self._workbench_plain
        return source.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._made().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._made().load_state_dict(*args, **kwargs)

    def _track_variables(self) -> None:
        """Torch sees the parameters by `named_parameters`."""

    def train(self, mode: bool = True) -> Any:
        """Keras' calls take their mode as an argument, so that the layers, which the given model has as well, keep theirs."""
        self.__dict__["training"] = mode
        return self

    @property
    def layers(self) -> list[Any]:
        return self._workbench_plain.layers


def twin(model: Any, cls: type) -> Any:
    """A model of a class over the same layers, with bookkeeping of its own."""
    new: Any = object.__new__(cls)
    new.__dict__.update(model.__dict__)
    for name in ("_modules", "_parameters", "_buffers"):
        new.__dict__[name] = dict(model.__dict__[name])
    new._modules.pop("_torch_params", None)
    for name in ("build", "quantize", "_tracker"):  # bound to the model
        new.__dict__.pop(name, None)
    new.__dict__.update(_inbound_nodes=[], _outbound_nodes=[], _losses=[], _loss_ids=set())
    kept = {name: list(model.__dict__[name]) for name in _TRACKED}
    new._initialize_tracker()
    for name, items in kept.items():
        new.__dict__[name].extend(items)
    return new


_TRACKED = ("_trainable_variables", "_non_trainable_variables", "_layers", "_metrics", "_seed_generators")


def model_of(wrapped: Any) -> Any:
    """The wrapped Keras model that a torch module is the `as_torch()` of, None for any other, copies included."""
    if isinstance(wrapped, WrappedKeras):
        return wrapped
    owner = wrapped.owner if isinstance(wrapped, KerasModule) else None
    return owner if owner is not None and owner._workbench_torch is wrapped else None


def wrapped_twin(model: Any, wrappers: tuple[Any, ...], before: Any = None, decorated: bool = False) -> Any:
    """The wrapped form of a Keras model.

    Args:
        model: the plain model; its layers are shared.
        wrappers: what is put on it.
        before: a wrapped form of it with all but the last of these.
        decorated: whether the class was decorated, so that nobody can have compiled the model yet.
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
        moving = [p for p in module.places if p.buffer and p.variable._value.is_floating_point()]
        if method.collects and moving:
            raise ValueError(
                f"{method.name} would have to renew the statistics of {moving[0].path} for each set of weights, and knows those of torch's "
                "layers only: use vote or sample"
            )
        if method.channels_first and keras.config.image_data_format() != "channels_first":
            raise ValueError(
                f"{method.name} turns images [rows, channels, height, width], and Keras is set to channels_last: give transforms of your own, "
                "functions of the input, or keras.config.set_image_data_format('channels_first')"
            )


def _is_symbolic(values: Any) -> bool:
    leaves = keras.tree.flatten(values)
    return any(isinstance(leaf, keras.KerasTensor) or (isinstance(leaf, Tensor) and leaf.is_meta) for leaf in leaves)


def _learns(variable: Any) -> bool:
    if getattr(variable, "_workbench_slot", "").startswith(f"{EXTRAS}.density"):  # learned in closed form
        return False
    source = getattr(variable, "_workbench_source", variable)
    return bool(variable.trainable and source.trainable)


__all__ = ["SAVED", "WrappedKeras", "model_of", "twin", "wrapped_twin"]
