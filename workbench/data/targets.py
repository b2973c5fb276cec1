"""Conversion of inputs and targets to tensors, and inference of the task from the targets."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from workbench.core.batches.arrays import is_missing, numbers_of
from workbench.core.batches.column_spread import coarse_columns
from workbench.core.batches.rows import bad_rows, describe
from workbench.errors import WorkbenchWarning

Task = Literal["regression", "classification", "labels", "counts", "probabilities"]
TASKS: tuple[str, ...] = get_args(Task)
MAX_AMOUNTS = 10  # number of class names up to which texts such as "0.5" may be names
VOID = -100  # class number for "no class", the default ignore_index of torch's cross entropy


def kind(tensor: Any) -> str:
    """Describe dtype and shape for error messages, such as "float32 [3, 1]"; for a dict those of its items."""
    if isinstance(tensor, Mapping):
        return "{" + ", ".join(f"{name}: {kind(value)}" for name, value in tensor.items()) + "}"
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def as_tensor(values: Any, name: str) -> Tensor:
    """Convert values to a tensor [n, ...] of numbers.

    Raises:
        TypeError: the values are not numbers, or rows differ in length.
    """
    if isinstance(values, Tensor):
        if values.layout is not torch.strided:
            raise TypeError(f"{name} is a tensor {list(values.shape)} of {values.layout}; give {name}.to_dense()")
        return values.detach().cpu()
    try:
        array = numbers_of(values)
    except TypeError as error:
        raise TypeError(f"{name} is {describe(values)} and can't be made a tensor of numbers: {error}") from None
    except ValueError as error:
        raise TypeError(
            f"{name} is {describe(values)} and can't be made a tensor of numbers: its rows differ in shape ({error}); give numbers. Sequences "
            "of unequal length are padded first, torch.nn.utils.rnn.pad_sequence(x, batch_first=True), with lengths=[n]"
        ) from None
    if array.dtype.kind == "c":
        raise TypeError(
            f"{name} is {describe(values)} of {array.dtype}; give real numbers, such as numpy.stack([x.real, x.imag], -1)"
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    # copied, since arrays of files and frames may be read-only or change later
    return torch.from_numpy(np.array(array))


def as_inputs(x: Any, name: str = "x") -> Any:
    """Convert inputs [n, ...], or a dict of them: floating-point numbers to float32, integers to int64; uint8 and bool are kept.

    Raises:
        TypeError, ValueError: they are not numbers, are NaN or infinite, or differ in their number of rows.
    """
    if isinstance(x, Mapping):
        if not x:
            raise ValueError(f"{name} is an empty dict; give at least one tensor of inputs")
        inputs = {str(key): as_inputs(value, f"{name}[{key!r}]") for key, value in x.items()}
        if len({len(value) for value in inputs.values()}) > 1:
            raise ValueError(f"the tensors of {name} differ in their number of rows; found {kind(inputs)}")
        return inputs
    tensor = as_tensor(x, name)
    if not tensor.dim():
        raise ValueError(
            f"{name} is {'None' if x is None else 'a single number'}; its first dimension must be the rows"
        )
    if tensor.is_complex():
        raise TypeError(f"{name} is {kind(tensor)}; give real numbers, such as torch.view_as_real(x)")
    check_finite(tensor, name)
    if tensor.is_floating_point():
        return finite_float(tensor, name)
    return tensor if tensor.dtype in (torch.uint8, torch.bool) else tensor.long()


BOOLEAN = ("False", "True")


def as_target(
    y: Any, task: Task | None, classes: Any = None, void: int | None = None, lengths: Any = None, name: str = "y"
) -> tuple[Tensor, Task, tuple[str, ...] | None]:
    """Convert one target to a tensor, and return it with its task and class names.

    Args:
        y: values [n] or [n, ...], class numbers [n] or [n, ...], class names [n], labels (0 or 1) [n, labels], or counts.
        task: task of the target; None: regression for floating-point numbers, classification for integers [n] or maps [n, height, width].
        classes: class names in the order of their numbers, the number of classes, or a dict number -> name, whose numbers are
            replaced by 0, 1, ... in its order.
        void: class number that means "no class"; it becomes -100.
        lengths: number of valid tokens per row [n]; class numbers of the others become -100.
        name: name of the target for error messages.

    Raises:
        TypeError, ValueError: y does not fit the task, or its task is ambiguous.
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(map(repr, TASKS))}; found {task!r}")
    y, classes = _numbers_of_names(y, classes, name)
    tensor = as_tensor(y, name)
    if not tensor.dim():
        raise ValueError(
            f"{name} is {'None' if y is None else 'a single number'}; its first dimension must be the rows"
        )
    if tensor.is_complex():
        raise TypeError(f"{name} is {kind(tensor)}; give real numbers, such as torch.view_as_real({name})")
    check_finite(tensor, name)
    task = task or _inferred_task(tensor, void, lengths, name)
    if tensor.dtype == torch.bool and task == "classification" and classes is None:
        classes = BOOLEAN
    if task != "classification" and (void is not None or lengths is not None):
        raise ValueError(
            f"{name}: void and lengths leave out class numbers, but the task is {task}, where values can't be ignored: "
            "drop the rows, or fill in values"
        )
    if task == "probabilities":
        tensor = finite_float(tensor, name)
        return tensor, task, class_names(classes, tensor.shape[-1])
    if task in ("regression", "counts"):
        return _values(tensor, task, classes, name), task, None
    if tensor.is_floating_point() and bool((tensor != tensor.round()).any()):
        raise ValueError(f"{name}: {task} needs whole numbers; found {kind(tensor)} such as {_fraction(tensor):g}")
    tensor = tensor.long()
    if task == "labels":
        if tensor.dim() != 2 or tensor.shape[1] == 1:
            raise ValueError(
                f"{name}: labels are [n, labels] with at least two of them; found {kind(tensor)}. For a single yes or no per row "
                "give classes [n], task='classification'"
            )
        return tensor, task, class_names(classes, tensor.shape[1])
    if tensor.dim() == 2 and tensor.shape[1] == 1 and lengths is None:
        tensor = tensor[:, 0]
    tensor = _masked(tensor, void, lengths, name)
    if isinstance(classes, Mapping):
        tensor, classes = _renumbered(tensor, classes, name), tuple(map(str, classes.values()))
    valid = tensor[tensor != VOID]
    max_class = int(valid.max()) if valid.numel() else 0
    if classes is None and tensor.dim() > 1 and max_class == 255 and not bool((valid == 254).any()):
        numbers = valid.unique().tolist()
        raise ValueError(
            f"{name}: the numbers are {', '.join(map(str, numbers[:12]))}{', ...' if len(numbers) > 12 else ''}: does 255 mean no class "
            "(void=255), or is it the number of a class (classes={0: 'background', 255: 'object'})?"
        )
    return tensor, task, class_names(classes, max_class + 1)


