"""The wrapped Keras model: of the user's class, it is called, compiled, trained and saved as any, and its calls may give risk."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor, nn

from ...engine.plan import Stacked
from ...errors import WorkbenchWarning
from ..outputs import has_classes
from ..ownership import EXTRAS, MARK, table_of
from ..wrapped import PUBLIC
from .compiled import compile_alike
from .files import load_from, write_into
from .plain import new_like
from .tensors import KerasModule, refuse_layers
from .variables import variables_of

_CLASSES: dict[type, type] = {}
_UNLIKE_KERAS = ("fit", "loss", "scale", "predict")  # names that Keras has for something else
NO_LOSS = (
    "You are using a wrapper that requires the loss function to be modified, and the model is compiled with none. Please either: a) compile "
    "the model before wrapping it, .compile(loss=your_loss); or b) combine your loss with {0}.loss_function by hand, and assign it to "
    "model.compute_loss, as in\n"
    "def compute_loss(x=None, y=None, y_pred=None, sample_weight=None, training=None):\n"
    "    y_hat, risk = y_pred\n"
    "    return your_loss(y, y_hat) + {0}.loss_function(y, y_hat, risk)"
)


class WrappedKeras:
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
            return self._workbench_plain(*args, **kwargs)
        args, kwargs = keras.tree.map_structure(_as_tensor, (args, kwargs))
        wrapped = self._materialize(args, kwargs)
        step, training = self._workbench_step, kwargs.pop("training", None)
        mode = bool(step if training is None and step is not None else training)
        if (
            training is None
        ):  # what the model takes by default; else the mode says it, which looks at a model may change
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
        before = wrapped.training
        wrapped.train(mode)
        try:
            return wrapped(*args, return_risk=return_risk, tile_and_reduce=tile_and_reduce, **kwargs)
        finally:
            wrapped.train(before)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def _materialize(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The wrapped torch module, made at the first call, since a Keras model may get its weights only then."""
        if self._workbench_torch is None:
            plain = self._workbench_plain
            if not _is_built(plain):
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
        for name, value in plain.__dict__.items():
            if name not in self.__dict__:
                self.__dict__[name] = value
        for name, layer in plain._modules.items():
            self._modules.setdefault(name, layer)
        self.__dict__.update(
            built=True, _workbench_module=module, _workbench_torch=wrapped.eval(), _workbench_done=len(self.wrappers)
        )

    def as_torch(self) -> Any:
        """The wrapped torch module over the same variables: what `workbench.fit`, `calibrate` and all else of workbench take.

        Raises:
            RuntimeError: if the model has no weights yet.
        """
        if self._workbench_torch is None:
            if not _is_built(self._workbench_plain):
                raise RuntimeError(f"{type(self).__name__} has no weights yet: call it once with inputs, or build it")
            self._make()
        wrapped = self._workbench_torch
        if any(v.regularizer is not None for v in self._workbench_plain.trainable_variables):
            warnings.warn(
                "weights of this Keras model have a regularizer, which only the model's own fit and train_on_batch add to the loss",
                WorkbenchWarning,
                stacklevel=2,
            )
        return wrapped

    def unwrap_shared(self) -> Any:
        """The given Keras model."""
        return self._workbench_plain

    def unwrap(self) -> Any:
        """A plain Keras model, with the weights of the first voter if any vote."""
        return self._plain_with(self.as_torch().unwrap())

    def voters(self) -> list[Any]:
        """Every voter as a plain Keras model with weights of its own."""
        return [self._plain_with(voter) for voter in self.as_torch().voters()]

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
            return getattr(self.as_torch(), name)
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
        return [v for v in self.weights if _learns(v)] if self.trainable else []  # type: ignore[attr-defined]

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
        return self.as_torch().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.as_torch().load_state_dict(*args, **kwargs)

    def _track_variables(self) -> None:
        """Torch sees the parameters by `named_parameters`."""

    def train(self, mode: bool = True) -> Any:
        """Keras' calls take their mode as an argument, so that the layers, which the given model has as well, keep theirs."""
        self.__dict__["training"] = mode
        return self

    # ---- training
    @property
    def _head(self) -> Any:
        """The distribution whose likelihood joins the loss, if there is one."""
        kinds = [method for wrapper in self.wrappers for method in wrapper.make()]
        return next((m.distribution for m in kinds if m.distribution is not None), None)

    @contextmanager
    def _stepping(self, training: bool) -> Iterator[None]:
        before = self._workbench_step
        self.__dict__["_workbench_step"] = training
        try:
            yield
        finally:
            self.__dict__["_workbench_step"] = before

    def train_step(self, data: Any) -> Any:
        self._refuse_training()
        with self._stepping(True):
            return super().train_step(data)  # type: ignore[misc]

    def test_step(self, data: Any) -> Any:
        with self._stepping(False):
            return super().test_step(data)  # type: ignore[misc]

    def predict_step(self, data: Any) -> Any:
        with self._stepping(False):
            return super().predict_step(data)  # type: ignore[misc]

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Weights and the optimizer's variables, from a first batch; losses and metrics make theirs when they are called."""
        if self._workbench_torch is None:
            if data_batch is None:
                data_batch = next(data[0] for _, _, data in iterator)
            x = keras.utils.unpack_x_y_sample_weight(data_batch)[0]
            self._materialize((keras.tree.map_structure(_as_tensor, x),), {})
        if self.optimizer is not None and not self.optimizer.built:  # type: ignore[attr-defined]
            self.optimizer.build(self.trainable_variables)  # type: ignore[attr-defined]

    def fit(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Keras does; what is learned in closed form is then fitted to the same inputs. A model that is not compiled is only fitted.

        Args:
            x, y, args, kwargs: as of `keras.Model.fit`; x alone, an array of inputs, for a model that is not compiled.
        """
        kinds = [method for wrapper in self.wrappers for method in wrapper.make()]
        closed = any(method.needs_fit for method in kinds)
        collecting = next((method.name for method in kinds if method.collects), None)
        if collecting:
            raise ValueError(
                f"{collecting} gathers weights while workbench.fit trains, which fit of Keras does not tell it: call "
                "workbench.fit(model.as_torch(), (x, y), epochs=...)"
            )
        inputs = keras.tree.flatten(x)
        if closed and (len(inputs) != 1 or not hasattr(inputs[0], "shape")):
            raise ValueError(
                "fit: this model also learns from the training inputs in closed form, and takes them as one array or tensor here; for others "
                "train the given model by itself, and then call model.as_torch().fit(batches)"
            )
        history: Any = self
        if not (closed and not self.compiled):  # type: ignore[attr-defined]
            history = super().fit(x, y, *args, **kwargs)  # type: ignore[misc]
        if closed:
            held_out = kwargs.get("validation_split", 0.0) if kwargs.get("validation_data") is None else 0.0
            rows = _as_tensor(inputs[0])
            rows = rows[: math.floor(len(rows) * (1 - held_out))]
            self._materialize((rows[:1],), {})
            self.as_torch().fit(rows)
        return history

    def _should_torch_compile(self) -> bool:
        if self.jit_compile:  # type: ignore[attr-defined]
            raise ValueError(
                "jit_compile=True: the steps of a wrapped Keras model cannot be compiled; compile(..., jit_compile=False)"
            )
        return False

    def _refuse_training(self) -> None:
        head = self._head
        if head is None:
            return
        distribution = head() if isinstance(head, type) else head
        classes = self._workbench_torch is not None and has_classes(self._workbench_torch._workbench.output)
        if classes or distribution.n_heads != 1 or not distribution.own_prediction:
            what = "class outputs" if classes else type(distribution).__name__
            raise ValueError(
                f"{what} with a risk head cannot be trained by fit of Keras, whose losses see one prediction and its standard deviation: call "
                "workbench.fit(model.as_torch(), (x, y), epochs=...)"
            )

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """The compiled loss; of a model with a risk head its sum with the likelihood."""
        notes = self._workbench_module.notes if self._workbench_module is not None else ()
        if "losses" in notes or "mask" in notes:
            what = (
                "adds losses of its own (add_loss, activity_regularizer)" if "losses" in notes else "masks its output"
            )
            raise NotImplementedError(
                f"a layer of this Keras model {what}, which does not reach the loss of a wrapped model: leave it out, or write a train_step that "
                "computes the whole loss from the predictions"
            )
        head, risk = self._head, None
        if head is not None and self._workbench_step is not None:
            y_pred, risk = y_pred
            if self._compile_loss is None:  # type: ignore[attr-defined]
                raise ValueError(NO_LOSS.format(_name(head)))
        options = {"training": training} if _takes_training(super().compute_loss) else {}  # type: ignore[misc]
        loss = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **options)  # type: ignore[misc]
        return loss if risk is None else loss + _likelihood(head, y, y_pred, risk, sample_weight)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if self._head is not None and self._workbench_step is not None:
            y_pred = y_pred[0]
        return super().compute_metrics(x, y, y_pred, sample_weight=sample_weight)  # type: ignore[misc]

    @property
    def losses(self) -> list[Tensor]:
        """Regularizers of the weights; of weights that vote, the mean over voters, as each has its share of the rows."""
        out = []
        for variable in self.trainable_weights:
            source = getattr(variable, "_workbench_source", variable)
            if source.regularizer is not None:
                out.append(_regularization(self._workbench_torch, variable, source))
        return out

    # ---- files
    @property
    def layers(self) -> list[Any]:
        return [] if self.__dict__.get("_workbench_saving") else self._workbench_plain.layers

    def __dir__(self) -> list[str]:
        return [] if self.__dict__.get("_workbench_saving") else list(super().__dir__())

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Around saving and loading: all weights are the model's own, not those of layers."""
        self.__dict__["_workbench_saving"] = True
        try:
            yield
        finally:
            self.__dict__["_workbench_saving"] = False

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.as_torch()
        with self._saving():
            return super().save_weights(*args, **kwargs)  # type: ignore[misc]

    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> Any:
        if self._workbench_torch is None and not _is_built(self._workbench_plain):
            raise RuntimeError("call the wrapped model on inputs before loading weights: it has no variables yet")
        self.as_torch()
        if skip_mismatch:
            raise ValueError("skip_mismatch=True: the weights of a wrapped model are loaded all or none")
        with self._saving():
            return super().load_weights(filepath, **kwargs)  # type: ignore[misc]

    def save_own_variables(self, store: Any) -> None:
        write_into(store, self.as_torch())

    def load_own_variables(self, store: Any) -> None:
        load_from(store, self.as_torch())

    def save(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_config(
            "save",
            "save_weights(path) keeps all weights, and load_weights reads them into a model that was wrapped alike",
        )

    def export(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_config("export", "torch.export.export takes a voter: model.as_torch().voters()[0]")

    def get_config(self) -> Any:
        self._refuse_config(
            "get_config", "model.voters() and model.unwrap() are plain Keras models, and can be copied and saved"
        )

    def quantize(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_config("quantize", "quantize a plain model of model.voters()")

    def _refuse_config(self, what: str, remedy: str) -> None:
        raise NotImplementedError(
            f"{what} of a wrapped Keras model: its voters and noise are in no config of the {type(self).__name__} that Keras could build it from. "
            f"Instead: {remedy}"
        )

    def __reduce__(self) -> Any:
        self._refuse_config("a copy or pickle", "wrap a copy of the plain model, and use save_weights and load_weights")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()


def twin(model: Any, cls: type) -> Any:
    """A model of a class over the same layers, with bookkeeping of its own."""
    new = object.__new__(cls)
    new.__dict__.update(model.__dict__)
    for name in ("_modules", "_parameters", "_buffers"):
        new.__dict__[name] = dict(model.__dict__[name])
    new._modules.pop("_torch_params", None)
    for name in ("build", "quantize", "_tracker"):  # bound to the model
        new.__dict__.pop(name, None)
    kept = {name: list(model.__dict__[name]) for name in _TRACKED}
    new._initialize_tracker()
    for name, items in kept.items():
        new.__dict__[name].extend(items)
    return new


_TRACKED = ("_trainable_variables", "_non_trainable_variables", "_layers", "_metrics", "_seed_generators")


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
        _compute_loss_has_training_arg=True,
    )
    example = next((w.example for w in wrappers if w.example is not None), None)
    if example is not None:
        new._materialize(
            *keras.tree.map_structure(_as_tensor, (example if isinstance(example, tuple) else (example,), {}))
        )
    elif _is_built(model):
        new._make()
    compile_alike(new, before if before is not None else model)
    if new._head is not None and not decorated and (not new.compiled or new._compile_loss is None):
        warnings.warn(NO_LOSS.format(_name(new._head)), WorkbenchWarning, stacklevel=6)
    return new


# ---- checks and small pieces
def _refuse_methods(wrapped: Any, module: KerasModule) -> None:
    methods = wrapped._workbench.methods
    for method in methods:
        moving = [p for p in module.places if p.buffer and p.variable._value.is_floating_point()]
        if method.collects and moving:
            raise ValueError(
                f"{method.name} would have to renew the statistics of {moving[0].path} for each set of weights, and knows those of torch's layers "
                "only: use vote or sample"
            )
        if method.channels_first and keras.config.image_data_format() != "channels_first":
            raise ValueError(
                f"{method.name} turns images [rows, channels, height, width], and Keras is set to channels_last: give transforms of your own, "
                "functions of the input, or keras.config.set_image_data_format('channels_first')"
            )


def _is_built(model: Any) -> bool:
    return bool(model.weights) and all(layer.built for layer in model._flatten_layers())


def _is_symbolic(values: Any) -> bool:
    leaves = keras.tree.flatten(values)
    return any(isinstance(leaf, keras.KerasTensor) or (isinstance(leaf, Tensor) and leaf.is_meta) for leaf in leaves)


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        return keras.ops.convert_to_tensor(leaf)
    return leaf


def _learns(variable: Any) -> bool:
    if getattr(variable, "_workbench_slot", "").startswith(f"{EXTRAS}.density"):  # learned in closed form
        return False
    source = getattr(variable, "_workbench_source", variable)
    return bool(variable.trainable and source.trainable)


def _name(head: Any) -> str:
    return (head if isinstance(head, type) else type(head)).__name__


def _takes_training(function: Any) -> bool:
    import inspect

    return "training" in inspect.signature(function).parameters


def _likelihood(head: Any, y: Any, y_hat: Any, risk: Any, sample_weight: Any) -> Tensor:
    """The negative log-likelihood as Keras averages losses: over rows and outputs, each row times its weight."""
    distribution = head() if isinstance(head, type) else head
    targets, outputs = keras.tree.flatten(y), keras.tree.flatten(y_hat)
    if len(targets) != 1 or len(outputs) != 1:
        raise NotImplementedError(
            f"a model of {len(outputs)} outputs with a risk head: combine the losses by hand in model.compute_loss, which gets "
            "y_pred = (y_hat, risk), or train it by workbench.fit(model.as_torch(), ...)"
        )
    target = keras.ops.convert_to_tensor(targets[0], dtype=keras.backend.standardize_dtype(outputs[0].dtype))
    if target.dim() == outputs[0].dim() - 1 and outputs[0].shape[-1] == 1:
        target = target.unsqueeze(-1)
    leaf = keras.tree.flatten(risk)[0] if not hasattr(risk, "aleatoric") else risk
    losses = distribution.loss_function(target, outputs[0], leaf, reduction="none")
    if sample_weight is not None:
        weight = keras.ops.convert_to_tensor(sample_weight, dtype=keras.backend.standardize_dtype(losses.dtype))
        losses = losses * weight.reshape(*weight.shape, *[1] * (losses.dim() - weight.dim()))
    return losses.mean()


def _regularization(wrapped: Any, variable: Any, source: Any) -> Tensor:
    if variable is source:
        return source.regularizer(variable)
    rule = table_of(wrapped).record.rules.get(variable._workbench_slot.partition(MARK)[0])
    if not isinstance(rule, Stacked):
        raise NotImplementedError(
            f"{source.path} has a regularizer, and its values in the branches are none that can be regularised one by one "
            f"({variable._workbench_slot}): leave the regularizer out, or wrap by vote alone with share=None"
        )
    return torch.stack([keras.ops.sum(source.regularizer(row)) for row in variable.value]).mean()


__all__ = ["WrappedKeras", "twin", "wrapped_twin"]
