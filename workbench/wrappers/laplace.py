"""Laplace: a Gaussian posterior of the last layer's weights tells how far the training data settle them (epistemic risk)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..calling import reduced
from ..engine.body import is_batched
from ..engine.plan import Axis, Bank, Index, Intervention, Plan, Shared, Split, Stacked
from ..engine.sites import Sites
from ..engine.tree import flatten, is_float, tree_map
from ..errors import NotFittedError
from ..method import Call, Method, evaluating, spread, sqrt
from ..table import engine_of, extra, table_of
from ..wrapping import Wrapper as _Wrapper
from .curvature import Curvature, Posterior

if TYPE_CHECKING:
    from ..engine.plan import Rule
    from ..table import Table

ASKED = Call(training=False, return_risk=True)
CENTRED = torch.tensor(
    [[0.0], [1.5**0.5], [-(1.5**0.5)]], dtype=torch.float64
)  # mean 0, variance 1; the first is the model itself
PARTS = ("basis", "variance", "mixing")
REMEDY = "Name the layer whose output is the model's, layer=..., move what follows it out of the model, or use vote or sample"


class Wrapper(_Wrapper):
    """Epistemic risk from the Laplace approximation of the last layer (MacKay 1992; Daxberger et al. 2021).

    The last layer's weights get a Gaussian posterior around their trained values, of covariance (H + prior_precision I)^-1, where H is the
    generalised Gauss-Newton matrix of the training inputs: for values sum_n phi_n phi_n^T / noise^2, for classes its Kronecker form A (x) B of
    A = sum_n phi_n phi_n^T and B the mean of diag(p_n) - p_n p_n^T (Ritter et al. 2018). Predictions of values and their risk are then in
    closed form, y and sqrt(phi^T V phi); of classes they are means over draws of the logits from their Gaussian.

    Fit it after training, `wrapped.fit(loader)` with pairs (input, target); `workbench.fit` does so itself. Fit it again after training on.

    Args:
        layer: name of the last layer, an `nn.Linear` whose output is the model's; by default the one registered last.
        prior_precision: of the weights, the inverse of their prior variance; by default that of the largest marginal likelihood.
        noise: standard deviation of the data's noise, in the units of the targets; by default sculpt's where the model has it, else that of
            the residuals. For values only.
        n_samples: draws of the logits, for classes only.
        common: output, strategy, verbose, example, purity, chunk; see `workbench.Wrapper`.

    Example:
        >>> import torch
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> model = Wrapper()(torch.nn.Linear(1, 1)).eval().fit([(x, torch.sin(3 * x))])
        >>> y, risk = model(torch.tensor([[0.0], [9.0]]), return_risk=True)
        >>> bool(risk[1] > 3 * risk[0])
        True
    """

    def __init__(
        self,
        layer: str | None = None,
        prior_precision: float | None = None,
        noise: float | None = None,
        n_samples: int = 32,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        for name, value in (("prior_precision", prior_precision), ("noise", noise)):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a number above 0, not {value!r}")
        if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 2:
            raise ValueError(f"n_samples must be a whole number of at least 2, not {n_samples!r}")
        self._method: dict[str, Any] = {
            "layer": layer,
            "prior_precision": prior_precision,
            "noise": noise,
            "n_samples": n_samples,
        }

    def make(self) -> list[Method]:
        return [Laplace(**self._method)]


class Laplace(Method):
    """The method on one model; see `Wrapper`."""

    name, kind, order, needs_fit = "laplace", "epistemic", 25, True

    def __init__(self, layer: str | None, prior_precision: float | None, noise: float | None, n_samples: int) -> None:
        self.layer, self.prior_precision, self.noise, self.n_samples = layer, prior_precision, noise, n_samples
        self._path = ""
        self._slots: list[str] = []
        self._draws, self._size = False, 0

    def settings(self) -> dict[str, Any]:
        return {"layer": self._path, "n_samples": self.n_samples}

    # ---- what is registered beside the layer's weight: a posterior, and the points of its Gaussian that the branches stand at
    def attach(self, table: Table) -> None:
        if other := next((m.name for m in table.record.methods if m.name in ("snapshot", "swag")), None):
            raise ValueError(
                f"laplace and {other} both say which weights the model could have; use one of them (vote, sample, sculpt and neo compose)"
            )
        layers = [path.partition(".parametrizations")[0] for path in table.layers()]
        self._path = self.layer if self.layer is not None else layers[-1] if layers else ""
        found: Any = dict(table.root.named_modules()).get(self._path)
        if found is None:
            raise ValueError(f"layer: the model has no module {self._path!r}; it has {', '.join(layers)}")
        if not isinstance(found, nn.Linear) or not found.weight.is_floating_point():
            linear = [path for path, part in table.root.named_modules() if isinstance(part, nn.Linear)]
            raise ValueError(
                f"laplace knows the posterior of a real nn.Linear, and the last layer, {self._path or 'the model itself'!r}, is a "
                f"{type(found).__name__} of {str(getattr(getattr(found, 'weight', None), 'dtype', 'no weight')).removeprefix('torch.')}; "
                + (
                    f"name the layer whose output is the model's, such as layer={linear[-1]!r}"
                    if linear
                    else "use vote or sample"
                )
            )
        self._slots = [
            name for name, slot in table.record.slots.items() if any(self._inside(path) for path, _ in slot.owners)
        ]
        self._settle(table)

    def _inside(self, path: str) -> bool:
        return path == self._path or path.startswith(f"{self._path}.parametrizations")

    def extend(self, table: Table, slots: list[str]) -> None:
        self._settle(table)

    def _settle(self, table: Table) -> None:
        """Register what all methods on the model ask for: a posterior for each voter, and other heads left alone."""
        rules = table.record.rules
        layer: Any = table.module(self._path)
        outputs, inputs = layer.weight.shape[0], layer.weight.shape[1] + (layer.bias is not None)
        values = table.record.output == "values"
        voters = next((method.axis(ASKED) for method in table.record.methods if method.members), None)
        bases = outputs if values and any(_heads(table)) else 1
        mixed = 1 if values else outputs
        for part, shape in (
            ("basis", (bases, inputs, inputs)),
            ("variance", (inputs, outputs)),
            ("mixing", (mixed, mixed)),
        ):
            name = self._register(table, part, torch.zeros(shape if voters is None else (voters.size, *shape)))
            rules[name] = Shared(name) if voters is None else Stacked(voters.name, name)
        points = CENTRED if values else _draws(self.n_samples, outputs)
        self._draws, self._size = not values, len(points)
        own = Stacked(self.name, self._register(table, "points", points))
        none = Stacked(self.name, self._register(table, "none", torch.zeros_like(points)))
        rules[own.name] = _mirrored(rules.get(self._slots[0], Shared(self._slots[0])), own, none)

    def part(self, name: str) -> str:
        """The name of a registered tensor: "basis", "variance" and "mixing" of `Posterior`, and "points"."""
        return f"{self._path}.weight@laplace_{name}".lstrip(".")

    def _register(self, table: Table, part: str, value: Tensor) -> str:
        name = self.part(part)
        layer: Any = table.module(self._path)
        held = layer._buffers.get(name.rpartition(".")[2])
        if held is None or held.shape != value.shape:
            table.register(name, value.to(layer.weight.device, layer.weight.dtype, copy=True), buffer=True)
        return name

    # ---- branches
    def axis(self, call: Call) -> Axis | None:
        if call.loss or call.dealt or not (call.return_risk or (self._draws and not call.training)):
            return None
        return Axis(self.name, self._size, "same")

    def intervention(self, table: Table, call: Call) -> Intervention | None:
        return None if self.axis(call) is None else _Shift(self, table)

    def reduce(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        return spread(parts, dim)

    def forget(self, table: Table) -> None:
        table.get(self.part("variance")).zero_()

    def check_ready(self, wrapped: Any) -> None:
        if wrapped.training or torch.compiler.is_compiling():
            return
        if not bool(table_of(wrapped).get(self.part("variance")).any()):
            raise NotFittedError(
                "laplace has seen no training data yet: train the model, then call wrapped.fit(loader) with pairs (input, target)"
            )

    # ---- fitting
    def fit(self, wrapped: Any, inputs: Any) -> None:
        """Learn the posterior of the trained weights from the training data, pairs (input, target)."""
        from tqdm.auto import tqdm

        from ..wrapped import batches_of

        table = table_of(wrapped)
        voters = next((method.axis(ASKED) for method in table.record.methods if method.members), None)
        places: list[dict[str, int]] = [{}] if voters is None else [{voters.name: i} for i in range(voters.size)]
        looks = [_Look(self, wrapped, place) for place in places]
        like = next(wrapped.parameters())
        with torch.no_grad(), evaluating(wrapped):
            for batch in tqdm(batches_of(inputs), desc="curvature", delay=2, leave=False):
                batch = tree_map(lambda leaf: leaf.to(like.device) if isinstance(leaf, Tensor) else leaf, batch)
                for look in looks:
                    look(*batch)
            if not looks[0].curvature.rows:
                raise ValueError(
                    "fit got no rows; give pairs (input, target) of the training data, in a list or a loader"
                )
            found = [look.posterior() for look in looks]
            for part in PARTS:
                values = [value for posterior in found if (value := getattr(posterior, part)) is not None]
                if values:
                    table.get(self.part(part)).copy_(values[0] if voters is None else torch.stack(values))


def _heads(table: Table) -> list[Axis]:
    """The axes along which other heads stand beside the model's own."""
    axes = [method.axis(ASKED) for method in table.record.methods]
    return [axis for axis in axes if axis is not None and axis.own_first]


