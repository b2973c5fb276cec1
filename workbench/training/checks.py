"""Check settings and one batch before a training changes anything."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from workbench.core.inputs import opened
from workbench.core.rows import Batch, TensorRows
from workbench.core.wrapped import Wrapped
from workbench.engine.tree import tensors
from workbench.training.criteria import Criterion, LossByMeaning

LR = 0.01  # of the default optimizer
FROZEN = " (the signature of a frozen model under neo is learned by wrapped.fit(x))"


def check_numbers(
    epochs: int,
    batch_size: int | None,
    lr: float,
    weight_decay: float,
    optimizer: Any,
    patience: int | None,
    dtype: torch.dtype | None,
) -> None:
    """Raise if a setting of `fit` is out of range, or an optimizer is no callable that makes one."""
    for name, value, least in (("epochs", epochs, 1), ("batch_size", batch_size, 2), ("patience", patience, 1)):
        if value is not None and (isinstance(value, bool) or operator.index(value) < least):
            raise ValueError(f"{name} must be a whole number of at least {least}; found {value!r}")
    if not (0 < lr < math.inf):
        raise ValueError(f"lr must be above 0; found {lr!r}")
    if not (0 <= weight_decay < math.inf):
        raise ValueError(f"weight_decay must be 0 or more; found {weight_decay!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type such as torch.float64; found {dtype}")
    if isinstance(optimizer, Optimizer) or (optimizer is not None and not callable(optimizer)):
        raise TypeError(
            f"optimizer: found an object of type {type(optimizer).__name__}; give a callable that makes one, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    if optimizer is not None and (lr != LR or weight_decay):
        raise ValueError("lr and weight_decay are of the default optimizer; set those of your own where it is made")


def try_batch(wrapped: Wrapped, batch: Batch, criterion: Criterion | None, in_memory: list[TensorRows]) -> bool:
    """Predict one batch, see that the targets fit, and say whether the prediction can be trained."""
    modes = [(module, module.training) for module in wrapped.modules()]
    wrapped.eval()
    try:
        with torch.enable_grad():
            args, kwargs = opened(wrapped, batch.x)
            prediction = wrapped(*args, **kwargs)
    finally:
        for module, mode in modes:
            module.training = mode
    y, output = batch.y, wrapped._workbench.output
    if (
        criterion is None
        and output is not None
        and not (isinstance(y, Tensor) and output in ("values", "logits", "probs"))
    ):
        loss = LossByMeaning(output)
        for targets in [rows.y for rows in in_memory] or [y]:
            loss.check_labels(prediction, targets)
        loss(prediction, y)
    elif isinstance(prediction, Tensor) and isinstance(y, Tensor):
        if y.is_floating_point():
            # such pairs give a loss over all pairs of rows without a word
            silent = prediction.numel() == y.numel() and prediction.squeeze().shape == y.squeeze().shape
            if prediction.shape != y.shape and (keeps_meaning(criterion) or silent):
                hint = "; give y as a column, y[:, None]" if y.dim() + 1 == prediction.dim() else ""
                raise ValueError(
                    f"y: targets are {_of_rows(y)}, but the model gives {_of_rows(prediction)}; "
                    f"they must have one shape{hint}"
                )
        elif criterion is None:
            _check_labels(prediction, y, in_memory)
    elif criterion is None:
        raise TypeError(
            f"criterion: the model gives a {type(prediction).__name__} for targets that are a {type(y).__name__}; "
            "give criterion(prediction, target) that makes one loss of them"
        )
    return any(leaf.requires_grad for leaf in tensors(prediction))


def _check_labels(prediction: Tensor, y: Tensor, in_memory: list[TensorRows]) -> None:
    if prediction.dim() < 2 or y.shape != prediction.shape[:1] + prediction.shape[2:]:
        raise ValueError(
            f"y: class numbers are {_of_rows(y)}, but the model gives {_of_rows(prediction)}; cross entropy wants "
            "class numbers [n] for scores [n, classes]; for values rather than classes give y as float [n, outputs]"
        )
    classes = prediction.shape[1]
    for labels in [rows.y for rows in in_memory] or [y]:
        least, most = int(labels.min()), int(labels.max())
        if least < 0 or most >= classes:
            raise ValueError(
                f"y: class numbers go from {least} to {most}, but the model gives {classes} scores, "
                f"for classes 0 to {classes - 1}"
            )


def _of_rows(tensor: Tensor) -> str:
    return f"[{', '.join(['n', *map(str, tensor.shape[1:])])}]" if tensor.dim() else "one number"


def keeps_meaning(criterion: Criterion | None) -> bool:
    """Whether a criterion of standardized targets asks for the same as one of targets in their own units."""
    return criterion in (None, F.mse_loss, F.l1_loss) or type(criterion) in (nn.MSELoss, nn.L1Loss)
