"""Does aleatoric risk follow label noise alone, and epistemic risk the amount of data alone (de Jong et al. 2024)?

Two levers: fewer training rows, and a growing share of shuffled labels, those of the test rows included. The recipe of `evidence="design"` was
chosen on Fashion-MNIST, MNIST, breast cancer, wine, adult and made-up planes; digits, red wine and CLINC150 had no part in that.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, data, fit, laplace, metrics, neo, vote
from workbench.experiments.bench import table
from workbench.metrics import Disentanglement, LeverCurves
from workbench.plots import COLOURS

if TYPE_CHECKING:
    import pandas as pd

CHOSEN_ON = ("fashion-mnist",)
SETS = ("digits", "wine-red", "clinc150", "fashion-mnist")
SIZES = (0.05, 0.1, 0.25, 0.5, 1.0)
NOISES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
METHODS = ("vote", "vote, evidence", "vote, design alone", "vote, neo", "laplace")
WORDS = 300  # of texts, the most frequent ones of the training rows
INTENTS = 30  # of CLINC150, and as many that are never seen
VOTERS, WIDTH = 5, 64
AIMS = {"epistemic_ratio": 0.02, "aleatoric_ratio": 0.1, "error": 0.2}
Rows = tuple[Tensor, Tensor]


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Every run and set."""
    return [
        {"data": name, "steps": 10 if smoke else 320, "rows": 200 if smoke else 3000, "seed": seed}
        for seed in range(1 if smoke else 3)
        for name in (SETS[:1] if smoke else SETS)
    ]


def run(data: str, steps: int, rows: int, seed: int) -> list[dict[str, Any]]:
    """One row for each lever, level and method."""
    train, test, unseen = _load(data, rows)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train[1]), generator=generator)
    train = train[0][order], train[1][order]
    results = []
    for noise in NOISES:
        noisy, judged = _shuffled(train, noise, generator), _shuffled(test, noise, generator)
        for row in _measured(noisy, judged, unseen, steps, seed):
            results.append({"lever": "noise", "level": noise, **row})
            if noise == 0:
                results.append({"lever": "size", "level": 1.0, **row})
    for size in SIZES[:-1]:
        few = _share(train, size)
        results += [{"lever": "size", "level": size, **row} for row in _measured(few, test, unseen, steps, seed)]
    return results


def _load(name: str, rows: int) -> tuple[Rows, Rows, Tensor | None]:
    """Training rows, test rows, and inputs of classes that neither has."""
    loaded = data.load(name)
    x, y, x_test, y_test = loaded.train.x, loaded.train.y, loaded.test.x, loaded.test.y
    if name == "wine-red":  # grades of tasters, 3 to 8; the ends are rare
        y, y_test = (grades.flatten().long().clamp(4, 7) - 4 for grades in (y, y_test))
        return (x.float(), y), (x_test.float(), y_test), None
    seen = INTENTS if name == "clinc150" else 8
    if name == "clinc150":
        x, x_test = _bags(x, x[y < seen]), _bags(x_test, x[y < seen])
    elif name == "fashion-mnist":
        x, x_test = (F.avg_pool2d(pixels.float().reshape(-1, 1, 28, 28), 4) for pixels in (x, x_test))
    x, x_test = x.flatten(1).float(), x_test.flatten(1).float()
    strange = x_test[(y_test >= seen) & (y_test < 2 * seen)][:1000]
    train, test = ((inputs[labels < seen], labels[labels < seen]) for inputs, labels in ((x, y), (x_test, y_test)))
    mixed = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(0))[:rows]
    return (train[0][mixed], train[1][mixed]), (test[0][:2000], test[1][:2000]), strange


def _bags(tokens: Tensor, training: Tensor) -> Tensor:
    """Which of the most frequent words of the training rows a text has [n, words]; 0 is padding."""
    counts = torch.bincount(training.flatten(), minlength=int(tokens.max()) + 1)
    counts[0] = 0
    words = counts.argsort(descending=True, stable=True)[:WORDS]
    return torch.stack([(tokens == word).any(1) for word in words], 1).float()


