"""Augment: epistemic risk from the spread of predictions for transformed copies of the input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.additions import extra
from ..core.method import Call, Method
from ..core.settings import setting
from ..core.wrapper import Wrapper as _Wrapper
from ..engine.plan import Axis, Index, Intervention
from ..engine.tree import flatten, is_float
from ..errors import SettingsNeededError

if TYPE_CHECKING:
    from ..core.ownership import Table


class Transform(NamedTuple):
    """Transform of the input, and the inverse transform of the outputs.

    Args:
        apply: function from an input tensor to another with the same number of rows; None for the unchanged input.
        inverse: function applied to each floating-point output tensor; None for outputs that the transform does not change, such as class
            scores.
    """

    apply: Callable[[Tensor], Tensor] | None = None
    inverse: Callable[[Tensor], Tensor] | None = None


class _Turn(NamedTuple):
    """Quarter turns of images [rows, channels, height, width], followed by a horizontal flip if `flipped`."""

    quarters: int
    flipped: bool = False

    def apply(self, x: Tensor) -> Tensor:
        turned = torch.rot90(x, self.quarters, (-2, -1))
        return turned.flip(-1) if self.flipped else turned

    def inverse(self, y: Tensor) -> Tensor:
        return torch.rot90(y.flip(-1) if self.flipped else y, -self.quarters, (-2, -1))


# a vertical flip is a horizontal one after two quarter turns
_NAMED = {
    "flip": (_Turn(0), _Turn(0, True)),
    "flips": (_Turn(0), _Turn(0, True), _Turn(2), _Turn(2, True)),
    "rotations": tuple(_Turn(quarters) for quarters in range(4)),
    "dihedral": tuple(_Turn(quarters, flipped) for flipped in (False, True) for quarters in range(4)),
}


class Wrapper(_Wrapper):
    """Epistemic risk from the spread of predictions for transformed copies of the input (Wang et al. 2019, test-time augmentation).

    In training mode, `wrapped(x)` is the model itself; with `return_risk=True`, and always in evaluation mode, the predictions for all
    transforms are averaged. Transforms get inputs, and inverses get outputs, in the user's units, even if a scaling is set.

    Example:
        >>> import torch
        >>> model = Wrapper("flips")(torch.nn.Conv2d(3, 2, 3, padding=1)).eval()
        >>> y, risk = model(torch.randn(4, 3, 8, 8), return_risk=True)
        >>> y.shape, risk.shape
        (torch.Size([4, 2, 8, 8]), torch.Size([4, 2, 8, 8]))
        >>> signs = [Transform(), Transform(torch.neg, torch.neg)]  # of a model that should be odd
        >>> y, risk = Wrapper(signs)(torch.nn.Linear(2, 1)).eval()(torch.ones(4, 2), return_risk=True)
    """

    transforms: Literal["flip", "flips", "rotations", "dihedral"] | Sequence[Any] = setting(
        default="flip",
        saved=True,
        help='transforms of the input. For images [rows, channels, height, width]: "flip", the image and its horizontal flip; "flips", '
        'horizontal and vertical flips (4); "rotations", quarter turns (4); "dihedral", all of these (8). For any input: a sequence of '
        "`Transform(apply, inverse)` or of deterministic functions of the input; None in it stands for the unchanged input.",
    )
    inputs: Literal["auto", "first", "all"] = setting(
        default="auto",
        saved=True,
        help='which floating-point input tensors are transformed. "auto" takes the first, or for transforms by name the first image; it refuses '
        "further ones of the same height and width, such as the second image of a pair or a mask.",
    )
    maps: Literal["auto"] | bool = setting(
        default="auto",
        saved=True,
        help='for transforms by name: whether outputs are maps, to be transformed back. "auto" treats outputs with the height and width of the '
        "input as maps and outputs of one or two dimensions as scores, and refuses all others.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.transforms, str):
            if self.transforms not in _NAMED:
                raise ValueError(
                    f"transforms must be one of {', '.join(_NAMED)} or a sequence, not {self.transforms!r}"
                )
            return
        if not isinstance(self.transforms, Sequence) or not self.transforms:
            raise ValueError(
                f"transforms must be one of {', '.join(_NAMED)} or a sequence, not {self.transforms!r:.60}"
            )
        object.__setattr__(self, "transforms", tuple(map(_transform, self.transforms)))

    def make(self) -> list[Method]:
        return [Augment(self)]


def _transform(transform: Any) -> Transform:
    if isinstance(transform, Transform):
        pair = transform
    elif isinstance(transform, tuple) and len(transform) == 2:
        pair = Transform(*transform)
    else:
        pair = Transform(transform)
    for function in pair:
        if function is not None and not callable(function):
            raise TypeError(f"a transform must be a function, a pair (apply, inverse) or None, not {transform!r:.60}")
    return pair


class Augment(Method):
    """Method behind `Wrapper`, for one model."""

    name, kind, order = "augment", "epistemic", 22
    detections = "boxes are not transformed back with the image; use vote.Wrapper or sample.Wrapper"

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper)
        self.channels_first = isinstance(self.wrapper.transforms, str)

    def settings(self) -> dict[str, Any]:
        transforms = self.wrapper.transforms
        # "auto" predicts as "first" does, and is saved as such, as in files of earlier versions
        inputs = "all" if self.wrapper.inputs == "all" else "first"
        # functions cannot be saved by name, so only their number is
        saved = {"transforms": transforms if isinstance(transforms, str) else len(transforms), "inputs": inputs}
        return {**super().settings(), **saved}

    @property
    def transforms(self) -> Sequence[Any]:
        """Transforms in the order of the branches."""
        transforms = self.wrapper.transforms
        return _NAMED[transforms] if isinstance(transforms, str) else transforms

    def repeats(self, training: bool) -> bool:
        return training  # predictions run transforms, which may be user-defined

    def axis(self, call: Call) -> Axis | None:
        several = not call.loss and (call.return_risk or not call.training) and not call.dealt
        return Axis(self.name, len(self.transforms), apart=True) if several else None

    def intervention(self, table: Table, call: Call) -> Intervention | None:
        return _Transformed(self, table) if self.axis(call) is not None else None


class _Transformed(Intervention):
    loop_only = "each branch gets a different transform of the input"

    def __init__(self, method: Augment, table: Table) -> None:
        self.method, self.taps = method, {}
        self.named = isinstance(method.wrapper.transforms, str)
        self.scaling = extra(table.root, "scaling")
        self.sizes: list[torch.Size] = []  # height and width of the transformed images

    def inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], index: Index
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        transform = self.method.transforms[index[self.method.name]]
        original = (args, kwargs) if self.scaling is None else self.scaling.original(args, kwargs)
        leaves, rebuild = flatten(original)
        positions = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
        if not positions:
            kinds = [f"{leaf.dtype} {list(leaf.shape)}" for leaf in leaves if isinstance(leaf, Tensor)]
            raise TypeError(
                f"augment transforms floating-point inputs, but found none (inputs: {', '.join(kinds) or 'no tensors'}); wrap a function that "
                "takes floating-point numbers, such as embedded tokens or scaled pixels"
            )
        if self.named:  # vectors and tables beside images are no images
            positions = [i for i in positions if leaves[i].dim() > 2] or positions
        positions = positions if self.method.wrapper.inputs == "all" else positions[:1]
        if self.named and self.method.wrapper.inputs == "auto":
            _check_single_image(leaves, positions[0])
        self.sizes = [_image_size(leaves[i], self.method.wrapper.transforms) for i in positions] if self.named else []
        if transform.apply is None:
            return args, kwargs
        for i in positions:
            leaves[i] = _apply(transform.apply, leaves[i])
        return rebuild(leaves) if self.scaling is None else self.scaling.inputs(*rebuild(leaves), exact=False)

    def output(self, output: Any, index: Index) -> Any:
        transform = self.method.transforms[index[self.method.name]]
        if transform.inverse is None:
            return output
        original = output if self.scaling is None else self.scaling.prediction(output)
        leaves, rebuild = flatten(original)
        inverted = [transform.inverse(y) if is_float(y) and self._is_map(y) else y for y in leaves]
        if all(new is old for new, old in zip(inverted, leaves, strict=True)):
            return output
        return rebuild(inverted) if self.scaling is None else self.scaling.targets(rebuild(inverted))

    def _is_map(self, y: Tensor) -> bool:
        """Whether an output transforms with the input, and so must be transformed back."""
        if not self.named:
            return True
        maps = self.method.wrapper.maps
        if y.dim() < 3 or maps is False:
            return False
        height, width = y.shape[-2:]  # not sorted: torch.compile cannot sort symbolic sizes
        if maps is True or any((height, width) in ((h, w), (w, h)) for h, w in self.sizes):
            return True
        raise SettingsNeededError(
            f"augment can't tell whether an output of shape {list(y.shape)} is a map of the input, whose images have {list(self.sizes[0])} "
            "pixels: use augment.Wrapper(..., maps=True) if it flips and rotates with the image, maps=False if it does not, or give "
            "transforms=[augment.Transform(apply, inverse), ...]",
            "maps",
        )


def _image_size(x: Tensor, name: Any) -> torch.Size:
    if x.dim() < 4:
        raise SettingsNeededError(
            f'transforms="{name}" is for images [rows, channels, height, width], but the input has shape {list(x.shape)}; use '
            "augment.Wrapper([augment.Transform(apply, inverse), ...]) with your own transforms",
            "transforms",
        )
    return x.shape[-2:]


def _check_single_image(leaves: list[Any], position: int) -> None:
    """Raise SettingsNeededError if further inputs have the image's size, and may have to be transformed with it."""
    image = leaves[position]
    same_size = [
        t
        for i, t in enumerate(leaves)
        if i != position
        and isinstance(t, Tensor)
        and t.dim() > 2
        and image.dim() > 3
        and t.shape[-2:] == image.shape[-2:]
    ]
    if same_size:
        shapes = ", ".join(f"{t.dtype} {list(t.shape)}" for t in same_size)
        raise SettingsNeededError(
            f"augment can't tell whether to transform other inputs with the first, {list(image.shape)}: {shapes} have its height and width; use "
            'augment.Wrapper(..., inputs="all") to transform all floating-point ones, as for an image and its mask, or inputs="first" to leave '
            "them unchanged. A flipped stereo pair is no longer a stereo pair: use vote.Wrapper or sample.Wrapper",
            "inputs",
        )


def _apply(apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    new = apply(x)
    if not isinstance(new, Tensor) or new.shape[:1] != x.shape[:1]:
        shape = list(new.shape) if isinstance(new, Tensor) else type(new).__name__
        raise ValueError(
            f"augment: a transform returned {shape} for an input of shape {list(x.shape)}; return a tensor with the same number of rows"
        )
    return new


__all__ = ["Augment", "Transform", "Wrapper"]
