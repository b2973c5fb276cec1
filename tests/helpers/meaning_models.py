"""Models whose outputs are other than one number or one row of class scores, and their combined answers.

The reference calls plain models one by one and computes entropies and means with plain sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.conformance_reference import root, spoken
from helpers.zoo import Case, leaves
from workbench.outputs import Binary, Logits, Mean, Probs, Values
from workbench.testing.reference import Branch
from workbench.testing.zoo import normal

Meanings = dict[str, Any]  # path of a leaf, as in `leaves` -> "values", "mean", or (kind, class dimension)


@dataclasses.dataclass(frozen=True)
class Meant:
    """A model, the option that declares its output, and the resulting meaning of each leaf.

    Args:
        case: how to build the model.
        output: the option `output=`.
        leaves: meaning by path: "values", "mean", "binary", "binary probs", or ("logits" or "probs", dimension).
        target: draws targets for rows.
    """

    case: Case
    output: Any
    leaves: Meanings
    target: Callable[[int], Any]


MEANT: dict[str, Meant] = {}


def meant(name: str, output: Any, of_leaves: Meanings, shape: tuple[int, ...], target: Callable[[int], Any]) -> Any:
    """Add a model to the table."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        def build() -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                return cls()

        MEANT[name] = Meant(Case(name, build, normal(shape), frozenset()), output, of_leaves, target)
        return cls

    return register


