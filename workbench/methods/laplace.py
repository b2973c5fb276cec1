"""Laplace: epistemic risk from a Gaussian posterior of the last layer's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..console import progress_bar
from ..core.additions import extra
from ..core.batches.call_arguments import answering
from ..core.method import Call, Method, evaluating
from ..core.outputs.class_scores import Classes, cross_entropy
from ..core.outputs.meanings import IGNORED
from ..core.outputs.options import has_classes
from ..core.outputs.resolution import resolve, targets_of
from ..core.ownership import table_of
from ..core.refusals import not_linear
from ..core.settings import setting
from ..core.wrapper import Wrapper as _Wrapper
from ..engine.plan import Axis, Intervention, Shared, Stacked
from ..engine.tree import flatten, map_tensors, names, tensors
from ..errors import NotFittedError
from .design import Design, TakesDesign
from .last_layer import RISK_CALL, CurvatureFit, head_axes, refuse_class_numbers
from .mean_field import classifier_method, mean_field
from .posterior_points import CENTRED, PARTS, Shift, normal_points, split_like
from .vote import LAPLACE

if TYPE_CHECKING:
    from ..core.ownership import Table

# above, the workspace of LAPACK's syevd, 2 n^2 + 6 n + 1 numbers, is larger than a 32-bit integer
MAX_CLASSES = 32_766
# candidate multiples of the prior precision, chosen among by held-out pairs
FACTORS = 10.0 ** torch.arange(-1, 4.5, 0.5)


class Wrapper(_Wrapper):
    """Epistemic risk from the Laplace approximation of the last layer (MacKay 1992; Daxberger et al. 2021).

    The last layer's weights get a Gaussian posterior around their trained values, with covariance (H + prior_precision I)^-1, where H is the
    generalized Gauss-Newton matrix of the training inputs: for values sum_n phi_n phi_n^T / noise^2, for classes its Kronecker form A (x) B of
    A = sum_n phi_n phi_n^T and B the mean of diag(p_n) - p_n p_n^T (Ritter et al. 2018). For values, prediction and risk are then in closed
    form, y and sqrt(phi^T V phi); for classes, they are averages over draws of the logits from their Gaussian.

    Fit it after training, `wrapped.fit(loader)` with pairs (input, target); `workbench.fit` does so itself. Fit it again after further training.
    A network that fits its training classes nearly perfectly constrains the weights so little that the marginal likelihood gives too broad a
    posterior: `laplace.tune(wrapped, held)` chooses the prior by held-out pairs, as `workbench.fit` does with its validation rows.

    Example:
        >>> import torch
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> model = Wrapper()(torch.nn.Linear(1, 1)).eval().fit([(x, torch.sin(3 * x))])
        >>> y, risk = model(torch.tensor([[0.0], [9.0]]), return_risk=True)
        >>> bool(risk[1] > 3 * risk[0])
        True
    """

    layer: str | None = setting(
        default=None,
        help="name of the last layer, an `nn.Linear` whose output is the model's; by default the one registered last.",
    )
    prior_precision: float | None = setting(
        default=None,
        above=0,
        wording="must be a number above 0",
        help="inverse of the prior variance of the weights; by default the value that maximizes the marginal likelihood.",
    )
    noise: float | None = setting(
        default=None,
        above=0,
        wording="must be a number above 0",
        help="standard deviation of the data's noise, in the units of the targets; by default sculpt's if the model has it, otherwise that of "
        "the residuals. For values only.",
    )
    n_samples: int = setting(default=32, least=2, saved=True, help="number of draws of the logits, for classes only.")
    evidence: Literal["design"] | None = setting(
        default=None,
        help='None: epistemic risk is that of the posterior; "design", for class scores [rows, classes] and for values with sculpt: it measures '
        "how few training rows support an input, as in `vote.Wrapper`; predictions remain those of the posterior. See docs/how_to/epistemic.md.",
    )

    def make(self) -> list[Method]:
        return [Laplace(self)]


class Laplace(TakesDesign):
    """Method behind `Wrapper`, for one model."""

    name, kind, order, needs_fit = "laplace", "epistemic", 25, True
    statistics = (
        *(f"laplace_{part}" for part in (*PARTS, "prior", "points", "none")),
        *TakesDesign.statistics,
    )
    detections = (
        "the posterior of a last layer is known for values and class scores, not for boxes selected by their scores; use vote.Wrapper or "
        "sample.Wrapper"
    )

    def __init__(self, wrapper: Wrapper) -> None:
        super().__init__(wrapper)
        self._path = ""
        self._slots: list[str] = []
        self._draws, self._size = False, 0
        self.design = None if self.wrapper.evidence is None else Design(pretrained=False)
        self.refines = self.design is not None

    def settings(self) -> dict[str, Any]:
        # states saved before this setting existed lack it, so it is listed only where it is used
        optional = {} if self.wrapper.evidence is None else {"evidence": self.wrapper.evidence}
        return {"layer": self._path, **super().settings(), **optional}

    # ---- tensors registered next to the layer's weight: a posterior, and the points of its Gaussian at which the branches predict
    def attach(self, table: Table) -> None:
        if other := next((m.name for m in table.record.methods if m.name in ("snapshot", "swag")), None):
            raise ValueError(
                f"laplace and {other} both model the distribution of the weights; use one of them (vote, sample, sculpt and neo compose)"
            )
        if extra(table.root, "prior") is not None:
            raise ValueError(LAPLACE)
        orders = table.orders()
        layers = [
            path.partition(".parametrizations")[0] for path in (orders[0] if len(orders) == 1 else table.layers())
        ]
        self._path = self.wrapper.layer if self.wrapper.layer is not None else layers[-1] if layers else ""
        modules = dict(table.root.named_modules())
        layer: Any = modules.get(self._path)
        if layer is None:
            raise ValueError(f"layer: the model has no module {self._path!r}; it has {', '.join(layers)}")
        if not isinstance(layer, nn.Linear) or not layer.weight.is_floating_point():
            linear = [path for path, part in modules.items() if isinstance(part, nn.Linear) and part is not layer]
            remedy = (
                f"if the model's output is that of another layer, name it, such as layer={linear[-1]!r}; otherwise use vote or sample"
                if linear
                else "use vote or sample"
            )
            raise ValueError(
                f"laplace needs a last layer that is an nn.Linear with real floating-point weights, but {self._path or 'the model itself'!r}, "
                f"taken as the last layer, is {not_linear(layer, remedy)}"
            )
        self._slots = [
            name for name, slot in table.record.slots.items() if any(self._inside(path) for path, _ in slot.owners)
        ]
        if self.design is not None:
            self.design.check(table)
        self._register_posterior(table)
        if self.design is not None:
            self.design.attach(table)

    def _inside(self, path: str) -> bool:
        return path == self._path or path.startswith(f"{self._path}.parametrizations")

    def layer_names(self, table: Table) -> frozenset[str]:
        """Return all names of the layer's parameters, tied names included."""
        return frozenset(
            f"{path}.{attribute}".lstrip(".")
            for name in self._slots
            for path, attribute in table.record.slots[name].owners
        )

    def extend(self, table: Table, slots: list[str]) -> None:
        self._register_posterior(table)

    def _register_posterior(self, table: Table) -> None:
        """Register a posterior for each voter, and the points of the branches; heads of other methods are left unchanged."""
        rules = table.record.rules
        layer: Any = table.module(self._path)
        outputs, inputs = layer.weight.shape[0], layer.weight.shape[1] + (layer.bias is not None)
        values = not has_classes(table.record.output)
        voters = _voters(table)
        bases = outputs if values and head_axes(table) else 1
        mixed = 1 if values else outputs
        if mixed > MAX_CLASSES and layer.weight.device.type == "cpu":
            raise ValueError(
                f"laplace computes the eigenvectors of a matrix [classes, classes], on a CPU of at most {MAX_CLASSES:,} classes, but "
                f"{self._path or 'the model itself'!r} has {outputs:,}, whose matrix takes up {8 * outputs**2 / 2**30:.0f} GiB. Use vote, "
                "of the last layer alone with share=1, or sample; or move the model to a GPU with the memory of several such matrices first"
            )
        for part, shape in (
            ("basis", (bases, inputs, inputs)),
            ("variance", (inputs, outputs)),
            ("mixing", (mixed, mixed)),
            ("prior", ()),
        ):
            name = self._register(table, part, torch.zeros(shape if voters is None else (voters.size, *shape)))
            if part in PARTS:
                rules[name] = Shared(name) if voters is None else Stacked(voters.name, name)
        points = CENTRED if values else normal_points(self.wrapper.n_samples, outputs)
        self._draws, self._size = not values, len(points)
        stacked = Stacked(self.name, self._register(table, "points", points))
        zeros = Stacked(self.name, self._register(table, "none", torch.zeros_like(points)))
        rules[stacked.name] = split_like(rules.get(self._slots[0], Shared(self._slots[0])), stacked, zeros)

    def part(self, name: str) -> str:
        """Return the name of a registered tensor: "basis", "variance" and "mixing" of `Posterior`, and "points"."""
        return f"{self._path}.weight@laplace_{name}".lstrip(".")

    def _register(self, table: Table, part: str, value: Tensor) -> str:
        name = self.part(part)
        layer: Any = table.module(self._path)
        present = layer._buffers.get(name.rpartition(".")[2])
        if present is None or present.shape != value.shape:
            dtype = torch.promote_types(torch.float32, layer.weight.dtype)
            table.register(name, value.to(layer.weight.device, dtype, copy=True), buffer=True)
        return name

    def repeats(self, training: bool) -> bool:
        return training  # predictions depend on whether a posterior was fitted

    # ---- branches
    def axis(self, call: Call) -> Axis | None:
        if call.loss or call.dealt or not (call.return_risk or (self._draws and not call.training)):
            return None
        return Axis(self.name, self._size, "same")

    def intervention(self, table: Table, call: Call) -> Intervention | None:
        if self.axis(call) is None:
            return None
        return Shift(self.layer_names(table), [self.part(part) for part in (*PARTS, "points")], self._draws)

    def forget(self, table: Table) -> None:
        table.get(self.part("variance")).zero_()
        super().forget(table)

    def check_ready(self, wrapped: Any) -> None:
        if wrapped.training or torch.compiler.is_compiling():
            return
        if not table_of(wrapped).holds(self.part("variance")):
            raise NotFittedError(
                "laplace has seen no training data yet: train the model, then call wrapped.fit(loader) with pairs (input, target)"
            )

    # ---- fitting
    @torch.no_grad()
    def tune(self, wrapped: Any, held_out: Any, strict: bool = False) -> None:
        """Choose the prior precision by held-out classes, see `laplace.tune`; values keep the one that maximizes the marginal likelihood.

        With `strict`, held-out rows that can't decide are refused; otherwise the prior precision is left as it is.
        """
        held_out = list(held_out) if isinstance(held_out, Iterator) else held_out
        problem = self._tune_prior(wrapped, held_out)
        if problem and strict:
            raise ValueError(f"laplace.tune: {problem}; the prior precision is left as it was")
        super().tune(wrapped, held_out)

    def _tune_prior(self, wrapped: Any, held_out: Any) -> str:
        """Choose the prior precision, and return why it was left as it is, or ""."""
        from ..core.batches.labelled import batches_of

        if not self._draws or self.wrapper.prior_precision is not None:
            return ""
        table = table_of(wrapped)
        prior, variance = (table.get(self.part(part)) for part in ("prior", "variance"))
        old_prior = prior.double()
        curvature = variance.double().reciprocal() - old_prior[..., None, None]
        batches = list(batches_of(held_out, wrapped))
        losses, before = torch.zeros_like(FACTORS), variance.clone()
        try:
            for i, factor in enumerate(FACTORS.tolist()):
                variance.copy_(1 / (curvature + factor * old_prior[..., None, None]))
                losses[i] = sum(_negative_log_likelihood(wrapped, *batch) for batch in batches)
        finally:  # also on Ctrl-C
            variance.copy_(before)
        if losses.isnan().any():
            return "the likelihood of the held-out classes is NaN; look for NaN in the inputs and in the weights"
        if losses.min() == losses.max():
            return "the held-out rows are equally likely under every prior precision, as without any row that has a class; give others"
        best = float(FACTORS[losses.argmin()])
        variance.copy_(1 / (curvature + best * old_prior[..., None, None]))
        prior.copy_(best * old_prior)
        return ""

    def places(self, table: Table) -> list[dict[str, int]]:
        """Return the position of each voter, axis -> position; a single empty one for a model without voters."""
        voters = _voters(table)
        return [{}] if voters is None else [{voters.name: i} for i in range(voters.size)]

    def curvature_fit(self, wrapped: Any, place: dict[str, int]) -> CurvatureFit:
        """Return an empty accumulator for the voter at a position of `places`."""
        return CurvatureFit(wrapped, place, self._path, self.layer_names(table_of(wrapped)), self.wrapper.noise)

    def check(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        curvature_fit = self.curvature_fit(wrapped, self.places(table_of(wrapped))[0])
        with torch.no_grad(), evaluating(wrapped):
            curvature_fit.check(args, kwargs)
        self._check_meaning(curvature_fit)
        super().check(wrapped, args, kwargs)

    def check_targets(self, wrapped: Any, prediction: Any, y: Any) -> None:
        if self.wrapper.noise is None and not head_axes(table_of(wrapped)):
            refuse_class_numbers(wrapped, y, tensors(prediction))

    def _check_meaning(self, curvature_fit: CurvatureFit) -> None:
        if self._draws and not isinstance(curvature_fit.meaning, Classes):
            raise ValueError(
                f"laplace: the outputs of {self._path or 'the model itself'!r} are values, but other outputs are class scores; name the "
                "layer of the scores, layer=..., or only the values in output={...}"
            )

    def fit(self, wrapped: Any, inputs: Any) -> None:
        """Learn the posterior of the trained weights from the training data, pairs (input, target)."""
        from ..core.batches.labelled import batches_of

        table = table_of(wrapped)
        places = self.places(table)
        fits = [self.curvature_fit(wrapped, place) for place in places]
        like = next(wrapped.parameters())
        with torch.no_grad(), evaluating(wrapped):
            batches = progress_bar(batches_of(inputs, wrapped), desc="curvature", delay=2, leave=False)
            for number, batch in enumerate(batches):
                batch = map_tensors(lambda t: t.to(like.device), batch)
                for curvature_fit in fits:
                    curvature_fit(*batch)
                if not all(curvature_fit.curvature.finite for curvature_fit in fits):
                    raise ValueError(
                        f"laplace: features or residuals are NaN or infinite in batch {number}; look for NaN in its inputs and targets, and "
                        "drop such rows or fill the gaps"
                    )
            if not fits[0].curvature.rows:
                raise ValueError(
                    "fit got no rows; give pairs (input, target) of the training data, in a list or a loader"
                )
            self._check_meaning(fits[0])
            posteriors = [curvature_fit.posterior(self.wrapper.prior_precision) for curvature_fit in fits]
            for part in (*PARTS, "prior"):
                values = [value for posterior in posteriors if (value := getattr(posterior, part)) is not None]
                if values:
                    table.get(self.part(part)).copy_(torch.stack(values) if places[0] else values[0])
        super().fit(wrapped, inputs)


def _voters(table: Table) -> Axis | None:
    return next((method.axis(RISK_CALL) for method in table.record.methods if method.members), None)


def _negative_log_likelihood(wrapped: Any, args: tuple, kwargs: dict[str, Any], target: Any) -> float:
    """Return the sum of -log p of the true classes in a batch."""
    device = next(wrapped.parameters()).device
    args, kwargs, target = map_tensors(lambda t: t.to(device), (args, kwargs, target))
    y = answering(wrapped)(*args, **kwargs)
    leaves, paths = flatten(y)[0], names(y)
    meanings: Any = resolve(wrapped._workbench.output, lambda: paths, leaves, 0)
    losses = []
    for scores, meaning, labels in zip(leaves, meanings, targets_of(target, paths, meanings), strict=True):
        if not isinstance(meaning, Classes) or labels is None:
            continue
        try:
            labels = meaning.labels(labels, scores)
        except ValueError as error:
            raise ValueError(
                f"laplace.tune takes pairs (input, class number), with a number for each row of scores {list(scores.shape)}; it got "
                f"{list(labels.shape)}"
            ) from error
        known = labels[labels != IGNORED]
        classes = meaning.log_scores(scores).shape[-1]
        if not labels.is_floating_point() and known.numel() and (known.min() < 0 or known.max() >= classes):
            raise ValueError(
                f"laplace.tune: class numbers go from {int(known.min())} to {int(known.max())}, but the model gives {classes} scores"
            )
        losses.append(cross_entropy(meaning.log_scores(scores).log_softmax(-1), labels, "sum").item())
    if not losses:
        raise ValueError("laplace.tune takes pairs (input, class number), and there is no class number")
    return sum(losses)


def tune(wrapped: Any, held: Any) -> Any:
    """Choose the prior precision with the best likelihood of held-out classes, among steps between a tenth and 10,000 times the present one.

    Args:
        wrapped: model wrapped by `laplace.Wrapper` with output="logits" or "probs", fitted and in evaluation mode.
        held: batches of pairs (input, class numbers) that it was not trained on.

    Returns:
        The same wrapped model.

    Raises:
        TypeError: if the model is not wrapped by laplace.
        ValueError: if its output is not class scores, the targets are not class numbers, no row has a class, or it is in training mode; the
            prior precision is then as before.
        NotFittedError: if it was not fitted.

    Example:
        >>> import torch
        >>> x, y = torch.linspace(-1, 1, 50)[:, None], torch.arange(50) // 25
        >>> model = tune(Wrapper(output="logits")(torch.nn.Linear(1, 2)).eval().fit(x), [(x, y)])
    """
    method = classifier_method(wrapped, "tune")
    if wrapped.training:
        raise ValueError("laplace.tune needs predictions in evaluation mode: call wrapped.eval() first")
    method.tune(wrapped, held, strict=True)
    return wrapped


__all__ = ["Laplace", "Wrapper", "mean_field", "tune"]
