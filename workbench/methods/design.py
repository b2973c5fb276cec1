"""Evidence by design: how many training rows speak for an input, told from inputs alone, as epistemic risk that label noise does not move."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.calls.predict import plan_of, run
from ..core.calls.risks import reduced
from ..core.calls.running_moments import entropy
from ..core.method import evaluating
from ..core.outputs.class_scores import Classes
from ..core.outputs.options import form_of
from ..core.outputs.resolution import resolve
from ..core.ownership import MARK, engine_of, extra, table_of
from ..engine.effects.private_random import own_random
from ..engine.plan import Bank, Plan, Shared, Stacked
from ..engine.tree import flatten, names, tree_map
from ..errors import NotFittedError
from .densities.moments import double, full_precision
from .initialization import Draws
from .last_layer import ASKED, Probe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..core.ownership import Table
    from ..engine.plan import Rule

COPIES = 3  # as good as five; one is worse where the layer before the last is narrow
PRIOR = 1.0  # rows, what the leverage takes for known beside those of the training
NUMBERS = ("rows", "level", "entropy")
LEAST = 1e-9  # leverage or disagreement, so that there is an evidence
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

    Args:
        pretrained: whether to take the weights that the model has when it is wrapped (of a pretrained model), in one copy, and draw none anew.
    """

    def __init__(self, pretrained: bool) -> None:
        self.given = pretrained
        self.copies = 1 if pretrained else COPIES
        self._path = ""
        self._slots: list[str] = []

    # ---- what is registered: the copies' tensors beside the model's, the rest beside the last layer's weight
    def check(self, table: Table) -> None:
        """Raise ValueError where this has no meaning, before anything is registered."""
        form = form_of(table.record.output)
        if form not in ("logits", "probs"):
            raise ValueError(
                f'evidence="design" counts the rows that speak for one of several classes, and the output is {_said(form)}: wrap the model with '
                f'output="logits" if it gives scores [rows, classes], or {REMEDY}'
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

    def attach(self, table: Table) -> None:
        """Register untrained copies, drawn from a seed of their own."""
        layer: Any = table.module(self._path)
        width = layer.weight.shape[1] + (layer.bias is not None)
        device, dtype = layer.weight.device, torch.promote_types(torch.float32, layer.weight.dtype)
        drawn: dict[str, Tensor] = {}
        with torch.no_grad(), own_random(0, device):
            draws = Draws(table, self.copies, fresh=not self.given)
            for name, slot in table.record.slots.items():
                value = table.value(name).detach()
                if slot.buffer:
                    drawn[name] = torch.stack([value if self.given else _start(slot.owners[0][1], value)] * self.copies)
                elif table.value(name).requires_grad:
                    drawn[name] = draws.stacked(name, value, 1.0)
        self._slots = list(drawn)
        for name, value in drawn.items():
            table.register(self._copy(name), value, buffer=True)
        zeros = torch.zeros(self.copies, width, width, device=device, dtype=dtype)
        table.register(self.part("whitening"), zeros, buffer=True)
        for part in NUMBERS:
            table.register(self.part(part), zeros[0, 0, 0].clone(), buffer=True)

    def _copy(self, slot: str) -> str:
        return f"{slot}{MARK}design_copies"

    def part(self, name: str) -> str:
        """The name of a registered tensor: "whitening" [copies, d, d], and the numbers "rows", "level" and "entropy"."""
        return f"{self._path}.weight{MARK}design_{name}".lstrip(".")

    def adapt(self, table: Table, names: set[str]) -> None:
        """A state with these names is about to be loaded: have copies of what it has copies of, whatever is frozen now."""
        stored = [slot for slot in table.record.slots if self._copy(slot) in names]
        for slot in set(stored).difference(self._slots):
            table.register(self._copy(slot), torch.stack([table.value(slot).detach()] * self.copies), buffer=True)
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
        """What enters the last layer of each copy, with a 1 behind it where the layer has a bias, float64 [rows, d]."""
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
            if phi is None or probe.calls != 1 or phi.dim() != 2:
                raise ValueError(
                    f'evidence="design" wants a last layer {self._path or "the model"!r} that runs once in a call on features [rows, d]; it ran '
                    f"{probe.calls} times{'' if phi is None else f', at last on {list(phi.shape[:-1])} vectors'}: {REMEDY}, or wrap the part "
                    "of the model that gives [rows, classes]"
                )
            features.append(double(phi))
        return features

    @torch.no_grad()
    def try_inputs(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raise ValueError where a call with these inputs shows that `fit` would refuse the model."""
        if (scaling := extra(wrapped, "scaling")) is not None:
            args, kwargs = scaling.inputs(args, kwargs)
        y = reduced(wrapped, run(wrapped, plan_of(wrapped, ASKED), *_own((args, kwargs)))[0], True)[0]
        _classes_of(wrapped, y)
        self._features(wrapped, args, kwargs)

    def leverage(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """h [rows], float64, of inputs as the model takes them."""
        whitening = double(table_of(wrapped).get(self.part("whitening")))
        copies = zip(self._features(wrapped, args, kwargs), whitening, strict=True)
        with full_precision(whitening):
            return torch.stack([(phi @ w.mT).square().sum(1) for phi, w in copies]).mean(0).clamp_min(LEAST)

    @torch.no_grad()
    def fit(self, wrapped: Any, inputs: Any) -> None:
        """Learn which rows there are; targets are not looked at."""
        table = table_of(wrapped)
        sums: list[Tensor] = []
        said = torch.zeros(())
        rows = 0
        for args, kwargs in _batches(wrapped, inputs, "design"):
            features = self._features(wrapped, args, kwargs)
            rows += len(features[0])
            with full_precision(features[0]):
                products = [phi.mT @ phi for phi in features]
            sums = [old + new for old, new in zip(sums, products, strict=True)] if sums else products
            y = reduced(wrapped, run(wrapped, plan_of(wrapped, ASKED), *_own((args, kwargs)))[0], True)[0]
            said = said + double(_meaning_of(wrapped, y).probabilities(y)).sum(0)
        if not rows:
            raise ValueError("fit got no rows; give the training inputs as a tensor or a loader")
        bias: bool = table.module(self._path).bias is not None
        whitening = torch.stack([_whitening(total, rows, bias) for total in sums])
        if not bool(whitening.isfinite().all()):
            raise ValueError(
                'evidence="design": the features of some training rows are NaN or infinite; find out which inputs give them, and leave them out'
            )
        table.get(self.part("whitening")).copy_(whitening)
        table.get(self.part("rows")).fill_(rows)
        table.get(self.part("level")).zero_()
        self._register_entropy(table)
        table.get(self.part("entropy")).copy_(entropy(said / rows))

    @torch.no_grad()
    def tune(self, wrapped: Any, held_out: Any) -> None:
        """Choose k on rows that no voter was trained on."""
        leverages, informations, classes = [], [], 0
        for args, kwargs in _batches(wrapped, held_out, "evidence"):
            y, risks = reduced(wrapped, run(wrapped, plan_of(wrapped, ASKED), *_own((args, kwargs)))[0], True)
            classes = _classes_of(wrapped, y)
            leverages.append(self.leverage(wrapped, args, kwargs))
            informations.append(double(risks["epistemic"]))
        if not leverages:
            return
        h, v = torch.cat(leverages), torch.cat(informations).clamp_min(LEAST)
        level = 0.0 if bool((v <= LEAST).all()) else _level(h, v, classes)
        table_of(wrapped).get(self.part("level")).fill_(level)

    def refine(
        self, wrapped: Any, args: tuple, kwargs: dict[str, Any], y: Any, risks: dict[str, Any]
    ) -> dict[str, Any]:
        """The risks with the aleatoric and the epistemic one replaced, and their sum."""
        table, classes = table_of(wrapped), _classes_of(wrapped, y)
        epistemic = ignorance(self.leverage(wrapped, args, kwargs), classes)
        level = double(table.get(self.part("level")))
        voted = ignorance((level * double(risks["epistemic"])).clamp_min(LEAST), classes)
        epistemic = torch.where(level > 0, (epistemic + voted) / 2, epistemic)
        frequencies = double(table.get(self.part("entropy"))) if self._has_entropy(table) else torch.zeros_like(level)
        aleatoric = noise(double(risks["total"]), epistemic, frequencies, classes)
        kept = {"aleatoric": aleatoric.to(risks["aleatoric"]), "epistemic": epistemic.to(risks["epistemic"])}
        return {**risks, **kept, "total": kept["aleatoric"] + kept["epistemic"]}


def ignorance(leverage: Tensor, classes: int) -> Tensor:
    """Mutual information in nats between a label and class probabilities from Dirichlet(S / K, ..., S / K), S = 1 / leverage.

    Example:
        >>> ignorance(torch.tensor([0.01, 1.0, 1e9], dtype=torch.float64), 3)
        tensor([0.0099, 0.5438, 1.0986], dtype=torch.float64)
    """
    rows = 1 / leverage
    return math.log(classes) - torch.digamma(rows + 1) + torch.digamma(rows / classes + 1)


def noise(total: Tensor, epistemic: Tensor, prior: Tensor, classes: int) -> Tensor:
    """What an entropy would be if nothing were left to learn, in nats: prior * (total / prior)^(1 / (1 - e)) with e = epistemic / log(classes).

    Args:
        total: entropy of the prediction.
        epistemic: between 0 and log(classes).
        prior: entropy of the frequencies of the classes; 0, where it is unknown, counts as log(classes).
        classes: how many there are.

    Example:
        >>> noise(torch.tensor([0.5, 0.5, 1.0]), torch.tensor([0.0, 0.5, 0.5]), torch.tensor(1.0), 3)
        tensor([0.5000, 0.2805, 1.0000])
    """
    most = math.log(classes)
    prior = torch.where(prior > 0, prior, most)
    known = (1 - epistemic / most).clamp_min(LEAST)
    return torch.minimum(prior * (total.clamp_min(0) / prior) ** (1 / known), total.clamp_min(0))


def _level(h: Tensor, v: Tensor, classes: int) -> float:
    """k with which E(k v) has the mean of E(h), by bisection of its logarithm."""
    low, high, aim = -25.0, 25.0, ignorance(h, classes).mean()
    for _ in range(50):
        middle = (low + high) / 2
        below = ignorance((math.exp(middle) * v).clamp_min(LEAST), classes).mean() < aim
        low, high = (middle, high) if below else (low, middle)
    return math.exp(low)


def _whitening(total: Tensor, rows: int, bias: bool) -> Tensor:
    """W [d, d] with phi^T W^T W phi the leverage of features phi as they come, from the sum of their products over the rows."""
    width = len(total)
    scale = torch.ones(width, dtype=total.dtype, device=total.device)
    squares = total.diagonal()[: width - bias].sum() / rows  # mean squared norm
    scale[: width - bias] = torch.where(squares > 0, squares, 1).rsqrt()
    scaled = scale[:, None] * total * scale
    ridge = (PRIOR * scaled.trace() / (width * rows)).clamp_min(torch.finfo(total.dtype).tiny)
    factor, failed = torch.linalg.cholesky_ex(scaled + ridge * torch.eye(width, dtype=total.dtype, device=total.device))
    if bool(failed):
        return torch.full_like(total, torch.nan)
    identity = torch.eye(width, dtype=total.dtype, device=total.device)
    return torch.linalg.solve_triangular(factor, identity, upper=False) * scale


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


def _classes_of(wrapped: Any, y: Any) -> int:
    """How many classes the output [rows, classes] has."""
    _meaning_of(wrapped, y)
    return flatten(y)[0][0].shape[1]


def _meaning_of(wrapped: Any, y: Any) -> Classes:
    """What the output [rows, classes] means."""
    leaves = flatten(y)[0]
    meaning = resolve(wrapped._workbench.output, lambda: names(y), leaves, 0)[0] if len(leaves) == 1 else None
    if not isinstance(meaning, Classes) or not isinstance(leaves[0], Tensor) or leaves[0].dim() != 2:
        shapes = ", ".join(
            str(list(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves
        )
        raise ValueError(
            f'evidence="design" is for one output of class scores [rows, classes], and this model gives {shapes}: maps, tokens and several '
            f"outputs have no one row of features each; {REMEDY}"
        )
    return meaning


def _start(attribute: str, value: Tensor) -> Tensor:
    """The running statistics of a norm as it starts; other buffers as they are."""
    if attribute == "running_var":
        return torch.ones_like(value)
    return torch.zeros_like(value) if attribute in ("running_mean", "num_batches_tracked") else value


def _said(form: str) -> str:
    return {
        "values": "values (output= says nothing else)",
        "binary": "yes or no, or several labels at once",
        "detections": "boxes",
        "several": "several outputs, or class scores beside others",
    }[form]


__all__ = ["Design", "ignorance", "noise"]
