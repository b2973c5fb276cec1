"""Training of wrapped Keras models: steps, losses, and fits in closed form."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from torch import Tensor

from ...risk import Risk
from ..outputs.options import has_classes
from .class_heads import ignored_classes, losses_of_rows
from .compiled import build_optimizer
from .extras import mask_of

NO_LOSS = (
    "You are using a wrapper that requires the loss function to be modified, and the model is compiled without a loss. Please either: a) "
    "compile the model before wrapping it, .compile(loss=your_loss); or b) combine your loss with {0}.loss_function by hand, and assign it to "
    "model.compute_loss, as in\n"
    "def compute_loss(x=None, y=None, y_pred=None, sample_weight=None, training=None):\n"
    "    y_hat, risk = y_pred\n"
    "    return your_loss(y, y_hat) + {0}.loss_function(y, y_hat, risk)"
)

_BYPASSED = (
    "a step of {0} has called its layers but never the model itself, so that nothing that wrapping has added was used: let train_step and "
    "test_step call self(x, training=...), or wrap the parts that they call, and build the model from these"
)

_PAIR = (
    "in the steps of {0}, which has a risk head, self(x) returns the pair (prediction, risk): hand it to self.compute_loss and "
    "self.compute_metrics as it is, or take it apart for what is computed by hand"
)


class KerasTraining:
    """Mix-in of `WrappedKeras` for training and evaluation by Keras."""

    wrappers: tuple[Any, ...]
    _workbench_plain: Any
    _workbench_torch: Any
    _workbench_module: Any
    _workbench_step: bool | None  # in a step of Keras: whether it trains; None outside of steps
    _workbench_noise: bool  # whether the step needs the noise of class scores in place of their risk
    _workbench_meaning: Any  # meaning of the class scores in the step
    _workbench_called: bool  # whether the step has called the model
    _materialize: Any
    _made: Any
    trainable_weights: Any

    @property
    def _head(self) -> Any:
        """Distribution of the risk head, whose likelihood is added to the loss; None without one."""
        methods = [method for wrapper in self.wrappers for method in wrapper.make()]
        method = next((m for m in methods if m.distribution is not None), None)
        if method is None:
            return None
        return method.of_classes() if self._has_classes else method.distribution

    @property
    def _has_classes(self) -> bool:
        return any(has_classes(wrapper.output) for wrapper in self.wrappers)

    @contextmanager
    def _stepping(self, training: bool, with_loss: bool = True) -> Iterator[None]:
        original = self._workbench_step, self._workbench_noise
        noise = with_loss and self._has_classes and self._head is not None
        self.__dict__.update(_workbench_step=training, _workbench_noise=noise, _workbench_called=False)
        try:
            yield
        except Exception as error:
            if not self._workbench_called and "No gradients" in str(error):
                raise RuntimeError(_BYPASSED.format(type(self).__name__)) from error
            step = "train_step" if training else "test_step"
            overridden = getattr(type(self._workbench_plain), step) is not getattr(keras.Model, step)
            if overridden and self._head is not None:
                error.add_note(_PAIR.format(type(self).__name__))
            raise
        finally:
            self.__dict__.update(_workbench_step=original[0], _workbench_noise=original[1])
        if not self._workbench_called:
            raise RuntimeError(_BYPASSED.format(type(self).__name__))

    def train_step(self, data: Any) -> Any:
        self._refuse_training()
        with self._stepping(True):
            return super().train_step(keras.tree.map_structure(as_tensor, data))  # type: ignore[misc]

    def test_step(self, data: Any) -> Any:
        if self._compile_loss is not None:  # type: ignore[attr-defined]
            self._refuse_training()
        with self._stepping(False):
            return super().test_step(keras.tree.map_structure(as_tensor, data))  # type: ignore[misc]

    def predict_step(self, data: Any) -> Any:
        """Predict a batch; with a risk head, return the pair of prediction and risk, with several risks as a dict."""
        with self._stepping(False, with_loss=False):
            out = super().predict_step(keras.tree.map_structure(as_tensor, data))  # type: ignore[misc]
        if self._head is not None and isinstance(out[1], Risk):
            return out[0], {name: getattr(out[1], name) for name in out[1].names()}
        return out

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Create weights and optimizer variables from a first batch; those of losses and metrics are created when they are called."""
        if self._workbench_torch is None:
            if data_batch is None:
                data_batch = next(data[0] for _, _, data in iterator)
            x = keras.utils.unpack_x_y_sample_weight(data_batch)[0]
            self._materialize((keras.tree.map_structure(as_tensor, x),), {})
        build_optimizer(self)

    def fit(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train with Keras, then fit methods in closed form to the same inputs; a model that is not compiled is only fitted in closed form.

        Args:
            x, y, args, kwargs: as for `keras.Model.fit`; only x, an array of inputs, for a model that is not compiled.
        """
        methods = [method for wrapper in self.wrappers for method in wrapper.make()]
        closed = any(method.needs_fit for method in methods)
        collecting = next((method.name for method in methods if method.collects), None)
        if collecting:
            raise ValueError(
                f"{collecting} collects weights during training, which fit of Keras does not support: call "
                "workbench.fit(model.as_torch(), (x, y), epochs=...)"
            )
        inputs = keras.tree.flatten(x)
        if closed and (len(inputs) != 1 or not hasattr(inputs[0], "shape")):
            raise ValueError(
                "fit: this model is also fitted to the training inputs in closed form, and takes them as one array or tensor here; otherwise "
                "train the given model separately, and then call model.as_torch().fit(batches)"
            )
        history: Any = self
        if not (closed and not self.compiled):  # type: ignore[attr-defined]
            history = super().fit(x, y, *args, **kwargs)  # type: ignore[misc]
        if closed:
            validation_split = kwargs.get("validation_split", 0.0) if kwargs.get("validation_data") is None else 0.0
            rows = as_tensor(inputs[0])
            rows = rows[: math.floor(len(rows) * (1 - validation_split))]
            self._materialize((rows[:1],), {})
            self._made().fit(rows)
        return history

    def _should_torch_compile(self) -> bool:
        if self.jit_compile:  # type: ignore[attr-defined]
            raise ValueError(
                "jit_compile=True: the steps of a wrapped Keras model cannot be compiled; use compile(..., jit_compile=False)"
            )
        return False

    def _refuse_training(self) -> None:
        head = self._head
        if head is None:
            return
        distribution = head() if isinstance(head, type) else head
        if distribution.n_heads != 1 or not distribution.own_prediction:
            raise ValueError(
                f"{type(distribution).__name__} with a risk head cannot be trained by fit of Keras, whose losses take one prediction and its "
                "standard deviation: call workbench.fit(model.as_torch(), (x, y), epochs=...)"
            )

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Return the compiled loss; with a risk head, the negative log-likelihood is added."""
        if self._workbench_module is not None and (notes := self._workbench_module.notes):
            raise NotImplementedError(
                f"this Keras model has {' and '.join(sorted(notes))} only in some of its calls, or with an output of a custom class, so that "
                "they do not reach the loss of the wrapped model: use them in every call, and return a tensor, list, tuple or dict"
            )
        head, risk = self._head, None
        if head is not None and self._workbench_step is not None:
            y_pred, risk = y_pred
            if self._compile_loss is None:  # type: ignore[attr-defined]
                raise ValueError(NO_LOSS.format(name_of(head)))
        options = {"training": training} if _takes_training(super().compute_loss) else {}  # type: ignore[misc]
        loss = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **options)  # type: ignore[misc]
        if risk is None:
            return loss
        if not self._workbench_noise:
            return loss + _likelihood(head, y, y_pred, sample_weight, _losses_of_values, risk)
        ignored = ignored_classes(self._compile_config.config["loss"])  # type: ignore[attr-defined]
        return loss + _likelihood(
            head, y, y_pred, sample_weight, losses_of_rows, risk, self._workbench_meaning, ignored
        )

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if self._head is not None and self._workbench_step is not None:
            y_pred = y_pred[0]
        return super().compute_metrics(x, y, y_pred, sample_weight=sample_weight)  # type: ignore[misc]


