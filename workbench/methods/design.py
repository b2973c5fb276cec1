"""Evidence by design: epistemic risk from how many training rows support an input, known from inputs alone and unaffected by label noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..console import progress_bar
from ..core.additions import MARK, extra
from ..core.calls.predict import plan_of, run
from ..core.calls.risks import reduced
from ..core.calls.running_moments import entropy
from ..core.layer_order import watched
from ..core.method import Method, evaluating
from ..core.outputs.class_scores import Classes
from ..core.outputs.meanings import Values
from ..core.outputs.options import form_of
from ..core.outputs.resolution import resolve
from ..core.ownership import engine_of, table_of
from ..core.prior import Whole
from ..core.refusals import not_linear
from ..engine.effects.private_random import own_random
from ..engine.plan import Bank, Plan, Shared, Stacked
from ..engine.tree import flatten, map_tensors, names
from ..errors import NotFittedError
from .densities.moments import double, full_precision
from .evidence import EPS, ignorance, level_of, noise, whitening_of
from .initialization import Draws
from .last_layer import RISK_CALL, Probe, has_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..core.ownership import Table
    from ..engine.plan import Rule

N_COPIES = 3  # as good as five; a single copy is worse if the layer before the last is narrow
NUMBERS = ("rows", "level", "entropy")
NAMES = ("whitening", *NUMBERS)  # that keep the precision of float32; the copies have that of the model
REMEDY = "leave evidence out"


class Design:
    """The part of a method that implements `evidence="design"`: its registered tensors, its fit, and the risks it computes.

    Untrained copies of the network measure how similar inputs are. For one copy, let phi be the input of the last layer, divided by its root
    mean square norm over the training rows, with a 1 appended, and A the sum of phi phi^T over the training rows. The leverage of an input,

        h = mean over copies of phi^T (A + tr(A) / (d n) I)^-1 phi,

    says that S = 1 / h training rows support it. The epistemic risk is the mutual information between a label and Dirichlet(S / K, ..., S / K)
    class probabilities,

        E(h) = log K - digamma(S + 1) + digamma(S / K + 1),

    about (K - 1) / (2 S): it lies in [0, log K], decreases with every added row, and uses no label. With validation rows, whose labels are not
    used either, the voters determine where the risk is high, and the design its level: E = (E(h) + E(k v)) / 2 with the mutual information v
    of the voters, and k such that both terms have the same mean over these rows.

    The aleatoric risk A is the entropy that would remain of the averaged probabilities, whose entropy is H, if nothing were left to learn. With
    e = E / log K the fraction of the knowable that is unknown, the prediction is assumed to lie that far from the noise towards the class
    frequencies,

        log H = (1 - e) log A + e log H_0,    A = H_0 (H / H_0)^(1 / (1 - e)), at most H,

    where H_0 is the entropy of the mean prediction over the training rows: a model that knows nothing predicts the frequencies, and there
    nothing is subtracted, so that pure noise stays pure noise however few rows there are. Total risk is A + E.

    For values with noise of standard deviation s, from sculpt, epistemic risk is s sqrt(h), the posterior standard deviation of Bayesian linear
    regression on phi. With validation rows it is sqrt((s^2 h + k v^2) / 2) with the voters' standard deviation v, and k such that h and
    k v^2 / s^2 have the same mean over them.

    Args:
        pretrained: whether to use one copy with the weights that the model has when it is wrapped (of a pretrained model), instead of
            untrained copies.
    """

    def __init__(self, pretrained: bool) -> None:
        self.pretrained = pretrained
        self.copies = 1 if pretrained else N_COPIES
        self._path = ""
        self._slots: list[str] = []

    # ---- registered tensors: those of the copies next to the model's, the others next to the last layer's weight
    def check(self, table: Table) -> None:
        """Raise ValueError if the model is unsuitable, before anything is registered."""
        form = form_of(table.record.output)
        if form not in ("logits", "probs", "values"):
            raise ValueError(
                f'evidence="design" is for scores of mutually exclusive classes and for values, but the output is {_describe(form)}: wrap '
                f'the model with output="logits" if it returns scores [rows, classes], or {REMEDY}'
            )
        if table.record.state:
            raise ValueError(f'evidence="design" does not support a state passed from call to call (state=): {REMEDY}')
        layers = table.orders()[0]
        self._path = layers[-1].partition(".parametrizations")[0] if layers else ""
        layer = table.module(self._path)
        if not isinstance(layer, nn.Linear) or not layer.weight.is_floating_point():
            remedy = "" if table.record.execution else "give example=... if another layer runs last, or "
            raise ValueError(
                f'evidence="design" needs a last layer that is an nn.Linear with real floating-point weights, but {self._path or "the model"!r} '
                f"is taken as the last layer and is {not_linear(layer, remedy + REMEDY)}"
            )
        if self.part("rows").rpartition(".")[2] in layer._buffers:
            raise ValueError('evidence="design" is given to both vote and laplace: give it to one of them')

    def attach(self, table: Table) -> None:
        """Register the copies; untrained ones are drawn with a fixed seed."""
        layer: Any = table.module(self._path)
        width = layer.weight.shape[1] + (layer.bias is not None)
        device, dtype = layer.weight.device, torch.promote_types(torch.float32, layer.weight.dtype)
        drawn: dict[str, Tensor] = {}
        with torch.no_grad(), own_random(0, device):
            draws = Draws(table, self.copies, fresh=not self.pretrained)
            for name, slot in table.record.slots.items():
                value = table.value(name).detach()
                if slot.buffer:
                    start = value if self.pretrained else _initial_value(slot.owners[0][1], value)
                    drawn[name] = draws.stacked(name, start, 1.0)
                elif table.value(name).requires_grad:
                    drawn[name] = draws.stacked(name, value, 1.0)
        self._slots = list(drawn)
        for name, value in drawn.items():
            self._register_copy(table, name, value)
        zeros = torch.zeros(self.copies, width, width, device=device, dtype=dtype)
        table.register(self.part("whitening"), zeros, buffer=True)
        for part in NUMBERS:
            table.register(self.part(part), zeros[0, 0, 0].clone(), buffer=True)

    def _register_copy(self, table: Table, slot: str, value: Tensor) -> None:
        table.register(self._copy(slot), value, buffer=True)
        table.record.rules.setdefault(slot, Shared(slot))  # a branch replaces only tensors that have a rule

    def _copy(self, slot: str) -> str:
        return f"{slot}{MARK}design_copies"

    def part(self, name: str) -> str:
        """Return the name of a registered tensor: "whitening" [copies, d, d], or the numbers "rows", "level" and "entropy"."""
        return f"{self._path}.weight{MARK}design_{name}".lstrip(".")

    def adapt(self, table: Table, names: set[str]) -> None:
        """Prepare for loading a state with these names: copy the slots that it has copies of, whatever is frozen now."""
        stored = [slot for slot in table.record.slots if self._copy(slot) in names]
        for slot in set(stored).difference(self._slots):
            self._register_copy(table, slot, torch.stack([table.value(slot).detach()] * self.copies))
        for slot in set(self._slots).difference(stored) if stored else ():
            table.drop(self._copy(slot))
        self._slots = stored or self._slots
        # older states have no entropy; where it is not registered, it counts as unknown, 0
        entropy_name = self.part("entropy")
        if entropy_name in names:
            self._register_entropy(table)
        elif stored and self._has_entropy(table):
            table.drop(entropy_name)

    def _has_entropy(self, table: Table) -> bool:
        return self.part("entropy").rpartition(".")[2] in table.module(self._path)._buffers

    def _register_entropy(self, table: Table) -> None:
        if not self._has_entropy(table):
            table.register(self.part("entropy"), torch.zeros_like(table.get(self.part("level"))), buffer=True)

    def forget(self, table: Table) -> None:
        """Discard the fit, as the weights have changed."""
        for part in ("rows", "level"):
            table.get(self.part(part)).zero_()

    def check_ready(self, wrapped: Any) -> None:
        """Raise NotFittedError if not fitted, in evaluation mode only."""
        if (
            not wrapped.training
            and not torch.compiler.is_compiling()
            and not table_of(wrapped).holds(self.part("rows"))
        ):
            raise NotFittedError(
                'evidence="design" has seen no training data yet: train by workbench.fit, or call wrapped.fit(loader) with the training inputs '
                "after training"
            )

    # ---- features of the copies
    def _features(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the input of the last layer of each copy, with a 1 appended if the layer has a bias, float64 [rows, ..., d]."""
        table, engine = table_of(wrapped), engine_of(wrapped)
        rules: dict[str, Rule] = {name: Shared(name) for name in table.record.slots if name not in table.views}
        rules |= {name: Stacked("design", self._copy(name)) for name in self._slots}
        layer_names = frozenset(
            f"{path}.{attribute}".lstrip(".")
            for slot in table.record.slots.values()
            for path, attribute in slot.owners
            if path == self._path or path.startswith(f"{self._path}.parametrizations")
        )
        features = []
        for i in range(self.copies):
            probe = Probe(layer_names)
            plan = Plan((), rules, Bank(table.get), (Whole(), probe), keep_state=False, fixed={"design": i})
            with evaluating(wrapped):
                engine.run(plan, *map_tensors(lambda t: t.clone(), (args, kwargs)))
            phi = probe.taps.get("features")
            if phi is None or probe.calls != 1:
                raise ValueError(
                    f'evidence="design" needs a last layer that runs once per call on features [rows, d], but {self._path or "the model"!r} ran '
                    f"{probe.calls} times: {REMEDY}, or wrap the part of the model that returns [rows, classes]"
                )
            features.append(double(phi))
        return features

    @torch.no_grad()
    def try_inputs(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raise ValueError if a call with these inputs shows that `fit` would refuse the model."""
        if (scaling := extra(wrapped, "scaling")) is not None:
            args, kwargs = scaling.inputs(args, kwargs)
        self._check_last(wrapped, args, kwargs)
        y, risks = _predict(wrapped, args, kwargs)
        _checked_output(wrapped, y, risks, self._features(wrapped, args, kwargs)[0].shape[:-1])

    def _check_last(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raise ValueError if other weights multiply what the layer returns, so that its inputs are not the features that decide."""
        if (execution := watched(wrapped, args, kwargs)) is None:
            return
        multiply = {name.rpartition(".")[0] for call in execution.noisy | execution.raw for name in call}
        for output in execution.outputs:
            ran = [path.partition(".parametrizations")[0] for path in output if path in multiply]
            if ran and ran[-1] != self._path:
                raise ValueError(
                    f'evidence="design" took {self._path or "the model"!r} for the last layer, by the order in which layers are registered, but '
                    f"weights of {ran[-1] or 'the model itself'!r} run last: give example=x, inputs of the model, when wrapping, or {REMEDY}"
                )

    def leverage(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Return the leverage h of inputs, in the model's units: float64 [rows], or [rows, positions] for tokens."""
        whitening = double(table_of(wrapped).get(self.part("whitening")))
        copies = zip(self._features(wrapped, args, kwargs), whitening, strict=True)
        with full_precision(whitening):
            return torch.stack([(phi @ w.mT).square().sum(-1) for phi, w in copies]).mean(0).clamp_min(EPS)

    @torch.no_grad()
    def fit(self, wrapped: Any, inputs: Any) -> None:
        """Learn the features of the training rows; of targets it matters only which are -100, as these rows were not trained on."""
        table = table_of(wrapped)
        sums: list[Tensor] = []
        probabilities = torch.zeros(())  # summed over the rows
        rows = 0
        for args, kwargs, target in _batches(wrapped, inputs, "design"):
            if not rows:
                self._check_last(wrapped, args, kwargs)
            features = self._features(wrapped, args, kwargs)
            positions = features[0].shape[:-1]
            kept = has_class(target, positions)
            features = [phi.flatten(0, -2)[kept] for phi in features]
            rows += len(features[0])
            with full_precision(features[0]):
                products = [phi.mT @ phi for phi in features]
            sums = [old + new for old, new in zip(sums, products, strict=True)] if sums else products
            meaning, scores, _ = _checked_output(wrapped, *_predict(wrapped, args, kwargs), positions)
            if isinstance(meaning, Classes):
                probabilities = probabilities + double(meaning.probabilities(scores)).flatten(0, -2)[kept].sum(0)
        if not rows:
            raise ValueError("fit got no rows; give the training inputs as a tensor or a loader")
        bias: bool = table.module(self._path).bias is not None
        whitening = torch.stack([whitening_of(total, rows, bias) for total in sums])
        if not bool(whitening.isfinite().all()):
            raise ValueError(
                'evidence="design": the features of some training rows are NaN or infinite; find the inputs that cause this, and leave them out'
            )
        table.get(self.part("whitening")).copy_(whitening)
        table.get(self.part("rows")).fill_(rows)
        table.get(self.part("level")).zero_()
        self._register_entropy(table)
        table.get(self.part("entropy")).copy_(entropy(probabilities / rows))

    @torch.no_grad()
    def tune(self, wrapped: Any, held_out: Any) -> None:
        """Choose the level k on rows that no voter was trained on."""
        leverages, disagreements, classes = [], [], 0
        for args, kwargs, _ in _batches(wrapped, held_out, "evidence"):
            h = self.leverage(wrapped, args, kwargs)
            meaning, scores, risks = _checked_output(wrapped, *_predict(wrapped, args, kwargs), h.shape)
            classes = meaning.probabilities(scores).shape[-1] if isinstance(meaning, Classes) else 0
            leverages.append(h.flatten())
            if classes:
                disagreements.append(double(risks["epistemic"]).flatten())
            else:  # relative to the noise, so that outputs in different units count equally
                ratio = double(risks["epistemic"]) / double(risks["aleatoric"]).clamp_min(EPS)
                disagreements.append(ratio.square().reshape(h.numel(), -1).mean(1))
        if not leverages:
            return
        h, v = torch.cat(leverages), torch.cat(disagreements).clamp_min(EPS)
        level = level_of(h, v, classes) if classes else float(h.mean() / v.mean())
        table_of(wrapped).get(self.part("level")).fill_(0.0 if bool((v <= EPS).all()) else level)

    def refine(
        self, wrapped: Any, args: tuple, kwargs: dict[str, Any], y: Any, risks: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the risks with the epistemic one (for classes also the aleatoric one) replaced, and a matching total."""
        table, h = table_of(wrapped), self.leverage(wrapped, args, kwargs)
        level = double(table.get(self.part("level")))
        meaning, scores, risk = _checked_output(wrapped, y, risks, h.shape)
        disagreement = double(risk["epistemic"])
        if isinstance(meaning, Classes):
            classes = meaning.probabilities(scores[:1]).shape[-1]
            epistemic = ignorance(h, classes)
            voted = ignorance((level * disagreement).clamp_min(EPS), classes)
            epistemic = torch.where(level > 0, (epistemic + voted) / 2, epistemic)
            has_entropy = self._has_entropy(table)
            prior_entropy = double(table.get(self.part("entropy"))) if has_entropy else torch.zeros_like(level)
            aleatoric = noise(double(risk["total"]), epistemic, prior_entropy, classes)
            total = aleatoric + epistemic
        else:
            aleatoric = double(risk["aleatoric"])
            variance = aleatoric.square() * h.reshape(*h.shape, *[1] * (aleatoric.dim() - h.dim()))
            variance = torch.where(level > 0, (variance + level * disagreement.square()) / 2, variance)
            epistemic, total = variance.sqrt(), (aleatoric.square() + variance).sqrt()
        refined = {"aleatoric": aleatoric, "epistemic": epistemic, "total": total}
        rebuild = flatten(risks["epistemic"])[1]
        return {**risks, **{name: rebuild([value.to(risk["epistemic"])]) for name, value in refined.items()}}


class TakesDesign(Method):
    """Method whose wrapper has the setting `evidence`: the hooks that pass calls on to its `Design`, if there is one."""

    statistics: tuple[str, ...] = tuple(f"design_{part}" for part in NAMES)
    design: Design | None

    def check_ready(self, wrapped: Any) -> None:
        if self.design is not None:
            self.design.check_ready(wrapped)

    def check(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.design is not None:
            self.design.try_inputs(wrapped, args, kwargs)

    def fit(self, wrapped: Any, inputs: Any) -> None:
        if self.design is not None:
            self.design.fit(wrapped, inputs)

    def tune(self, wrapped: Any, held_out: Any) -> None:
        if self.design is not None:
            self.design.tune(wrapped, held_out)

    def refine(
        self, wrapped: Any, args: tuple, kwargs: dict[str, Any], y: Any, risks: dict[str, Any]
    ) -> dict[str, Any]:
        return risks if self.design is None else self.design.refine(wrapped, args, kwargs, y, risks)

    def adapt(self, table: Table, names: set[str]) -> None:
        if self.design is not None:
            self.design.adapt(table, names)

    def forget(self, table: Table) -> None:
        if self.design is not None:
            self.design.forget(table)


def _predict(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return prediction and risks in evaluation mode, with the epistemic risk of the voters or the posterior."""
    with evaluating(wrapped):
        branched, _ = run(wrapped, plan_of(wrapped, RISK_CALL), *map_tensors(lambda t: t.clone(), (args, kwargs)))
        return reduced(wrapped, branched, True)


def _batches(wrapped: Any, inputs: Any, description: str) -> Iterator[tuple[tuple, dict[str, Any], Any]]:
    """Iterate over batches (args, kwargs, target), on the model's device and with inputs in its units, with a progress bar."""
    from ..core.batches.labelled import batches_of

    device, scaling = next(wrapped.parameters()).device, extra(wrapped, "scaling")
    for batch in progress_bar(batches_of(inputs, wrapped), desc=description, delay=2, leave=False):
        args, kwargs, target = map_tensors(lambda t: t.to(device), batch)
        yield *((args, kwargs) if scaling is None else scaling.inputs(args, kwargs)), target


def _checked_output(
    wrapped: Any, y: Any, risks: dict[str, Any], positions: torch.Size
) -> tuple[Classes | Values, Tensor, dict[str, Tensor]]:
    """Check that the output is one tensor of class scores, or of values with a noise, for each feature vector.

    Args:
        wrapped: the wrapped model.
        y: its output.
        risks: risks of the output by name.
        positions: shape of the features without their last dimension.

    Returns:
        The meaning of the output, the output tensor, and its risks by name.

    Raises:
        ValueError: if the output is anything else.
    """
    leaves = flatten(y)[0]
    if len(leaves) == 1 and isinstance(leaves[0], Tensor):
        meaning, scores = resolve(wrapped._workbench.output, lambda: names(y), leaves, 0)[0], leaves[0]
        risk = {name: flatten(value)[0][0] for name, value in risks.items()}
        if isinstance(meaning, Values) and "aleatoric" not in risk:
            raise ValueError(
                'evidence="design" computes the epistemic risk of values from their noise, but the model has no aleatoric risk: compose with '
                f'sculpt, or wrap the model with output="logits" if these are scores [rows, classes], or {REMEDY}'
            )
        if isinstance(meaning, Classes) and risk["total"].shape == positions:
            return meaning, scores, risk
        if (
            isinstance(meaning, Values)
            and scores.shape[: len(positions)] == positions
            and scores.dim() <= len(positions) + 1
        ):
            return meaning, scores, risk
    shapes = ", ".join(str(list(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves)
    raise ValueError(
        f'evidence="design" is for one output of class scores or values for each feature vector that enters the last layer; there are '
        f"{list(positions)} vectors, but this model returns {shapes}: {REMEDY}, or wrap the part of the model that returns [rows, classes]"
    )


def _initial_value(attribute: str, value: Tensor) -> Tensor:
    """Return the initial value of a normalization layer's running statistic; other buffers unchanged."""
    if attribute == "running_var":
        return torch.ones_like(value)
    return torch.zeros_like(value) if attribute in ("running_mean", "num_batches_tracked") else value


def _describe(form: str) -> str:
    return {
        "binary": "binary, or several labels at once",
        "detections": "boxes",
        "several": "several outputs, or class scores next to others",
    }[form]


__all__ = ["Design", "TakesDesign"]
