"""What the last layer of a model is given and gives, and what the training data say about it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.calls.risks import reduced
from ..core.method import Call
from ..core.outputs.class_scores import Binary, Classes, Probs, at_least_float32
from ..core.outputs.meanings import Meaning
from ..core.outputs.options import MEAN
from ..core.outputs.resolution import resolve, targets_of
from ..core.ownership import engine_of, extra, table_of
from ..engine.branch import is_batched
from ..engine.effects.random import values_unavailable
from ..engine.plan import Axis, Bank, Index, Intervention, Plan
from ..engine.sites import Sites, TensorFacts, tensors_among
from ..engine.state import Sealed
from ..engine.tree import children, flatten, is_float, names, tree_map
from ..introspect.objects import tensors_and_generators
from .curvature import Curvature, Posterior

if TYPE_CHECKING:
    from ..core.ownership import Table

Handle = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
ASKED = Call(training=False, return_risk=True)
CASTS = ("float", "double", "to", "type", "type_as")
# what autocast computes in float32: losses, and elsewhere than on a CPU these as well (torch.amp, "Autocast Op Reference")
LOSSES = ("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div")
PRECISE = (
    *(
        "softmax",
        "log_softmax",
        "softplus",
        "exp",
        "expm1",
        "log",
        "log1p",
        "log2",
        "log10",
        "logsumexp",
        "pow",
        "sum",
        "prod",
        "norm",
    ),
    *(
        "cumsum",
        "cumprod",
        "layer_norm",
        "group_norm",
        "rms_norm",
        "reciprocal",
        "rsqrt",
        "cosine_similarity",
        "dist",
        "cdist",
    ),
)
REMEDY = "Name the layer whose output is the model's, layer=..., move what follows it out of the model, or use vote or sample"


def rows_of(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


def augmented(features: Tensor, bias: bool) -> Tensor:
    return torch.cat([features, torch.ones_like(features[..., :1])], -1) if bias else features


class _LayerSites(Sites):
    """Calls `handle` with the features, weight, bias and outputs of a linear layer, and lets what it gives be the outputs."""

    def __init__(
        self,
        parameters: Sequence[tuple[Tensor, str]],
        state: Sequence[Tensor],
        inputs: list[Tensor],
        names: frozenset[str],
        handle: Handle,
    ) -> None:
        super().__init__(parameters, state, inputs, self._met)
        self.names, self.handle = names, handle
        self.pending: tuple[Tensor, Tensor, Tensor | None] | None = None
        self.plain_dtypes, self.widened = TensorFacts(), False  # of what handle made more precise, and all that follows

    def _met(self, names: frozenset[str], leaves: list[Any], live: list[int], raw: list[int]) -> list[Any]:
        data = [*live, *raw]
        weights = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in data]
        if names <= self.names and len(data) == 1 and len(weights) <= 2 and weights[0].dim() == 2:
            self.pending = leaves[data[0]], weights[0], weights[1] if len(weights) == 2 else None
        return leaves

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = super().__torch_function__(function, kinds, args, kwargs)
        pending, self.pending = self.pending, None
        if pending is None:
            if self.widened and isinstance(out, Tensor):
                self._follow(function, tensors_among((*args, *(kwargs or {}).values())), out)
            return out
        handled = self.handle(*pending, out)
        if handled.dtype != out.dtype:
            self.plain_dtypes.set(handled, out.dtype)
            self.widened = True
        return handled

    def _follow(self, function: Any, arguments: list[Tensor], out: Tensor) -> None:
        """Note the dtype that a result would have, had the outputs kept theirs; what the model itself makes precise stays so."""
        plain = [self.plain_dtypes.get(tensor) for tensor in arguments]
        if not any(plain) or out.dtype is not torch.float32:
            return
        if _is_precise(getattr(function, "__name__", ""), out.device.type):
            self.plain_dtypes.set(out, out.dtype)
            return
        if self.plain_dtypes.get(out) is not None:
            return
        sized = [
            dtype or tensor.dtype
            for dtype, tensor in zip(plain, arguments, strict=True)
            if is_float(tensor) and tensor.dim()
        ]
        if sized and (dtype := functools.reduce(torch.promote_types, sized)) != out.dtype:
            self.plain_dtypes.set(out, dtype)


def _is_precise(name: str, device: str) -> bool:
    """Whether a function of this name gives float32 whatever it is given; casts may give the very same tensor."""
    if name in CASTS or not torch.is_autocast_enabled(device):
        return name in CASTS
    return name in LOSSES or name.endswith("_loss") or (device != "cpu" and name in PRECISE)


class AtLayer(Intervention):
    """What happens where a linear layer runs in a branch.

    Args:
        names: of its parameters.
    """

    sites: Any = None

    def __init__(self, names: frozenset[str]) -> None:
        self.names, self.taps = names, {}

    def at_layer(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor], handle: Handle
    ) -> AbstractContextManager[Any]:
        """The context for a branch that lets `handle` see features, weight, bias and outputs, and takes what it gives for the outputs."""
        self.sites = _LayerSites(parameters, state, inputs, self.names, handle)
        return self.sites

    def output(self, output: Any, index: Index) -> Any:
        sites, self.sites = self.sites, None  # nothing of a branch may outlive it
        self.plain_dtypes = {}
        for i, leaf in enumerate(flatten(output)[0]) if sites.widened else ():
            dtype = sites.plain_dtypes.get(leaf)
            if dtype is not None:
                self.plain_dtypes[i] = dtype
        return output


class Probe(AtLayer):
    """Keeps what the last layer was given and gave, and adds `step` to the latter."""

    step: Tensor | float = 0.0

    def active(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor]
    ) -> AbstractContextManager[Any] | None:
        self.taps, self.calls = {}, 0
        return self.at_layer(parameters, state, inputs, self._kept)

    def _kept(self, features: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if is_batched(out):  # a vmap of the model's own, whose rows cannot be told apart here
            return out
        self.calls += 1
        weights = weight.mT if _is_transposed(features, weight, bias, out) else weight
        self.taps = {
            "features": augmented(features, bias is not None),
            "weights": weights if bias is None else torch.cat([weights, bias[:, None]], 1),
            "outputs": out,
        }
        # a step in half precision would say the slope of what follows with as few digits
        return at_least_float32(out) + self.step if isinstance(self.step, Tensor) else out


def _is_transposed(features: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> bool:
    """Whether a product took the weight as [inputs, outputs], which a square one does not show."""
    if weight.shape != (out.shape[-1], features.shape[-1]):
        return True
    if weight.shape[0] != weight.shape[1]:
        return False
    rest = out if bias is None else out - bias
    straight, turned = ((features @ w - rest).square().sum() for w in (weight.mT, weight))
    return bool(turned < straight)


def heads_of(table: Table) -> list[Axis]:
    """The axes along which other heads stand beside the model's own."""
    axes = [method.axis(ASKED) for method in table.record.methods]
    return [axis for axis in axes if axis is not None and axis.own_first]