def check_target(y: Tensor, task: Task, classes: Sequence[str] | None, what: str) -> None:
    """Raise ValueError if a target does not fit its task or its classes."""
    is_integer = not y.is_floating_point()
    if is_integer != (task in ("classification", "labels")):
        raise ValueError(f"{what}: task {task!r} does not fit targets {kind(y)}")
    if task == "probabilities" and classes is not None and len(y):
        off = (y < 0).any() or (y.sum(-1) - 1).abs().max() > 1e-3
        if y.dim() != 2 or y.shape[1] != len(classes) or bool(off):
            raise ValueError(
                f"{what}: probabilities are 0 or more, sum to one in each row, and have a column for each of the {len(classes)} classes; "
                f"found {kind(y)}, {float(y.min()):g} to {float(y.max()):g}"
            )
    if task == "counts" and len(y) and (bool((y < 0).any()) or bool((y != y.round()).any())):
        raise ValueError(f"{what}: counts are 0, 1, 2, ...; found {float(y.min()):g} to {float(y.max()):g}")
    if task == "labels" and y.numel() and (y.dim() != 2 or not 0 <= int(y.min()) <= int(y.max()) <= 1):
        raise ValueError(f"{what}: labels are 0 or 1, [n, labels]; found {kind(y)}, {int(y.min())} to {int(y.max())}")
    if task == "labels" and classes is not None and y.shape[1] != len(classes):
        raise ValueError(f"{what}: {y.shape[1]} labels, but {len(classes)} names: {', '.join(classes)}")
    if task == "classification" and classes is not None:
        valid = y[y != VOID]
        if valid.numel() and not 0 <= int(valid.min()) <= int(valid.max()) < len(classes):
            raise ValueError(
                f"{what}: class numbers must lie between 0 and {len(classes) - 1}, as there are {len(classes)} classes; found "
                f"{int(valid.min())} to {int(valid.max())}. {VOID} means no class; Data.from_arrays(..., void=...) converts another number to it"
            )