def _mirrored(rule: Rule, own: Rule, none: Rule) -> Rule:
    """What the layer's own branches get, and those that have another layer in its place do not."""
    return Split(rule.axis, (own, *[none] * (len(rule.options) - 1))) if isinstance(rule, Split) else own


def _draws(n: int, outputs: int) -> Tensor:
    """Standard normal draws [n, outputs] in opposite pairs, scaled so that mean 0 and variance 1 hold exactly."""
    half = torch.randn(n // 2, outputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = torch.cat([half, -half, half.new_zeros(n % 2, outputs)])
    return points / points.square().mean(0).sqrt()


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


def _augmented(features: Tensor, bias: bool) -> Tensor:
    return torch.cat([features, torch.ones_like(features[..., :1])], -1) if bias else features


class _AtLayer(Sites):
    """Calls `handle` with the features, weight, bias and outputs of a linear layer, and lets what it gives be the outputs."""

    def __init__(
        self,
        parameters: Sequence[tuple[Tensor, str]],
        state: Sequence[Tensor],
        inputs: list[Tensor],
        names: frozenset[str],
        handle: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor],
    ) -> None:
        super().__init__(parameters, state, inputs, self._met)
        self.names, self.handle = names, handle
        self.pending: tuple[Tensor, Tensor, Tensor | None] | None = None

    def _met(self, names: frozenset[str], leaves: list[Any], live: list[int], raw: list[int]) -> list[Any]:
        data = [*live, *raw]
        given = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in data]
        if names <= self.names and len(data) == 1 and len(given) <= 2 and given[0].dim() == 2:
            self.pending = leaves[data[0]], given[0], given[1] if len(given) == 2 else None
        return leaves

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = super().__torch_function__(function, kinds, args, kwargs)
        pending, self.pending = self.pending, None
        return out if pending is None else self.handle(*pending, out)


