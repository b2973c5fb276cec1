"""Evidence by design: how many training rows speak for an input, told from inputs alone, as epistemic risk that label noise does not move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.calls.predict import plan_of, run
from ..core.calls.risks import reduced
from ..core.calls.running_moments import entropy
from ..core.method import evaluating
from ..core.outputs.class_scores import Classes
from ..core.outputs.meanings import Values
from ..core.outputs.options import form_of
from ..core.outputs.resolution import resolve
from ..core.ownership import MARK, engine_of, extra, table_of
from ..engine.effects.private_random import own_random
from ..engine.plan import Bank, Plan, Shared, Stacked
from ..engine.tree import flatten, names, tree_map
from ..errors import NotFittedError
from .densities.moments import double, full_precision
from .evidence import LEAST, ignorance, level_of, noise, whitening_of
from .initialization import Draws
from .last_layer import ASKED, Probe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..core.ownership import Table
    from ..engine.plan import Rule

COPIES = 3  # as good as five; one is worse where the layer before the last is narrow
NUMBERS = ("rows", "level", "entropy")
NAMES = ("copies", "whitening", "rows", "level", "entropy")
REMEDY = "leave evidence out"


class Design:
    """What a method with `evidence="design"` registers, learns and makes of the risks.

    Untrained copies of the network say how like the inputs are. Of one of them let phi be what enters the last layer, divided by its root mean
    square norm over the training rows, with a 1 appended, and A the sum of phi phi^T over these. The leverage of an input,

        h = mean over copies of phi^T (A + tr(A) / (d n) I)^-1 phi,

    is the share of a training row that it would be: S = 1 / h rows speak for it. The epistemic risk is the mutual information between a
    label and Dirichlet(S / K, ..., S / K) class probabilities,

        E(h) = log K - digamma(S + 1) + digamma(S / K + 1),

    about (K - 1) / (2 S): it lies in [0, log K], falls with every row that is added, and no label enters. With rows to validate on, whose
    labels are not looked at either, voters say where and the design how much: E = (E(h) + E(k v)) / 2 of the mutual information v of the
    voters, with k such that both terms have one mean over these rows.

    The aleatoric risk is what the entropy H of the averaged probabilities would be if nothing were left to learn. With e = E / log K the share
    of what could be known that is not, the prediction is taken to stand so far between the noise and the frequencies of the classes,

        log H = (1 - e) log A + e log H_0,    A = H_0 (H / H_0)^(1 / (1 - e)), at most H,

    where H_0 is the entropy of the mean prediction over the training rows: who knows nothing says the frequencies, and nothing is taken off
    there, so that pure noise stays pure noise however few rows there are. Total risk is A + E.

    Of values with a noise of standard deviation s, that of sculpt, epistemic risk is s sqrt(h): the posterior standard deviation of Bayesian
    linear regression on phi. With rows to validate on it is sqrt((s^2 h + k v^2) / 2) of the voters' standard deviation v, with k such that
    h and k v^2 / s^2 have one mean over them.

    Args:
        pretrained: whether to take the weights that the model has when it is wrapped (of a pretrained model), in one copy, and draw none anew.
    """

    def __init__(self, pretrained: bool) -> None:
        self.pretrained = pretrained
        self.copies = 1 if pretrained else COPIES
        self._path = ""
        self._slots: list[str] = []

    # ---- what is registered: the copies' tensors beside the model's, the rest beside the last layer's weight
    def check(self, table: Table) -> None:
        """Raise ValueError where this has no meaning, before anything is registered."""
        form = form_of(table.record.output)
        if form not in ("logits", "probs", "values"):
            raise ValueError(
                f'evidence="design" counts the rows that speak for one of several classes or for values, and the output is {_words(form)}: wrap '
                f'the model with output="logits" if it gives scores [rows, classes], or {REMEDY}'
            )
        if table.record.state:
            raise ValueError(f'evidence="design" knows no state that goes from call to call (state=): {REMEDY}')
        layers = table.orders()[0]
        self._path = layers[-1].partition(".parametrizations")[0] if layers else ""
        layer = table.module(self._path)
        if not isinstance(layer, nn.Linear) or not layer.weight.is_floating_point():
            raise ValueError(
                f'evidence="design" takes its features from what enters a last nn.Linear of real numbers, and {self._path or "the model"!r}, '
                f"taken for the last layer, is a {type(layer).__name__}: give example=... if another layer runs last, or {REMEDY}"
            )
        if self.part("rows").rpartition(".")[2] in layer._buffers:
            raise ValueError('evidence="design" counts the rows once: give it to one of vote and laplace')

    def attach(self, table: Table) -> None:
        """Register untrained copies, drawn from a seed of their own."""
        layer: Any = table.module(self._path)
        width = layer.weight.shape[1] + (layer.bias is not None)
        device, dtype = layer.weight.device, torch.promote_types(torch.float32, layer.weight.dtype)
        drawn: dict[str, Tensor] = {}
        with torch.no_grad(), own_random(0, device):
            draws = Draws(table, self.copies, fresh=not self.pretrained)
            for name, slot in table.record.slots.items():
                value = table.value(name).detach()
                if slot.buffer:
                    start = value if self.pretrained else _start(slot.owners[0][1], value)
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
        table.record.rules.setdefault(slot, Shared(slot))  # so that a branch finds another tensor in its place at all

    def _copy(self, slot: str) -> str:
        return f"{slot}{MARK}design_copies"

    def part(self, name: str) -> str:
        """The name of a registered tensor: "whitening" [copies, d, d], and the numbers "rows", "level" and "entropy"."""
        return f"{self._path}.weight{MARK}design_{name}".lstrip(".")

    def adapt(self, table: Table, names: set[str]) -> None:
        """A state with these names is about to be loaded: have copies of what it has copies of, whatever is frozen now."""
        stored = [slot for slot in table.record.slots if self._copy(slot) in names]
        for slot in set(stored).difference(self._slots):
            self._register_copy(table, slot, torch.stack([table.value(slot).detach()] * self.copies))
        for slot in set(self._slots).difference(stored) if stored else ():
            table.drop(self._copy(slot))
        self._slots = stored or self._slots
        # states of before know nothing of the entropy: it is unknown, 0, where it is not registered
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
        """The weights are others now."""
        for part in ("rows", "level"):
            table.get(self.part(part)).zero_()

    def check_ready(self, wrapped: Any) -> None:
        """Raise NotFittedError in evaluation mode before `fit`."""
        if (
            not wrapped.training
            and not torch.compiler.is_compiling()
            and not table_of(wrapped).holds(self.part("rows"))
        ):
            raise NotFittedError(
                'evidence="design" has seen no training data yet: train by workbench.fit, or call wrapped.fit(loader) with the training inputs '
                "after training"
            )

    # ---- what the copies make of inputs
    def _features(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        """What enters the last layer of each copy, with a 1 behind it where the layer has a bias, float64 [rows, ..., d]."""
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
            plan = Plan((), rules, Bank(table.get), (probe,), keep_state=False, fixed={"design": i})
            with evaluating(wrapped):
                engine.run(plan, *_own((args, kwargs)))
            phi = probe.taps.get("features")
            if phi is None or probe.calls != 1:
                raise ValueError(
                    f'evidence="design" wants a last layer {self._path or "the model"!r} that runs once in a call on features [rows, d]; it ran '
                    f"{probe.calls} times: {REMEDY}, or wrap the part of the model that gives [rows, classes]"
                )
            features.append(double(phi))
        return features

    @torch.no_grad()
    def try_inputs(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raise ValueError where a call with these inputs shows that `fit` would refuse the model."""
        if (scaling := extra(wrapped, "scaling")) is not None:
            args, kwargs = scaling.inputs(args, kwargs)
        y, risks = _answer(wrapped, args, kwargs)
        _read(wrapped, y, risks, self._features(wrapped, args, kwargs)[0].shape[:-1])

    def leverage(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """h [rows], of tokens [rows, places], float64, of inputs as the model takes them."""
        whitening = double(table_of(wrapped).get(self.part("whitening")))
        copies = zip(self._features(wrapped, args, kwargs), whitening, strict=True)
        with full_precision(whitening):
            return torch.stack([(phi @ w.mT).square().sum(-1) for phi, w in copies]).mean(0).clamp_min(LEAST)

    @torch.no_grad()
    def fit(self, wrapped: Any, inputs: Any) -> None:
        """Learn which rows there are; targets are not looked at."""
        table = table_of(wrapped)
        sums: list[Tensor] = []
        probabilities = torch.zeros(())  # their sum over the rows
        rows = 0
        for args, kwargs in _batches(wrapped, inputs, "design"):
            features = self._features(wrapped, args, kwargs)
            places = features[0].shape[:-1]
            features = [phi.flatten(0, -2) for phi in features]
            rows += len(features[0])
            with full_precision(features[0]):
                products = [phi.mT @ phi for phi in features]
            sums = [old + new for old, new in zip(sums, products, strict=True)] if sums else products
            meaning, scores, _ = _read(wrapped, *_answer(wrapped, args, kwargs), places)
            if isinstance(meaning, Classes):
                probabilities = probabilities + double(meaning.probabilities(scores)).flatten(0, -2).sum(0)
        if not rows:
            raise ValueError("fit got no rows; give the training inputs as a tensor or a loader")
        bias: bool = table.module(self._path).bias is not None
        whitening = torch.stack([whitening_of(total, rows, bias) for total in sums])
        if not bool(whitening.isfinite().all()):
            raise ValueError(
                'evidence="design": the features of some training rows are NaN or infinite; find out which inputs give them, and leave them out'
            )
        table.get(self.part("whitening")).copy_(whitening)
        table.get(self.part("rows")).fill_(rows)
        table.get(self.part("level")).zero_()
        self._register_entropy(table)
        table.get(self.part("entropy")).copy_(entropy(probabilities / rows))

    @torch.no_grad()
    def tune(self, wrapped: Any, held_out: Any) -> None:
        """Choose k on rows that no voter was trained on."""
        leverages, disagreements, classes = [], [], 0
        for args, kwargs in _batches(wrapped, held_out, "evidence"):
            h = self.leverage(wrapped, args, kwargs)
            meaning, scores, risks = _read(wrapped, *_answer(wrapped, args, kwargs), h.shape)
            classes = meaning.probabilities(scores).shape[-1] if isinstance(meaning, Classes) else 0
            leverages.append(h.flatten())
            if classes:
                disagreements.append(double(risks["epistemic"]).flatten())
            else:  # relative to the noise, so that outputs of other units count alike
                ratio = double(risks["epistemic"]) / double(risks["aleatoric"]).clamp_min(LEAST)
                disagreements.append(ratio.square().reshape(h.numel(), -1).mean(1))
        if not leverages:
            return
        h, v = torch.cat(leverages), torch.cat(disagreements).clamp_min(LEAST)
        level = level_of(h, v, classes) if classes else float(h.mean() / v.mean())
        table_of(wrapped).get(self.part("level")).fill_(0.0 if bool((v <= LEAST).all()) else level)

    def refine(
        self, wrapped: Any, args: tuple, kwargs: dict[str, Any], y: Any, risks: dict[str, Any]
    ) -> dict[str, Any]:
        """The risks with the epistemic one replaced, of classes the aleatoric one as well, and their total."""
        table, h = table_of(wrapped), self.leverage(wrapped, args, kwargs)
        level = double(table.get(self.part("level")))
        meaning, scores, risk = _read(wrapped, y, risks, h.shape)
        disagreement = double(risk["epistemic"])
        if isinstance(meaning, Classes):
            classes = meaning.probabilities(scores[:1]).shape[-1]
            epistemic = ignorance(h, classes)
            voted = ignorance((level * disagreement).clamp_min(LEAST), classes)
            epistemic = torch.where(level > 0, (epistemic + voted) / 2, epistemic)
            known = self._has_entropy(table)
            frequencies = double(table.get(self.part("entropy"))) if known else torch.zeros_like(level)
            aleatoric = noise(double(risk["total"]), epistemic, frequencies, classes)
            total = aleatoric + epistemic
        else:
            aleatoric = double(risk["aleatoric"])
            variance = aleatoric.square() * h.reshape(*h.shape, *[1] * (aleatoric.dim() - h.dim()))
            variance = torch.where(level > 0, (variance + level * disagreement.square()) / 2, variance)
            epistemic, total = variance.sqrt(), (aleatoric.square() + variance).sqrt()
        measured = {"aleatoric": aleatoric, "epistemic": epistemic, "total": total}
        rebuild = flatten(risks["epistemic"])[1]
        return {**risks, **{name: rebuild([value.to(risk["epistemic"])]) for name, value in measured.items()}}


def _answer(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Prediction and risks in evaluation mode, with the voters' own epistemic one."""
    with evaluating(wrapped):
        return reduced(wrapped, run(wrapped, plan_of(wrapped, ASKED), *_own((args, kwargs)))[0], True)


def _batches(wrapped: Any, inputs: Any, what: str) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """Inputs as the model takes them."""
    from tqdm.auto import tqdm

    from ..core.batches.call_arguments import batches_of

    device, scaling = next(wrapped.parameters()).device, extra(wrapped, "scaling")
    for args, kwargs, _ in tqdm(batches_of(inputs, wrapped), desc=what, delay=2, leave=False):
        args, kwargs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        yield (args, kwargs) if scaling is None else scaling.inputs(args, kwargs)


def _own(inputs: tuple[tuple, dict[str, Any]]) -> tuple[tuple, dict[str, Any]]:
    """Copies, for a model that writes into its inputs."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)


def _read(
    wrapped: Any, y: Any, risks: dict[str, Any], places: torch.Size
) -> tuple[Classes | Values, Tensor, dict[str, Tensor]]:
    """Of an output of one tensor, class scores or values with a noise at each place where there are features: its meaning, it, and its risks.

    Raises:
        ValueError: it is something else.
    """
    leaves = flatten(y)[0]
    if len(leaves) == 1 and isinstance(leaves[0], Tensor):
        meaning, scores = resolve(wrapped._workbench.output, lambda: names(y), leaves, 0)[0], leaves[0]
        risk = {name: flatten(value)[0][0] for name, value in risks.items()}
        if isinstance(meaning, Values) and "aleatoric" not in risk:
            raise ValueError(
                'evidence="design" takes the epistemic risk of values from their noise, and nothing says one: compose with sculpt, or wrap the '
                f'model with output="logits" if these are scores [rows, classes], or {REMEDY}'
            )
        if isinstance(meaning, Classes) and risk["total"].shape == places:
            return meaning, scores, risk
        if isinstance(meaning, Values) and scores.shape[: len(places)] == places and scores.dim() <= len(places) + 1:
            return meaning, scores, risk
    shapes = ", ".join(str(list(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves)
    raise ValueError(
        f'evidence="design" is for one output with class scores, or values, for each vector of features that enters the last layer; there are '
        f"{list(places)} vectors, and this model gives {shapes}: {REMEDY}, or wrap the part of the model that gives [rows, classes]"
    )


def _start(attribute: str, value: Tensor) -> Tensor:
    """The running statistics of a norm as it starts; other buffers as they are."""
    if attribute == "running_var":
        return torch.ones_like(value)
    return torch.zeros_like(value) if attribute in ("running_mean", "num_batches_tracked") else value


def _words(form: str) -> str:
    return {
        "binary": "yes or no, or several labels at once",
        "detections": "boxes",
        "several": "several outputs, or class scores beside others",
    }[form]


__all__ = ["Design"]