def check_finite(tensor: Tensor, name: str, infinite: bool = True, index: Any = None) -> None:
    """Raise ValueError if a tensor [n, ...] holds NaN (or infinity); rows are named by an index of pandas, if there is one."""
    if len(bad := bad_rows(tensor, infinite)):
        first = f"in row {int(bad[0])}" if index is None else f"at index {index[int(bad[0])]}"
        raise ValueError(
            f"{name} holds NaN or infinite numbers in {len(bad)} of {len(tensor)} rows, first {first}; drop these rows or fill the gaps"
        )


def finite_float(tensor: Tensor, name: str) -> Tensor:
    """Convert to float32. Raise if a number is too large for it, and warn if numbers differ by less than its precision."""
    single = tensor.float()
    if (tensor.dtype == torch.float64 or not tensor.is_floating_point()) and (
        problem := coarse_columns(tensor, name, torch.float32)
    ):
        warnings.warn(
            f"{problem}, which a Data holds, so that rows can't be told apart: subtract the mean of the column first",
            WorkbenchWarning,
            stacklevel=2,
        )
    check_finite(single, f"{name} in float32")
    return single


def is_boolean(y: Any) -> bool:
    """Return whether targets are True and False, of which 0 and 1 are then the numbers."""
    if isinstance(y, Tensor):
        return y.dtype == torch.bool
    dtype = getattr(y, "dtype", None)
    return str(dtype) in ("bool", "boolean") or (
        dtype is None and isinstance(y, list) and all(isinstance(v, bool) for v in y)
    )


def class_names(classes: Any, at_least: int) -> tuple[str, ...]:
    """Return class names, with the number of those that occur twice; without names "0", "1", ..., at least `at_least` of them."""
    if classes is None or isinstance(classes, int):
        return tuple(map(str, range(at_least if classes is None else classes)))
    names = [str(name) for name in (classes.values() if isinstance(classes, Mapping) else classes)]
    counts = Counter(names)
    return tuple(f"{name} ({number})" if counts[name] > 1 else name for number, name in enumerate(names))


def holds_texts(y: Any) -> bool:
    """Return whether targets are class names rather than numbers."""
    try:
        array = np.empty(0) if isinstance(y, Tensor) else np.asarray(y)
    except ValueError:  # `as_tensor` reports the error
        return False
    is_text = array.dtype.kind in "UST" or (
        array.dtype.kind == "O" and all(isinstance(item, str) for item in array.flat)
    )
    return is_text and array.size > 0


def check_names(values: Any, name: str) -> None:
    """Raise ValueError if names are missing; objects that hold no texts are not checked."""
    if isinstance(values, Tensor):
        return
    try:
        array = np.asarray(values)
    except ValueError:  # `as_tensor` reports the error
        return
    if isinstance(values, list | tuple) and array.dtype.kind in "UST":
        array = np.array(values, dtype=object)  # numpy has made a text "nan" of each NaN
    if array.dtype.kind != "O" or not any(isinstance(item, str) for item in array.flat):
        return
    missing = np.array([is_missing(item) for item in array.flat]).reshape(len(array), -1).any(1)
    if missing.any():
        raise ValueError(
            f"{name} holds None or NaN instead of a name in {missing.sum()} of {len(array)} rows, first in row {missing.argmax()}; "
            "drop these rows or give them a name"
        )


