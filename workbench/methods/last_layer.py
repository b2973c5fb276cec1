"""Inputs and outputs of a model's last layer, and the curvature that training data give its weights."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.additions import extra
from ..core.calls.risks import reduced
from ..core.layer_order import watched
from ..core.method import Call
from ..core.outputs.class_scores import Binary, Classes, at_least_float32
from ..core.outputs.meanings import IGNORED, Meaning
from ..core.outputs.options import MEAN
from ..core.outputs.resolution import resolve, targets_of
from ..core.outputs.slips import refuse_class_numbers_for_values
from ..core.ownership import engine_of, table_of
from ..engine.branch import is_batched
from ..engine.effects.random import values_unavailable
from ..engine.plan import Axis, Bank, Index, Intervention, Plan
from ..engine.sites import Sites, tensors_among
from ..engine.state import Sealed
from ..engine.tensor_facts import TensorFacts
from ..engine.tree import children, flatten, is_float, map_tensors, names, paths
from ..errors import WorkbenchWarning
from ..introspect.objects import tensors_and_generators
from ..introspect.source_lines import user_stacklevel
from .curvature import Curvature, Posterior
from .output_slope import slope_of

if TYPE_CHECKING:
    from ..core.ownership import Table

Handle = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
RISK_CALL = Call(training=False, return_risk=True)
CASTS = ("float", "double", "to", "type", "type_as")
# operations that autocast computes in float32: losses on all devices, PRECISE except on CPU (torch.amp, "Autocast Op Reference")
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


def flatten_rows(values: Tensor) -> Tensor:
    """Return values [..., d] as a matrix [rows, d]."""
    return values.reshape(-1, values.shape[-1])


def augmented(features: Tensor, bias: bool) -> Tensor:
    """Append a 1 to features [..., d] if the layer has a bias."""
    return torch.cat([features, torch.ones_like(features[..., :1])], -1) if bias else features


def has_class(target: Any, shape: torch.Size) -> Tensor | slice:
    """Return a mask [rows] of the positions that have a class, not -100; all of them if the targets are no class numbers of this shape."""
    if not isinstance(target, Tensor) or target.is_floating_point() or target.shape != shape:
        return slice(None)
    return (target != IGNORED).flatten()


class _LayerSites(Sites):
    """Calls `handle` with the features, weight, bias and outputs of a linear layer, and replaces the outputs by what it returns."""

    follows_constants = False  # the posterior is that of the layer's own weights

    def __init__(
        self,
        parameters: Sequence[tuple[Tensor, str]],
        state: Sequence[Tensor],
        inputs: list[Tensor],
        names: frozenset[str],
        handle: Handle,
    ) -> None:
        super().__init__(parameters, state, inputs, self._at_site)
        self.names, self.handle = names, handle
        self.pending: tuple[Tensor, Tensor, Tensor | None] | None = None
        # dtypes that tensors would have without the wider dtype of handled outputs, and whether any output was widened
        self.plain_dtypes, self.widened = TensorFacts(), False

    def _at_site(self, names: frozenset[str], leaves: list[Any], live: list[int], raw: list[int]) -> list[Any]:
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
        """Record the dtype that a result would have if outputs had kept theirs; what the model itself computes in float32 stays float32."""
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
    """Whether a function of this name returns float32 for any input; casts may return the input itself."""
    if name in CASTS or not torch.is_autocast_enabled(device):
        return name in CASTS
    return name in LOSSES or name.endswith("_loss") or (device != "cpu" and name in PRECISE)


class AtLayer(Intervention):
    """Intervention where a linear layer runs in a branch.

    Args:
        names: names of the layer's parameters.
    """

    sites: Any = None

    def __init__(self, names: frozenset[str]) -> None:
        self.names, self.taps = names, {}

    def at_layer(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor], handle: Handle
    ) -> AbstractContextManager[Any]:
        """Return the context of a branch in which `handle` gets features, weight, bias and outputs, and returns the new outputs."""
        self.sites = _LayerSites(parameters, state, inputs, self.names, handle)
        return self.sites

    def output(self, output: Any, index: Index) -> Any:
        sites, self.sites = self.sites, None  # keep nothing beyond the branch
        self.plain_dtypes = {}
        for i, leaf in enumerate(flatten(output)[0]) if sites.widened else ():
            dtype = sites.plain_dtypes.get(leaf)
            if dtype is not None:
                self.plain_dtypes[i] = dtype
        return output


class Probe(AtLayer):
    """Records the inputs and outputs of the last layer, and adds `step` to the outputs."""

    step: Tensor | float = 0.0

    def active(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor]
    ) -> AbstractContextManager[Any] | None:
        self.taps, self.calls = {}, 0
        return self.at_layer(parameters, state, inputs, self._record)

    def _record(self, features: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if is_batched(out):  # the model uses vmap itself, inside which rows cannot be separated
            return out
        self.calls += 1
        weights = weight.mT if _is_transposed(features, weight, bias, out) else weight
        self.taps = {
            "features": augmented(features, bias is not None),
            "weights": weights if bias is None else torch.cat([weights, bias[:, None]], 1),
            "outputs": out,
        }
        # a step in half precision would give the slope of later operations in half precision only
        return at_least_float32(out) + self.step if isinstance(self.step, Tensor) else out


def _is_transposed(features: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> bool:
    """Whether a product used the weight as [inputs, outputs]; for a square weight, known only from its outputs."""
    if weight.shape != (out.shape[-1], features.shape[-1]):
        return True
    if weight.shape[0] != weight.shape[1]:
        return False
    rest = out if bias is None else out - bias
    plain_error, transposed_error = ((features @ w - rest).square().sum() for w in (weight.mT, weight))
    return bool(transposed_error < plain_error)


def head_axes(table: Table) -> list[Axis]:
    """Return the axes of additional heads, such as risk heads."""
    axes = [method.axis(RISK_CALL) for method in table.record.methods]
    return [axis for axis in axes if axis is not None and axis.own_first]


def refuse_class_numbers(wrapped: Any, target: Any, leaves: list[Any]) -> None:
    """Raise ValueError if targets are class numbers, from which the outputs have no residuals."""
    refuse_class_numbers_for_values(
        wrapped, "laplace takes", "values, whose noise it estimates from residuals", target, leaves
    )


class CurvatureFit:
    """Accumulates over batches the curvature of one voter's last layer, from which its posterior follows.

    Args:
        wrapped: the wrapped model.
        place: position of the voter, axis -> position; empty for a model without voters.
        path: path of the layer.
        names: names of its parameters.
        noise: standard deviation of the data's noise in the units of the targets; None if unknown.
    """

    def __init__(
        self, wrapped: Any, place: dict[str, int], path: str, names: frozenset[str], noise: float | None
    ) -> None:
        self.wrapped, self.place, self.noise = wrapped, place, noise
        self.path, self.name = path, path or "the model itself"
        self.record, self.table, self.scaling = wrapped._workbench, table_of(wrapped), extra(wrapped, "scaling")
        self.meaning: Meaning | None = None  # of the output computed from the layer, known after the first batch
        self.curvature = Curvature()
        self.weights: Any = None
        self.probe = Probe(names)

    def _run(self, args: tuple, kwargs: dict[str, Any], axes: Sequence[Axis] = ()) -> Any:
        """Run the model's own branch with the probe, or, given axes, all branches along them without it."""
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
            args, kwargs = map_tensors(lambda t: t.clone(), (args, kwargs))
        return engine.run(plan, args, kwargs)

    def __call__(self, args: tuple, kwargs: dict[str, Any], target: Any) -> None:
        """Add a batch.

        Raises:
            ValueError: if the output is not that of the layer, or targets are needed and missing.
        """
        if self.scaling is not None:
            (args, kwargs), target = self.scaling.inputs(args, kwargs), self.scaling.targets(target)
        output, taps = self.probe_layer(args, kwargs)
        leaves = flatten(output)[0]
        phi, z = flatten_rows(taps["features"]), taps["outputs"]
        if self.weights is None:
            self.identify_output(args, kwargs, output, taps)
            if not any(self.place.values()):  # once for all voters
                self._warn_of_others(args, kwargs, output)
        leaf = leaves[self.at]
        if children(target) is not None:  # targets by the names of the outputs
            meanings = resolve(self.record.output, lambda: names(output), leaves, 0)
            target = targets_of(target, names(output), meanings)[self.at]
        if isinstance(self.meaning, Binary):
            self.curvature.add_labels(
                phi, flatten_rows(self.meaning.probabilities(leaf)[..., 1].reshape(z.shape)), self.slope
            )
            return
        if isinstance(self.meaning, Classes):
            probs = self.meaning.probabilities(leaf)
            kept = has_class(target, probs.shape[:-1])
            self.curvature.add_classes(phi[kept], flatten_rows(probs)[kept], self.slope)
            return
        precision, residuals, heads = None, None, head_axes(self.table)
        if heads:
            noise = reduced(self.wrapped, self._run(args, kwargs, heads)[0], True)[1]["aleatoric"]
            precision = flatten_rows(self.slope / flatten(noise)[0][self.at].double().reshape(z.shape)).square()
        elif self.noise is None:
            residuals = flatten_rows((self._targets(target, z) - leaf.reshape(z.shape)).double() / self.slope)
        self.curvature.add_values(phi, precision, residuals)

    def check(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raise ValueError if the output for these inputs, in the user's units, is not that of the layer."""
        if self.scaling is not None:
            args, kwargs = self.scaling.inputs(args, kwargs)
        self.identify_output(args, kwargs, *self.probe_layer(args, kwargs))

    def identify_output(self, args: tuple, kwargs: dict[str, Any], output: Any, taps: dict[str, Tensor]) -> None:
        """Find the part of the output that is computed from the layer, its slope and its meaning."""
        leaves = flatten(output)[0]
        meanings = resolve(self.record.output, lambda: names(output), leaves, 0)
        self.at, self.slope = self._find_output(args, kwargs, leaves, meanings, taps["outputs"])
        self.meaning = meanings[self.at]
        self.weights = taps["weights"]

    def _warn_of_others(self, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Warn about outputs of other last layers, which have no risk; not about features that the layer itself reads."""
        execution = None if values_unavailable() else watched(self.wrapped, args, kwargs)
        if execution is None:
            return
        meanings = resolve(self.record.output, lambda: names(output), flatten(output)[0], 0)
        # tensors that several layers share are recorded under the first of them
        recorded = {
            slot.owners[0][0] for slot in self.record.slots.values() if self.path in [path for path, _ in slot.owners]
        }
        with_risk = {path for path, meaning in zip(paths(output), meanings, strict=True) if meaning is not MEAN}
        others = [
            name
            for name, ran in zip(execution.names, execution.outputs, strict=True)
            if recorded.isdisjoint(ran) and name in with_risk
        ]
        if others:
            warnings.warn(
                f"laplace: {', '.join(others)} does not depend on {self.name!r}, the layer with the posterior, so that its epistemic risk is 0. "
                "Wrap a model that returns one of the outputs, or use vote or sample",
                WorkbenchWarning,
                stacklevel=user_stacklevel(),
            )

    def _targets(self, target: Any, z: Tensor) -> Tensor:
        if isinstance(target, Tensor) and target.numel() == z.numel():
            return target.reshape(z.shape)
        refuse_class_numbers(self.wrapped, target, [z])
        shape = list(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(
            f"laplace estimates the noise of the data from residuals, but the targets are {shape} for predictions {list(z.shape)}: give pairs "
            "(input, target) to fit, or set laplace.Wrapper(noise=...), or compose it with sculpt"
        )

    def probe_layer(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        """Return the output of a pass, and features, weights and outputs of the layer."""
        result = self._run(args, kwargs)[1][0]
        if self.probe.calls != 1:
            raise ValueError(
                f"laplace needs a last layer that runs once per call, but {self.name!r} ran {self.probe.calls} times as a linear layer. "
                f"{REMEDY}"
            )
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, result.taps.values())) and not values_unavailable():
            raise ValueError(
                f"laplace: {self.name!r} runs inside a torch.func transform that the model itself uses (grad, jacrev, vmap), so its output is "
                f"not the prediction. {REMEDY}"
            )
        layer: Any = self.table.module(self.path)
        if result.taps["weights"].shape[1] != layer.weight.shape[1] + (layer.bias is not None):
            raise ValueError(
                f"laplace: the bias of {self.name!r} is not added in the call that uses its weight; call the layer as a whole, "
                f"F.linear(h, layer.weight, layer.bias), or use vote or sample"
            )
        return result.output, result.taps

    def _find_output(
        self, args: tuple, kwargs: dict[str, Any], leaves: list[Any], meanings: Sequence[Meaning | None], z: Tensor
    ) -> tuple[int, Tensor]:
        """Return the index of the output that is slope * z + constant, elementwise, and the slope of each column.

        Raises:
            ValueError: if there is none, or another output depends on z.
        """
        size = z.detach().double().square().mean().sqrt().clamp_min(1e-3).to(z.dtype)
        signs = torch.randint(0, 2, z.shape, generator=torch.Generator().manual_seed(0)).to(z) * 2 - 1
        steps, moved = (size, size * signs), []
        for self.probe.step in steps:
            moved.append(flatten(self.probe_layer(args, kwargs)[0])[0])
        self.probe.step = 0.0
        outputs: list[tuple[int, Tensor]] = []
        for i, (leaf, *others) in enumerate(zip(leaves, *moved, strict=True)):
            if isinstance(leaf, Sealed):
                self._refuse_state(leaf, others)
            if not is_float(leaf) or meanings[i] is MEAN or all(torch.equal(leaf, other) for other in others):
                continue
            slope = slope_of(meanings[i], leaf, others, z, steps)
            if slope is None:
                raise ValueError(
                    f"laplace needs an output that is the output of {self.name!r}, {list(z.shape)}, up to a shift and a scale; part {i} of the "
                    f"model's output, {list(leaf.shape)}, depends on it in another way. {REMEDY}"
                )
            outputs.append((i, slope))
        if not outputs:
            raise ValueError(
                f"laplace: the output does not depend on {self.name!r}, which is taken as the last layer. {REMEDY}"
            )
        return outputs[0]

    def _refuse_state(self, state: Sealed, others: Sequence[Sealed]) -> None:
        """Refuse a state that depends on the layer's output: the posterior is that of one call, not of a sequence of calls."""
        inside, *moved = (tensors_and_generators(part.value) for part in (state, *others))
        if any(len(leaves) != len(inside) or not all(map(torch.equal, inside, leaves)) for leaves in moved):
            raise ValueError(
                f"laplace: the state that the model passes to its next call depends on the output of {self.name!r}, so that the posterior is "
                "not that of a single call: use vote, swag or snapshot, whose voters each keep their own state"
            )

    def posterior(self, prior_precision: float | None) -> Posterior:
        """Return the posterior after all batches; see `Curvature.posterior`."""
        noise = None
        if not isinstance(self.meaning, Classes) and self.noise is not None and not head_axes(self.table):
            units = 1.0 if self.scaling is None or self.scaling.y_mean is None else self.scaling.y_scale
            noise = self.noise / (self.slope.abs() * units)
        return self.curvature.posterior(self.weights, prior_precision, noise)


__all__ = [
    "RISK_CALL",
    "AtLayer",
    "CurvatureFit",
    "Handle",
    "Probe",
    "augmented",
    "has_class",
    "head_axes",
    "refuse_class_numbers",
]