def _share(rows: Rows, size: float) -> Rows:
    """The first rows of each class."""
    x, y = rows
    chosen = [((y == label).nonzero()[:, 0])[: max(1, round(size * int((y == label).sum())))] for label in y.unique()]
    kept = torch.cat(chosen).sort().values
    return x[kept], y[kept]


def _shuffled(rows: Rows, noise: float, generator: torch.Generator) -> Rows:
    """Labels of which a share has changed places."""
    x, y = rows
    some = torch.randperm(len(y), generator=generator)[: round(noise * len(y))]
    labels = y.clone()
    labels[some] = y[some[torch.randperm(len(some), generator=generator)]]
    return x, labels


def _measured(train: Rows, test: Rows, unseen: Tensor | None, steps: int, seed: int) -> list[dict[str, Any]]:
    """Mean risks and what they tell, for each method, after so many steps of training."""
    size = min(128, max(32, len(train[1]) // 16))
    epochs = -(-steps * size // len(train[1]))  # as many steps for few rows, which would else be trained less
    classes = int(max(train[1].max(), test[1].max())) + 1
    every = test[0] if unseen is None else torch.cat([test[0], unseen])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            *(nn.Linear(train[0].shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            nn.Linear(WIDTH, classes),
        )
        voters = compose(vote.Wrapper(VOTERS, evidence="design"), neo.Wrapper(), output="logits")(net)
        single = laplace.Wrapper(output="logits")(net)
        with torch.no_grad():
            risks: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
            with torch.enable_grad():
                fit(voters, train, epochs=epochs, batch_size=size, seed=seed, progress=False)
                fit(single, train, epochs=epochs, batch_size=size, seed=seed, progress=False)
            y, risk = voters(every, return_risk=True)
            total = torch.special.entr(y.softmax(1)).sum(1)
            risks["vote"] = y, risk.aleatoric, total - risk.aleatoric, total
            risks["vote, evidence"] = y, risk.aleatoric, risk.epistemic, risk.total
            risks["vote, neo"] = y, risk.aleatoric, risk.vacuitic, total
            voters.fit(train[0])
            risk = voters(every, return_risk=True)[1]
            risks["vote, design alone"] = y, risk.aleatoric, risk.epistemic, risk.total
            y, risk = single(every, return_risk=True)
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
    """The curves of one set and method over a lever."""
    rows = frame[frame["lever"] == lever]
    return LeverCurves(
        *(rows.pivot(index="seed", columns="level", values=name).to_numpy() for name in LeverCurves._fields)
    )


def summary(frame: pd.DataFrame, images: Path) -> str:
    """A table for each set, what was reached, and a picture."""
    runs_of = frame.groupby("data")["seed"].nunique()
    sets = [name for name in SETS if runs_of.get(name, 0) >= 3]  # fewer runs have no score
    frame = frame[frame["data"].isin(sets)]
    _draw(frame, sets, images / "disentangle-levers.png")
    scores = {
        (name, method): metrics.disentanglement_error(curves(rows, "size"), curves(rows, "noise"))
        for (name, method), rows in frame.groupby(["data", "method"], sort=False)
    }
    clean = frame[(frame["lever"] == "noise") & (frame["level"] == 0)].groupby(["data", "method"], sort=False)
    aurocs = clean[["accuracy", "error_auroc", "unseen_auroc"]].mean()
    parts = []
    for name in sets:
        kind = "used to choose the recipe" if name in CHOSEN_ON else "held out"
        parts.append(
            f"**{name}** ({kind}; accuracy {aurocs.loc[(name, 'vote'), 'accuracy']:.3f}):\n\n{_table(name, scores, aurocs)}"
        )
    runs, floor = frame["seed"].nunique(), next(iter(scores.values())).floor
    return f"""Mean over {runs} runs. *Error*: the Disentanglement Error of the paper, from 0 to 1; .50 is what two risks have that always
move together, {floor:.2f} what a perfect one is expected to have here, since a flat response has a correlation by chance. Its parts:
*ua, noise* and *ue, size* (correlation of aleatoric risk with the loss of accuracy by label noise, of epistemic risk by fewer rows; 1 is
perfect), *ua, size* and *ue, noise* (absolute; 0 is perfect). *rA*: range of aleatoric risk over sizes / over noise; *rE*: range of
epistemic risk over noise / over sizes; 0 is perfect. *Errors*: AUROC of wrong answers by total risk; *unseen*: of rows of classes that
were left out by epistemic risk; both with all rows and clean labels.

`vote`: {VOTERS} networks, whose disagreement is epistemic risk. `vote, evidence`: the same networks with `evidence="design"`, shaped by the
voters on the rows that validate. `vote, design alone`: without such rows. `vote, neo`: neo's vacuitic risk in the place of epistemic
risk. `laplace`: one network.

{(chr(10) * 2).join(parts)}

{_verdict(sets, scores, aurocs)}

![Aleatoric and epistemic risk over the share of training rows and of shuffled labels](images/disentangle-levers.png)"""


def _table(name: str, scores: dict[Any, Disentanglement], aurocs: pd.DataFrame) -> str:
    import pandas as pd

    rows = []
    for method in METHODS:
        score = scores[name, method]
        labels = ("error", "ua, noise", "ue, size", "ua, size", "ue, noise", "rA", "rE")
        row = {"method": method, **{label: f"{value:.2f}" for label, value in zip(labels, score, strict=False)}}
        error, unseen = aurocs.loc[(name, method), ["error_auroc", "unseen_auroc"]]
        rows.append({**row, "errors": f"{error:.3f}", "unseen": f"{unseen:.3f}" if unseen == unseen else ""})
    return table(pd.DataFrame(rows))


def _verdict(sets: list[str], scores: dict[Any, Disentanglement], aurocs: pd.DataFrame) -> str:
    """Which aims were reached, on how many sets."""
    words = {"epistemic_ratio": "rE", "aleatoric_ratio": "rA", "error": "error"}
    lines = []
    for method in ("vote", "vote, evidence", "vote, design alone"):
        reached = [
            f"{words[aim]} at most {most}: {_where(name for name in sets if getattr(scores[name, method], aim).item() <= most)}"
            for aim, most in AIMS.items()
        ]
        for column, label in (("error_auroc", "AUROC of errors"), ("unseen_auroc", "AUROC of unseen classes")):
            if method != "vote":
                pairs = {
                    name: (aurocs.loc[(name, method), column], aurocs.loc[(name, "vote"), column]) for name in sets
                }
                judged = {name: pair for name, pair in pairs.items() if pair[0] == pair[0]}
                fine = _where(name for name, (own, plain) in judged.items() if own >= plain - 0.0005)
                reached.append(f"{label} no worse than vote's: {fine} of {len(judged)}")
        lines.append(f"- `{method}`: {'; '.join(reached)}.")
    return f"Aims reached, of {len(sets)} sets:\n\n" + "\n".join(lines)


def _where(names: Any) -> str:
    reached = list(names)
    return f"{len(reached)} ({', '.join(reached)})" if reached else "0"


def _draw(frame: pd.DataFrame, sets: list[str], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(sets), 5.4), layout="constrained", facecolor="white")
    axes = figure.subplots(2, len(sets), sharex="row", squeeze=False)
    for j, name in enumerate(sets):
        for i, (lever, label) in enumerate((("size", "share of training rows"), ("noise", "share of shuffled labels"))):
            ax = axes[i, j]
            for method, style in (("vote, evidence", "-"), ("vote", ":")):
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
        axes[0, j].set_title(f"{name}{' (used to choose)' if name in CHOSEN_ON else ''}", fontsize=10)
    for row in axes:
        row[0].set_ylabel("mean risk / its largest")
    axes[0, -1].legend(fontsize="x-small", frameon=False)
    figure.savefig(path, dpi=90, metadata={"Software": None})