def category_names(values: Any) -> tuple[str, ...] | None:
    """Return the class names of a pandas categorical that is ordered or not of texts, in its order; None for any other target."""
    categorical = getattr(values, "cat", values)
    if not hasattr(categorical, "categories"):
        return None
    if not categorical.ordered and all(isinstance(category, str) for category in categorical.categories):
        return None
    present = set(values)
    return tuple(str(category) for category in categorical.categories if category in present)


def _numbers_of_names(y: Any, classes: Any, name: str) -> tuple[Any, Any]:
    """Replace class names by class numbers, and return these with the class names; other targets are returned unchanged."""
    check_names(y, name)
    if not holds_texts(y):
        return y, classes
    array = np.asarray(y)
    classes = category_names(y) if classes is None else classes
    labels = sorted({str(item) for item in array.flat}) if classes is None else list(class_names(classes, 0))
    if classes is None and (amount := _amount_among(labels)) is not None:
        raise ValueError(
            f"{name} holds numbers as texts, such as {amount!r}: pandas.to_numeric(y) makes numbers of them; if they are class names, give "
            "classes=sorted(set(y))"
        )
    numbers = {label: number for number, label in enumerate(labels)}
    if unknown := sorted({str(item) for item in array.flat} - set(labels)):
        raise ValueError(f"{name}: {', '.join(map(repr, unknown[:5]))} is none of the classes {', '.join(labels)}")
    return np.array([numbers[str(item)] for item in array.flat]).reshape(array.shape), tuple(labels)


def _amount_among(labels: Sequence[str]) -> str | None:
    """Return a text that reads as a fraction if most of more than ten class names read as numbers, so that they are no names."""
    if len(labels) <= MAX_AMOUNTS:
        return None
    numbers = {}
    for label in labels:
        with contextlib.suppress(ValueError):
            numbers[label] = float(label)
    fractions = [label for label, number in numbers.items() if math.isfinite(number) and number != round(number)]
    return fractions[0] if fractions and 2 * len(numbers) > len(labels) else None


def _inferred_task(y: Tensor, void: int | None, lengths: Any, name: str) -> Task:
    """Infer the task from dtype and shape of the target, and raise ValueError if it is ambiguous."""
    if y.is_floating_point():
        return "regression"
    if y.dtype == torch.bool:
        return "classification" if y.dim() == 1 else "labels"
    if y.dim() != 2 or y.shape[1] == 1 or void is not None or lengths is not None or bool((y == VOID).any()):
        return "classification"
    raise ValueError(
        f"{name} is {kind(y)}: is that a class number for each of {y.shape[1]} tokens (task='classification', or lengths=[n]), yes or no "
        f"for each of {y.shape[1]} labels (task='labels'), counts (task='counts') or values (task='regression')?"
    )


def _values(y: Tensor, task: Task, classes: Any, name: str) -> Tensor:
    if classes is not None:
        raise ValueError(f"{name}: {task} has no classes; found classes={classes!r:.100}")
    y = finite_float(y, name)
    return y[:, None] if y.dim() == 1 else y


def _fraction(y: Tensor) -> float:
    return float(y[y != y.round()][0])


def _masked(y: Tensor, void: int | None, lengths: Any, name: str) -> Tensor:
    if void is not None:
        y = y.masked_fill(y == void, VOID)
    if lengths is None:
        return y
    lengths = as_tensor(lengths, "lengths").long()
    if y.dim() != 2 or lengths.shape != y.shape[:1] or bool((lengths < 0).any()) or bool((lengths > y.shape[1]).any()):
        raise ValueError(
            f"lengths: found {kind(lengths)} for {name} {kind(y)}; give for each row how many of its tokens count"
        )
    return y.masked_fill(torch.arange(y.shape[1]) >= lengths[:, None], VOID)


def _renumbered(y: Tensor, classes: Mapping[Any, Any], name: str) -> Tensor:
    new = torch.full_like(y, -1)
    for number, old in enumerate(classes):
        new[y == old] = number
    new[y == VOID] = VOID
    if bool((new == -1).any()):
        unknown = y[new == -1].unique().tolist()
        raise ValueError(
            f"{name}: {', '.join(map(str, unknown[:10]))} is neither void nor a key of classes={dict(classes)!r:.200}"
        )
    return new