def name_of(head: Any) -> str:
    return (head if isinstance(head, type) else type(head)).__name__


def as_tensor(leaf: Any) -> Any:
    """Convert an array to a tensor like `fit` of Keras, with floating-point numbers in `keras.config.floatx()`; others are unchanged."""
    if isinstance(leaf, np.ndarray | np.generic):
        return keras.ops.convert_to_tensor(leaf, dtype=keras.config.floatx() if leaf.dtype.kind == "f" else None)
    return leaf


def _takes_training(function: Any) -> bool:
    return "training" in inspect.signature(function).parameters


def _likelihood(
    head: Any, y: Any, y_hat: Any, sample_weight: Any, losses_of: Callable[..., tuple[Tensor, Any]], *extra_args: Any
) -> Tensor:
    """Return the negative log-likelihood, averaged like Keras losses: over rows and outputs, with each row multiplied by its weight.

    Args:
        head: the distribution.
        y, y_hat, sample_weight: as for `compute_loss`.
        losses_of: losses_of(distribution, target, prediction, *extra_args) returns the loss of each target, and a mask of those that count
            (None if all do).
        extra_args: risk, and further arguments of `losses_of`.
    """
    distribution = head() if isinstance(head, type) else head
    targets, outputs = keras.tree.flatten(y), keras.tree.flatten(y_hat)
    if len(targets) != 1 or len(outputs) != 1:
        raise NotImplementedError(
            f"a model with {len(outputs)} outputs and a risk head: combine the losses by hand in model.compute_loss, which gets "
            "y_pred = (y_hat, risk), or train it with workbench.fit(model.as_torch(), ...)"
        )
    losses, counted = losses_of(distribution, keras.ops.convert_to_tensor(targets[0]), outputs[0], *extra_args)
    if (mask := mask_of(outputs[0])) is not None:
        counted = mask.bool() if counted is None else mask.bool() & counted
    weights = [] if sample_weight is None else [keras.ops.convert_to_tensor(sample_weight)]
    if counted is not None:  # the mean is over the targets that count, as in Keras losses
        weights.append(counted * (counted.numel() / counted.sum().clamp_min(1)))
    for weight in weights:
        if weight.dim() == losses.dim() + 1 and weight.shape[-1] == 1:
            weight = weight.squeeze(-1)
        losses = losses * weight.to(losses.dtype).reshape(*weight.shape, *[1] * (losses.dim() - weight.dim()))
    return losses.mean()


def _losses_of_values(distribution: Any, target: Tensor, y_hat: Tensor, risk: Any) -> tuple[Tensor, None]:
    target = target.to(y_hat.dtype)
    if target.dim() == y_hat.dim() - 1 and y_hat.shape[-1] == 1:
        target = target.unsqueeze(-1)
    elif target.dim() == y_hat.dim() + 1 and target.shape[-1] == 1:
        target = target.squeeze(-1)
    if target.shape != y_hat.shape:
        raise ValueError(
            f"targets of shape {list(target.shape)} for predictions of shape {list(y_hat.shape)}: {type(distribution).__name__} compares them "
            'elementwise. If these are scores of classes and labels, declare that when wrapping: output="logits" or "probs"'
        )
    leaf = keras.tree.flatten(risk)[0] if not hasattr(risk, "aleatoric") else risk
    return distribution.loss_function(target, y_hat, leaf, reduction="none"), None


__all__ = ["NO_LOSS", "KerasTraining", "as_tensor", "name_of"]
