"""Does aleatoric risk respond to label noise only, and epistemic risk to the amount of data only (de Jong et al. 2024)?

Two levers are varied: the number of training rows, and the share of shuffled labels in both training and test rows. How evidence divides the
risks was chosen on digits, red wine, CLINC150 as bags of words and Fashion-MNIST at 7x7 pixels; the sets in `HELD_OUT` were evaluated once,
afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import data, fit, laplace, metrics, vote
from workbench.experiments.bench import table
from workbench.metrics import Disentanglement, LeverCurves
from workbench.plots import COLOURS

if TYPE_CHECKING:
    import pandas as pd

CHOSEN_ON = ("digits", "wine-red", "clinc150", "fashion-mnist")
HELD_OUT = ("mnist", "adult", "concrete", "fashion-mnist, convolutions", "clinc150, sequences")
SETS = CHOSEN_ON + HELD_OUT
SIZES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
NOISES = tuple(i / 10 for i in range(11))
METHODS = ("vote", "vote, evidence", "vote, design alone", "laplace")
# sets shown in the figure
DRAWN = (
    "digits",
    "wine-red",
    "mnist",
    "fashion-mnist, convolutions",
    "clinc150, sequences",
)
WORDS = 300  # vocabulary of bags of words: the most frequent words of the training rows
LENGTH = 12  # words of a text as a sequence; longer texts are cut
INTENTS = 30  # known intents of CLINC150; as many others are unseen
VOTERS, WIDTH = 5, 64
TARGETS = {"epistemic_ratio": 0.02, "aleatoric_ratio": 0.1, "error": 0.2}
Rows = tuple[Tensor, Tensor]


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each run and set; slower networks come last, with fewer levels of both levers."""
    if smoke:
        return [{"data": SETS[0], "steps": 10, "rows": 200, "levels": 11, "seed": 0}]
    small = [
        {"data": name, "steps": 320, "rows": 3000, "levels": 11, "seed": seed}
        for seed in range(3)
        for name in SETS[:-2]
    ]
    return small + [
        {"data": name, "steps": 160, "rows": 1500, "levels": 6, "seed": seed} for seed in range(3) for name in SETS[-2:]
    ]


def run(data: str, steps: int, rows: int, levels: int, seed: int) -> list[dict[str, Any]]:
    """Return one row for each lever, level and method."""
    train, test, unseen = _load(data, rows)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train[1]), generator=generator)
    train = train[0][order], train[1][order]
    held = _tenth(train[1])  # the validation rows are the same at all levels of noise, so that only labels change
    results = []
    stride = 10 // (levels - 1)
    for noise in NOISES[::stride]:
        noisy, noisy_test = _shuffled(train, noise, generator), _shuffled(test, noise, generator)
        for row in _measured(data, noisy, held, noisy_test, unseen, steps, seed):
            results.append({"lever": "noise", "level": noise, **row})
            if noise == 0:
                results.append({"lever": "size", "level": 1.0, **row})
    for size in SIZES[:-1:stride]:
        few = _share(train, size)
        measured = _measured(data, few, _tenth(few[1]), test, unseen, steps, seed)
        results += [{"lever": "size", "level": size, **row} for row in measured]
    return results


def _load(name: str, rows: int) -> tuple[Rows, Rows, Tensor | None]:
    """Return training rows, test rows, and inputs of classes that occur in neither (None if the set has no such classes)."""
    name, _, network = name.partition(", ")
    loaded = data.load(name)
    x, y, x_test, y_test = loaded.train.x, loaded.train.y, loaded.test.x, loaded.test.y
    if name == "wine-red":  # grades from 3 to 8, whose extremes are rare and merged
        y, y_test = (grades.flatten().long().clamp(4, 7) - 4 for grades in (y, y_test))
        return (x.float(), y), (x_test.float(), y_test), None
    if name == "concrete":  # classes are quartiles of the strength
        quarters = y.flatten().quantile(torch.tensor([0.25, 0.5, 0.75], dtype=y.dtype))
        y, y_test = (torch.bucketize(strength.flatten(), quarters) for strength in (y, y_test))
        return (x.float(), y), (x_test.float(), y_test), None
    seen = {"clinc150": INTENTS, "adult": 2}.get(name, 8)
    if name == "clinc150" and not network:
        x, x_test = _bags(x, x[y < seen]), _bags(x_test, x[y < seen])
    elif name in ("fashion-mnist", "mnist"):
        pool = 2 if network else 4
        x, x_test = (F.avg_pool2d(pixels.float().reshape(-1, 1, 28, 28), pool) for pixels in (x, x_test))
    elif network:
        x, x_test = _padded_in_front(x[:, :LENGTH]), _padded_in_front(x_test[:, :LENGTH])
    if not network:
        x, x_test = x.flatten(1).float(), x_test.flatten(1).float()
    strange = x_test[(y_test >= seen) & (y_test < 2 * seen)][:500]
    train, test = ((inputs[labels < seen], labels[labels < seen]) for inputs, labels in ((x, y), (x_test, y_test)))
    mixed = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(0))[:rows]
    return (
        (train[0][mixed], train[1][mixed]),
        (test[0][:1000], test[1][:1000]),
        strange if len(strange) else None,
    )