class _AtLast(Intervention):
    """What happens at the last layer of a branch."""

    def __init__(self, method: Laplace, table: Table) -> None:
        owners = [slot.owners for name, slot in table.record.slots.items() if name in method._slots]
        self.names = frozenset(f"{path}.{attribute}".lstrip(".") for held in owners for path, attribute in held)
        self.method, self.taps = method, {}

    def at_last(
        self,
        parameters: Sequence[tuple[Tensor, str]],
        state: Sequence[Tensor],
        inputs: list[Tensor],
        handle: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor],
    ) -> _AtLayer:
        return _AtLayer(parameters, state, inputs, self.names, handle)


class _Shift(_AtLast):
    """Moves the outputs by as many standard deviations as the branch's point says."""

    def tensors(self, installed: dict[str, Tensor], index: Index) -> dict[str, Tensor]:
        self._held = [installed[self.method.part(part)] for part in (*PARTS, "points")]
        return installed

    def active(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor]
    ) -> AbstractContextManager[Any] | None:
        (basis, variance, mixing, point), self._held = self._held, []  # nothing of a branch may outlive it

        def shifted(features: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
            phi = _augmented(features, bias is not None).to(basis.dtype)
            squares = torch.einsum("...d,kde->...ke", phi, basis).square()
            variances = squares[..., 0, :] @ variance if len(basis) == 1 else (squares * variance.mT).sum(-1)
            moved = sqrt(variances) * point
            return out + (moved @ mixing.mT if self.method._draws else moved).to(out.dtype)

        return self.at_last(parameters, state, inputs, shifted)


class _Probe(_AtLast):
    """Keeps what the last layer was given and gave, and adds `step` to the latter."""

    step: Tensor | float = 0.0

    def active(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor]
    ) -> AbstractContextManager[Any] | None:
        self.taps, self.calls = {}, 0
        return self.at_last(parameters, state, inputs, self._kept)

    def _kept(self, features: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if is_batched(out):  # a vmap of the model's own, whose rows cannot be told apart here
            return out
        self.calls += 1
        weights = weight if weight.shape == (out.shape[-1], features.shape[-1]) else weight.mT
        self.taps = {
            "features": _augmented(features, bias is not None),
            "weights": weights if bias is None else torch.cat([weights, bias[:, None]], 1),
            "outputs": out,
        }
        return out + self.step


class _Look:
    """Looks at one voter's last layer, batch after batch."""

    def __init__(self, method: Laplace, wrapped: Any, place: dict[str, int]) -> None:
        self.method, self.wrapped, self.place = method, wrapped, place
        self.record, self.table, self.scaling = wrapped._workbench, table_of(wrapped), extra(wrapped, "scaling")
        self.values = self.record.output == "values"
        self.curvature = Curvature()
        self.weights: Any = None
        self.probe = _Probe(method, self.table)
        self.name = method._path or "the model itself"

    def _run(self, args: tuple, kwargs: dict[str, Any], axes: Sequence[Axis] = ()) -> Any:
        """The model's own branch under the probe; or all branches along some axes, as they are."""
        plan = Plan(
            tuple(axes),
            self.record.rules,
            Bank(self.table.get),
            () if axes else (self.probe,),
            keep_state=False,
            fixed=self.place,
        )
        engine = engine_of(self.wrapped)
        if engine.writes_inputs is not False:
            args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        return engine.run(plan, args, kwargs)

    def __call__(self, args: tuple, kwargs: dict[str, Any], target: Any) -> None:
        if self.scaling is not None:
            args, target = self.scaling.inputs(args), self.scaling.targets(target)
        leaves, taps = self._seen(args, kwargs)
        phi, z = _rows(taps["features"]), taps["outputs"]
        if self.weights is None:
            self.at, self.slope = self._answer(args, kwargs, leaves, z)
            self.weights = taps["weights"]
        leaf = leaves[self.at]
        if not self.values:
            probs = leaf.softmax(-1) if self.record.output == "logits" else leaf
            self.curvature.add_classes(phi, _rows(probs), self.slope)
            return
        precision, residuals, heads = None, None, _heads(self.table)
        if heads:
            noise = reduced(self.wrapped, self._run(args, kwargs, heads)[0], True)[1]["aleatoric"]
            precision = _rows(self.slope / flatten(noise)[0][self.at].double().reshape(z.shape)).square()
        elif self.method.noise is None:
            residuals = _rows((self._targets(target, z) - leaf.reshape(z.shape)).double() / self.slope)
        self.curvature.add_values(phi, precision, residuals)

    def _targets(self, target: Any, z: Tensor) -> Tensor:
        if isinstance(target, Tensor) and target.numel() == z.numel():
            return target.reshape(z.shape)
        found = list(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(
            f"laplace learns the noise of the data from residuals, and the targets are {found} for predictions {list(z.shape)}: give pairs "
            "(input, target) to fit, or laplace.Wrapper(noise=...), or compose it with sculpt"
        )

    def _seen(self, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor]]:
        result = self._run(args, kwargs)[1][0]
        if self.probe.calls != 1:
            raise ValueError(
                f"laplace wants a last layer that runs once in a call, and {self.name!r} ran {self.probe.calls} times as a linear layer. "
                f"{REMEDY}"
            )
        return flatten(result.output)[0], result.taps

    def _answer(self, args: tuple, kwargs: dict[str, Any], leaves: list[Any], z: Tensor) -> tuple[int, Tensor]:
        """Which part of the output is slope * z + constant, elementwise, and the slope of each column; no other part may depend on z."""
        size = z.detach().double().square().mean().sqrt().clamp_min(1e-3).to(z.dtype)
        signs = torch.randint(0, 2, z.shape, generator=torch.Generator().manual_seed(0)).to(z) * 2 - 1
        moved = []
        for self.probe.step in (size, size * signs):
            moved.append(self._seen(args, kwargs)[0])
        self.probe.step = 0.0
        close = functools.partial(torch.allclose, rtol=0, atol=4 * torch.finfo(z.dtype).eps ** 0.5)
        found: list[tuple[int, Tensor]] = []
        for i, (leaf, *others) in enumerate(zip(leaves, *moved, strict=True)):
            if not is_float(leaf) or all(torch.equal(leaf, other) for other in others):
                continue
            probs = leaf if self.record.output == "probs" else leaf.softmax(-1) if leaf.dim() else leaf
            if not self.values and leaf.shape == z.shape and close(probs, z.softmax(-1)):
                found.append((i, torch.ones(z.shape[-1], dtype=torch.float64, device=z.device)))
            elif leaf.numel() == z.numel() and not leaf.is_complex() and self.record.output != "probs":
                slopes, signed = (((other - leaf) / size).double().reshape(z.shape) for other in others)
                slope, most = _rows(slopes).mean(0), slopes.abs().max()
                if (
                    close(slopes / most, (slope / most).expand_as(slopes))
                    and close(signed / most, slopes * signs / most)
                    and bool(slope.abs().min() > 0.01 * most)
                ):
                    found.append((i, slope))
            if not found or found[-1][0] != i:
                raise ValueError(
                    f"laplace knows the last layer only where the output is that of {self.name!r}, {list(z.shape)}, but for a shift and a "
                    f"scale; part {i} of the output, {list(leaf.shape)}, depends on it in another way. {REMEDY}"
                )
        if not found:
            raise ValueError(
                f"laplace: the output does not depend on {self.name!r}, taken for the last layer. {REMEDY}"
            )
        return found[0]

    def posterior(self) -> Posterior:
        noise = None
        if self.values and self.method.noise is not None and not _heads(self.table):
            scale = (
                self.slope if self.scaling is None or self.scaling.y_mean is None else self.slope * self.scaling.y_scale
            )
            noise = self.method.noise / scale.abs()
        return self.curvature.posterior(self.weights, self.method.prior_precision, noise)


__all__ = ["Laplace", "Wrapper"]