def _classes(n: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randint(n, (rows, *shape), generator=torch.Generator().manual_seed(1))


def _yes(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: _classes(2, *shape)(rows).double()


class _Body(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(n_in, 8), nn.Linear(8, 8), nn.Linear(8, n_out)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))

    def forward(self, x: Tensor) -> Any:
        return self.c(self.hidden(x))


@meant("maps", Logits(dim=1), {"": ("logits", 1)}, (2, 5, 4), _classes(3, 5, 4))
class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@meant("map_probs", Probs(dim=-3), {"": ("probs", 1)}, (2, 5, 4), _classes(3, 5, 4))
class MapProbs(Maps):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


@meant("tokens", Logits(dim=-1), {"": ("logits", 2)}, (7, 3), _classes(4, 7))
class Tokens(_Body):
    def __init__(self) -> None:
        super().__init__(3, 4)


@meant("series", Logits(dim=1), {"": ("logits", 1)}, (7, 3), _classes(4, 7))
class Series(Tokens):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


@meant("values", "values", {"": "values"}, (5,), lambda rows: torch.ones(rows, 3, dtype=torch.float64))
class Numbers(_Body):
    def __init__(self) -> None:
        super().__init__(5, 3)


@meant("rows", "logits", {"": ("logits", 1)}, (5,), _classes(3))
class Rows(Numbers):
    pass


@meant("row_probs", "probs", {"": ("probs", 1)}, (5,), _classes(3))
class RowProbs(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


@meant("token_probs", Probs(dim=2), {"": ("probs", 2)}, (7, 3), _classes(4, 7))
class TokenProbs(Tokens):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


@meant("volumes", Logits(dim=-4), {"": ("logits", 1)}, (2, 3, 4, 5), _classes(3, 3, 4, 5))
class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@meant("one_logit", "binary", {"": "binary"}, (5,), _yes(1))
class OneLogit(_Body):
    def __init__(self) -> None:
        super().__init__(5, 1)


@meant("squeezed", Binary(), {"": "binary"}, (5,), _yes())
class Squeezed(OneLogit):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(-1)


@meant("one_prob", Binary(logits=False), {"": "binary probs"}, (5,), _yes(1))
class OneProb(OneLogit):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


@meant("labels", "binary", {"": "binary"}, (5,), _yes(6))
class Labels(_Body):
    def __init__(self) -> None:
        super().__init__(5, 6)


@meant("label_probs", Binary(logits=False), {"": "binary probs"}, (5,), _yes(6))
class LabelProbs(Labels):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


class Named(NamedTuple):
    label: Tensor
    amount: Tensor


@meant(
    "named",
    {"label": "binary", "amount": "values"},
    {"label": "binary", "amount": "values"},
    (5,),
    lambda rows: {"label": _yes(2)(rows), "amount": torch.ones(rows, 1, dtype=torch.float64)},
)
class NamedHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.amount = nn.Linear(5, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Named:
        h = torch.tanh(self.body(x))
        return Named(self.label(h), self.amount(h))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes = nn.Linear(5, 8), nn.Linear(8, 3)


@meant(
    "heads",
    {"classes": "logits", "box": Values()},
    {"classes": ("logits", 1), "box": "values"},
    (5,),
    lambda rows: {"classes": _classes(3)(rows), "box": torch.zeros(rows, 4, dtype=torch.float64)},
)
class DictHeads(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.box = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"classes": self.classes(h), "box": self.box(h) + 100}


@meant("tuple", {0: "logits"}, {"0": ("logits", 1), "1": "mean"}, (5,), _classes(3))
class TupleHeads(Heads):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.classes(h), h


@dataclasses.dataclass
class Segmented:
    loss: Tensor
    logits: Tensor
    hidden: tuple[Tensor, Tensor]


@meant(
    "by_name",
    "logits",
    {"loss": "mean", "logits": ("logits", 1), "hidden.0": "mean", "hidden.1": "mean"},
    (5,),
    lambda rows: {"logits": _classes(3)(rows)},
)
class ByName(Heads):
    def forward(self, x: Tensor) -> Segmented:
        h = torch.tanh(self.body(x))
        logits = self.classes(h)
        return Segmented(F.cross_entropy(logits, torch.arange(len(x)) % 3), logits, (x, h))


@meant(
    "nested",
    {"out.mask": Logits(dim=1), "out.depth": "values", "aux": Mean()},
    {"out.mask": ("logits", 1), "out.depth": "values", "aux": "mean"},
    (2, 5, 4),
    lambda rows: {"out": {"mask": _classes(3, 5, 4)(rows), "depth": torch.ones(rows, 1, 5, 4, dtype=torch.float64)}},
)
class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.mask, self.depth = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 1), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.a(x))
        return {"out": {"mask": self.mask(h), "depth": self.depth(h)}, "aux": h}


# ---- the reference
def expected(of_leaves: Meanings, branches: list[Branch]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return prediction and risks by path; leaves with the meaning "mean" have no risk."""
    prediction: dict[str, Tensor] = {}
    risks: dict[str, dict[str, Tensor]] = {}
    outputs = [(branch.place, dict(leaves(branch.output))) for branch in branches]
    for path in outputs[0][1]:
        scores = [output[path] for place, output in outputs if not place["sculpt"]]
        raw = [output[path] for place, output in outputs if place["sculpt"]]
        kind = of_leaves[path]
        if kind == "mean":
            prediction[path] = sum(scores) / len(scores)
        elif kind == "values":
            mean = sum(scores) / len(scores)
            prediction[path] = mean
            variance = sum((y - mean) ** 2 for y in scores) / len(scores)
            variances = {"epistemic": variance}
            heads = sorted({place["sculpt"] for place, _ in outputs} - {0})
            by_head = [torch.stack([o[path] for place, o in outputs if place["sculpt"] == head]) for head in heads]
            for cause, noise in spoken(by_head).items():
                variances[cause] = variances.get(cause, 0) + noise.mean(0)
            risks[path] = {**variances, "total": sum(variances.values())}
            risks[path] = {name: root(value) for name, value in risks[path].items()}
        else:
            prediction[path], risks[path] = _classified(kind, scores, raw)
    return prediction, risks


def _classified(kind: Any, scores: list[Tensor], raw: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    yes_or_no = isinstance(kind, str)
    gives_probs = kind == "binary probs" if yes_or_no else kind[0] == "probs"
    if not yes_or_no:
        scores, raw = ([t.movedim(kind[1], -1) for t in tensors] for tensors in (scores, raw))
    squash = torch.sigmoid if yes_or_no else lambda s: s.softmax(-1)
    probs = scores if gives_probs else [squash(s) for s in scores]
    if raw:  # mean-field approximation of normal noise on the logits
        logits = [(torch.logit(p) if yes_or_no else p.log()) for p in scores] if gives_probs else scores
        noise = [F.softplus(r) + 1e-9 for r in raw]
        probs = [squash(s / (1 + torch.pi / 8 * r**2).sqrt()) for s, r in zip(logits, noise, strict=True)]
    mean = sum(probs) / len(probs)
    total, each = _entropy(mean, yes_or_no), sum(_entropy(p, yes_or_no) for p in probs) / len(probs)
    risks = {"total": total, "aleatoric": each}
    back = (lambda t: t) if yes_or_no else (lambda t: t.movedim(-1, kind[1]))
    if len(scores) == 1:
        return back(scores[0]), risks
    written = mean if gives_probs else torch.logit(mean) if yes_or_no else mean.log()
    return back(written), {**risks, "epistemic": total - each}


def _entropy(probs: Tensor, yes_or_no: bool) -> Tensor:
    """Return the entropy in nats, of (1 - p, p) or over the last dimension."""
    if yes_or_no:
        return -(probs * probs.log() + (1 - probs) * (1 - probs).log())
    return -(probs * probs.log()).sum(-1)