class _Sequences(nn.Module):
    """Classifier on the last state of a GRU: word indices [n, words], padded in front -> class scores [n, classes]."""

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 32)
        self.states = nn.GRU(32, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.states(self.words(x))[0][:, -1])


def _network(name: str, x: Tensor, classes: int) -> nn.Module:
    network = name.partition(", ")[2]
    if network == "sequences":
        return _Sequences(int(x.max()) + 1, classes)
    if network:
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(16 * 4 * 4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes)),
        )
    return nn.Sequential(
        *(nn.Linear(x.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, classes)
    )


def _bags(tokens: Tensor, training: Tensor) -> Tensor:
    """Return which of the most frequent words of the training rows each text contains [n, words]; index 0 is padding."""
    counts = torch.bincount(training.flatten(), minlength=int(tokens.max()) + 1)
    counts[0] = 0
    words = counts.argsort(descending=True, stable=True)[:WORDS]
    return torch.stack([(tokens == word).any(1) for word in words], 1).float()


def _padded_in_front(tokens: Tensor) -> Tensor:
    return tokens.gather(1, (tokens != 0).int().argsort(dim=1, stable=True))


def _share(rows: Rows, size: float) -> Rows:
    """Return the first rows of each class, at the given share."""
    x, y = rows
    chosen = [((y == label).nonzero()[:, 0])[: max(1, round(size * int((y == label).sum())))] for label in y.unique()]
    kept = torch.cat(chosen).sort().values
    return x[kept], y[kept]


def _shuffled(rows: Rows, noise: float, generator: torch.Generator) -> Rows:
    """Return rows of which a share of the labels is permuted."""
    x, y = rows
    some = torch.randperm(len(y), generator=generator)[: round(noise * len(y))]
    labels = y.clone()
    labels[some] = y[some[torch.randperm(len(some), generator=generator)]]
    return x, labels


def _tenth(labels: Tensor) -> Tensor:
    """Return which rows [n] are for validation: every tenth in the order of labels."""
    n = len(labels)
    chosen, count = torch.zeros(n, dtype=torch.bool), max(1, round(n / 10))
    chosen[labels.argsort(stable=True)[((torch.arange(count) + 0.5) * n / count).long()]] = True
    return chosen


def _measured(
    name: str, rows: Rows, held: Tensor, test: Rows, unseen: Tensor | None, steps: int, seed: int
) -> list[dict[str, Any]]:
    """Train for a number of steps and return, for each method, its accuracy, mean risks and AUROCs."""
    train, held_out = (rows[0][~held], rows[1][~held]), (rows[0][held], rows[1][held])
    size = min(128, max(32, len(train[1]) // 16))
    epochs = -(-steps * size // len(train[1]))  # the same number of steps whatever the number of rows
    classes = int(max(rows[1].max(), test[1].max())) + 1
    inputs = test[0] if unseen is None else torch.cat([test[0], unseen])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _network(name, torch.cat([rows[0], inputs]), classes)
        voters = vote.Wrapper(VOTERS, evidence="design", output="logits")(net)
        single = None if ", " in name else laplace.Wrapper(output="logits")(net)
        for wrapped in (voters, single) if single is not None else (voters,):
            fit(wrapped, train, validation=held_out, epochs=epochs, batch_size=size, seed=seed, progress=False)
    with torch.no_grad():
        risks: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        y, risk = voters(inputs, return_risk=True)
        risks["vote, evidence"] = y, risk.aleatoric, risk.epistemic, risk.total
        voters.fit(train[0])
        risk = voters(inputs, return_risk=True)[1]
        risks["vote, design alone"] = y, risk.aleatoric, risk.epistemic, risk.total
        probs = torch.stack([voter(inputs).softmax(1) for voter in voters.voters()])
        total, each = (torch.special.entr(p).sum(-1) for p in (probs.mean(0), probs))
        risks["vote"] = y, each.mean(0), total - each.mean(0), total
        if single is not None:
            y, risk = single(inputs, return_risk=True)
            risks["laplace"] = y, risk.aleatoric, risk.epistemic, risk.total
    n = len(test[1])
    results = []
    for method, (y, aleatoric, epistemic, total) in risks.items():
        wrong = y[:n].argmax(1) != test[1]
        results.append(
            {
                "method": method,
                "accuracy": 1 - wrong.double().mean().item(),
                "aleatoric": aleatoric[:n].double().mean().item(),
                "epistemic": epistemic[:n].double().mean().item(),
                "error_auroc": metrics.error_auroc(total[:n], wrong).item() if 0 < wrong.sum() < n else float("nan"),
                "unseen_auroc": float("nan") if unseen is None else metrics.auroc(epistemic[:n], epistemic[n:]).item(),
            }
        )
    return results


def curves(frame: pd.DataFrame, lever: str) -> LeverCurves:
    """Return the curves of one set and method over a lever."""
    rows = frame[frame["lever"] == lever]
    return LeverCurves(
        *(rows.pivot(index="seed", columns="level", values=name).to_numpy() for name in LeverCurves._fields)
    )


def summary(frame: pd.DataFrame, images: Path) -> str:
    """Return a table for each set, which targets were reached, and a figure."""
    runs_of = frame.groupby("data")["seed"].nunique()
    sets = [name for name in SETS if runs_of.get(name, 0) >= 3]  # fewer runs have no score
    frame = frame[frame["data"].isin(sets)]
    _draw(frame, [name for name in DRAWN if name in sets] or sets, images / "disentangle-levers.png")
    scores = {
        (name, method): metrics.disentanglement_error(curves(rows, "size"), curves(rows, "noise"))
        for (name, method), rows in frame.groupby(["data", "method"], sort=False)
    }
    clean = frame[(frame["lever"] == "noise") & (frame["level"] == 0)].groupby(["data", "method"], sort=False)
    aurocs = clean[["accuracy", "error_auroc", "unseen_auroc"]].mean()
    parts = []
    for name in sets:
        kind = "used to choose" if name in CHOSEN_ON else "held out"
        parts.append(
            f"**{name}** ({kind}; accuracy {aurocs.loc[(name, 'vote'), 'accuracy']:.3f}):\n\n{_table(name, scores, aurocs)}"
        )
    return f"""Means over {frame["seed"].nunique()} runs, with {len(SIZES)} sizes of the training set and {len(NOISES)} shares of shuffled labels
(six of each for convolutions and sequences). *Used to choose*: the design of the method was chosen on this set; *held out*: it was not.

*Error*: the Disentanglement Error of the paper, from 0 to 1; two risks that always move together have .50. *Floor*: the error that is expected
of a perfect method, since even a response that is flat up to noise correlates by chance; the noise of each level is taken to be independent,
though training sets of growing size share their rows, with which it drifts. The error has four parts, each a correlation of a risk
with the loss of accuracy along a lever. *ua, noise* is that of aleatoric risk as label noise grows, and *ue, size* that of epistemic risk as
rows are removed; 1 is perfect. *ua, size* and *ue, noise* are the absolute correlations along the other lever; 0 is perfect. *rA*: range of
aleatoric risk over sizes divided by its range over noise; *rE*: range of epistemic risk over noise divided by its range over sizes; 0 is
perfect. *Errors*: AUROC of total risk for detecting wrong answers. *Unseen*: AUROC of epistemic risk for detecting rows of classes that were
left out of training. Both are measured with all rows and clean labels. The validation rows are the same at all levels of noise.

`vote`: {VOTERS} networks, whose disagreement is epistemic risk. `vote, evidence`: the same networks with `evidence="design"`, shaped by the
voters on the validation rows. `vote, design alone`: the same without validation rows. `laplace`: one network with a Laplace posterior.

{(chr(10) * 2).join(parts)}

{_verdict(sets, scores, aurocs)}

![Aleatoric and epistemic risk over the share of training rows and of shuffled labels](images/disentangle-levers.png)"""


def _table(name: str, scores: dict[Any, Disentanglement], aurocs: pd.DataFrame) -> str:
    import pandas as pd

    rows = []
    for method in METHODS:
        if (name, method) not in scores:
            continue
        score = scores[name, method]
        labels = ("error", "ua, noise", "ue, size", "ua, size", "ue, noise", "rA", "rE", "floor")
        row = {"method": method, **{label: f"{value:.2f}" for label, value in zip(labels, score, strict=False)}}
        error, unseen = aurocs.loc[(name, method), ["error_auroc", "unseen_auroc"]]
        rows.append({**row, "errors": f"{error:.3f}", "unseen": f"{unseen:.3f}" if unseen == unseen else ""})
    return table(pd.DataFrame(rows))


def _verdict(sets: list[str], scores: dict[Any, Disentanglement], aurocs: pd.DataFrame) -> str:
    """Return which targets were reached, and on how many sets."""
    labels = {"epistemic_ratio": "rE", "aleatoric_ratio": "rA", "error": "error"}
    columns = {"error_auroc": "AUROC of errors", "unseen_auroc": "AUROC of unseen classes"}
    lines = []
    for title, group in (("used to choose", CHOSEN_ON), ("held out", HELD_OUT)):
        present = [name for name in sets if name in group]
        for method in METHODS[:3] if present else ():
            reached = [
                f"{labels[key]} at most {most}: {_where([n for n in present if getattr(scores[n, method], key) <= most], present)}"
                for key, most in TARGETS.items()
            ]
            for column, label in columns.items() if method != "vote" else ():
                pairs = {name: [aurocs.loc[(name, one), column] for one in (method, "vote")] for name in present}
                measured = [name for name, (value, _) in pairs.items() if value == value]
                no_worse = [name for name in measured if pairs[name][0] >= pairs[name][1] - 0.0005]
                if measured:
                    reached.append(f"{label} no worse than vote's: {_where(no_worse, measured)}")
            lines.append(f"- `{method}`, sets {title}: {'; '.join(reached)}.")
    return "Targets reached, and on which of the sets:\n\n" + "\n".join(lines)


def _where(reached: list[str], of: list[str]) -> str:
    return f"{len(reached)} of {len(of)}" + (f" ({'; '.join(reached)})" if reached else "")


def _draw(frame: pd.DataFrame, sets: list[str], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(sets), 5.4), layout="constrained", facecolor="white")
    axes = figure.subplots(2, len(sets), sharex="row", squeeze=False)
    for j, name in enumerate(sets):
        for i, (lever, label) in enumerate((("size", "share of training rows"), ("noise", "share of shuffled labels"))):
            ax = axes[i, j]
            for method, style in (("vote, design alone", "-"), ("vote", ":")):
                rows = frame[(frame["data"] == name) & (frame["method"] == method)]
                for risk in ("aleatoric", "epistemic"):
                    whole = rows.groupby(["lever", "level"])[risk].mean()
                    ax.plot(
                        whole[lever].index,
                        whole[lever] / whole.max(),
                        style,
                        color=COLOURS[risk],
                        linewidth=2 if style == "-" else 1.3,
                        label=f"{risk}, {'evidence' if style == '-' else 'plain'}",
                    )
            ax.set_xlabel(label)
            ax.set_ylim(0, 1.05)
            ax.spines[["top", "right"]].set_visible(False)
        axes[0, j].set_title(f"{name}{' (used to choose)' if name in CHOSEN_ON else ''}", fontsize=9)
    for row in axes:
        row[0].set_ylabel("mean risk / its largest")
    axes[0, -1].legend(fontsize="x-small", frameon=False)
    figure.savefig(path, dpi=90, metadata={"Software": None})