class Look:
    """Looks at the last layer of one voter, batch after batch, and sums up what its posterior needs to know.

    Args:
        wrapped: the model.
        place: of the voter, axis -> position; none where nothing votes.
        path: of the layer.
        names: of its parameters.
        noise: standard deviation of the data's noise in the units of the targets, if it is known.
    """

    def __init__(
        self, wrapped: Any, place: dict[str, int], path: str, names: frozenset[str], noise: float | None
    ) -> None:
        self.wrapped, self.place, self.noise = wrapped, place, noise
        self.path, self.name = path, path or "the model itself"
        self.record, self.table, self.scaling = wrapped._workbench, table_of(wrapped), extra(wrapped, "scaling")
        self.meaning: Meaning | None = None  # of the output that is the layer's, known after the first batch
        self.curvature = Curvature()
        self.weights: Any = None
        self.probe = Probe(names)

    def _run(self, args: tuple, kwargs: dict[str, Any], axes: Sequence[Axis] = ()) -> Any:
        """The model's own branch under the probe; or all branches along some axes, as they are."""
        plan = Plan(
            tuple(axes),
            self.record.rules,
            Bank(self.table.get),
            () if axes else (self.probe,),
            keep_state=False,
            fixed=self.place,
            state=self.record.state or (),
        )
        engine = engine_of(self.wrapped)
        if engine.effects.writes_tensors is not False:
            args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        return engine.run(plan, args, kwargs)

    def __call__(self, args: tuple, kwargs: dict[str, Any], target: Any) -> None:
        """Take in a batch.

        Raises:
            ValueError: if the output is not the layer's own, or targets are needed and are not there.
        """
        if self.scaling is not None:
            (args, kwargs), target = self.scaling.inputs(args, kwargs), self.scaling.targets(target)
        output, taps = self._seen(args, kwargs)
        leaves = flatten(output)[0]
        phi, z = rows_of(taps["features"]), taps["outputs"]
        if self.weights is None:
            self._find(args, kwargs, output, taps)
        leaf = leaves[self.at]
        if children(target) is not None:  # targets by the names of the outputs
            target = targets_of(target, names(output), resolve(self.record.output, lambda: names(output), leaves, 0))[
                self.at
            ]
        if isinstance(self.meaning, Binary):
            self.curvature.add_labels(
                phi, rows_of(self.meaning.probabilities(leaf)[..., 1].reshape(z.shape)), self.slope
            )
            return
        if isinstance(self.meaning, Classes):
            self.curvature.add_classes(phi, rows_of(self.meaning.probabilities(leaf)), self.slope)
            return
        precision, residuals, heads = None, None, heads_of(self.table)
        if heads:
            noise = reduced(self.wrapped, self._run(args, kwargs, heads)[0], True)[1]["aleatoric"]
            precision = rows_of(self.slope / flatten(noise)[0][self.at].double().reshape(z.shape)).square()
        elif self.noise is None:
            residuals = rows_of((self._targets(target, z) - leaf.reshape(z.shape)).double() / self.slope)
        self.curvature.add_values(phi, precision, residuals)

    def check(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raise ValueError if the output is not the layer's own, as inputs in the user's units show."""
        if self.scaling is not None:
            args, kwargs = self.scaling.inputs(args, kwargs)
        self._find(args, kwargs, *self._seen(args, kwargs))

    def _find(self, args: tuple, kwargs: dict[str, Any], output: Any, taps: dict[str, Tensor]) -> None:
        """Find out which part of the output is the layer's, and what that means."""
        leaves = flatten(output)[0]
        meanings = resolve(self.record.output, lambda: names(output), leaves, 0)
        self.at, self.slope = self._answer(args, kwargs, leaves, meanings, taps["outputs"])
        self.meaning = meanings[self.at]
        self.weights = taps["weights"]

    def _targets(self, target: Any, z: Tensor) -> Tensor:
        if isinstance(target, Tensor) and target.numel() == z.numel():
            return target.reshape(z.shape)
        shape = list(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(
            f"laplace learns the noise of the data from residuals, and the targets are {shape} for predictions {list(z.shape)}: give pairs "
            "(input, target) to fit, or laplace.Wrapper(noise=...), or compose it with sculpt"
        )

    def _seen(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        result = self._run(args, kwargs)[1][0]
        if self.probe.calls != 1:
            raise ValueError(
                f"laplace wants a last layer that runs once in a call, and {self.name!r} ran {self.probe.calls} times as a linear layer. "
                f"{REMEDY}"
            )
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, result.taps.values())) and not values_unavailable():
            raise ValueError(
                f"laplace: {self.name!r} runs inside a torch.func transform of the model's own (grad, jacrev, vmap), where what it gives is no "
                f"prediction. {REMEDY}"
            )
        layer: Any = self.table.module(self.path)
        if result.taps["weights"].shape[1] != layer.weight.shape[1] + (layer.bias is not None):
            raise ValueError(
                f"laplace: the bias of {self.name!r} is not added by the product that uses its weight; call the layer as a whole, "
                f"F.linear(h, layer.weight, layer.bias), or use vote or sample"
            )
        return result.output, result.taps

    def _answer(
        self, args: tuple, kwargs: dict[str, Any], leaves: list[Any], meanings: Sequence[Meaning | None], z: Tensor
    ) -> tuple[int, Tensor]:
        """Which part of the output is slope * z + constant, elementwise, and the slope of each column; no other part may depend on z."""
        size = z.detach().double().square().mean().sqrt().clamp_min(1e-3).to(z.dtype)
        signs = torch.randint(0, 2, z.shape, generator=torch.Generator().manual_seed(0)).to(z) * 2 - 1
        moved = []
        for self.probe.step in (size, size * signs):
            moved.append(flatten(self._seen(args, kwargs)[0])[0])
        self.probe.step = 0.0
        close = functools.partial(torch.allclose, rtol=0, atol=4 * torch.finfo(z.dtype).eps ** 0.5)
        outputs: list[tuple[int, Tensor]] = []
        for i, (leaf, *others) in enumerate(zip(leaves, *moved, strict=True)):
            meaning = meanings[i]
            if isinstance(leaf, Sealed):
                self._refuse_state(leaf, others)
            if not is_float(leaf) or meaning is MEAN or all(torch.equal(leaf, other) for other in others):
                continue
            if _is_probability_of(meaning, leaf, z, close):
                outputs.append((i, torch.ones(z.shape[-1], dtype=torch.float64, device=z.device)))
            elif leaf.numel() == z.numel() and not leaf.is_complex() and not _gives_probabilities(meaning):
                slopes, signed = (((other - leaf) / size).double().reshape(z.shape) for other in others)
                slope, most = rows_of(slopes).mean(0), slopes.abs().max()
                if (
                    close(slopes / most, (slope / most).expand_as(slopes))
                    and close(signed / most, slopes * signs / most)
                    and bool(slope.abs().min() > 0.01 * most)
                ):
                    outputs.append((i, slope))
            if not outputs or outputs[-1][0] != i:
                raise ValueError(
                    f"laplace knows the last layer only where the output is that of {self.name!r}, {list(z.shape)}, but for a shift and a "
                    f"scale; part {i} of the output, {list(leaf.shape)}, depends on it in another way. {REMEDY}"
                )
        if not outputs:
            raise ValueError(
                f"laplace: the output does not depend on {self.name!r}, taken for the last layer. {REMEDY}"
            )
        return outputs[0]

    def _refuse_state(self, state: Sealed, others: Sequence[Sealed]) -> None:
        """The posterior is that of one call: nothing that the layer gives may go on into the next one."""
        inside, *moved = (tensors_and_generators(part.value) for part in (state, *others))
        if any(len(leaves) != len(inside) or not all(map(torch.equal, inside, leaves)) for leaves in moved):
            raise ValueError(
                f"laplace: the state that the model hands on depends on what {self.name!r} gives, so that its posterior is not that of one "
                "call: use vote, swag or snapshot, whose voters keep a state each"
            )

    def posterior(self, prior_precision: float | None) -> Posterior:
        """The posterior after all batches; see `Curvature.posterior`."""
        noise = None
        if not isinstance(self.meaning, Classes) and self.noise is not None and not heads_of(self.table):
            units = 1.0 if self.scaling is None or self.scaling.y_mean is None else self.scaling.y_scale
            noise = self.noise / (self.slope.abs() * units)
        return self.curvature.posterior(self.weights, prior_precision, noise)


def _is_probability_of(meaning: Meaning | None, leaf: Tensor, z: Tensor, close: Callable[..., bool]) -> bool:
    """Whether class scores say the same probabilities as the layer's outputs."""
    if isinstance(meaning, Binary):
        return _gives_probabilities(meaning) and leaf.numel() == z.numel() and close(leaf.reshape(z.shape), z.sigmoid())
    if not isinstance(meaning, Classes) or not leaf.dim():
        return False
    probs = meaning.probabilities(leaf)
    return probs.shape == z.shape and close(probs, z.to(probs.dtype).softmax(-1))


def _gives_probabilities(meaning: Meaning | None) -> bool:
    return isinstance(meaning, Probs) or (isinstance(meaning, Binary) and not meaning.logits)


__all__ = ["ASKED", "AtLayer", "Handle", "Look", "Probe", "augmented", "heads_of"]
