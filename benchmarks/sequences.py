"""Vacuitic risk of sequence models: a recurrent network on hourly power loads, and a transformer on sentences of documentation.

The recurrent network forecasts the oil temperature of an electricity transformer (ETTh1, Zhou et al. 2021) a day ahead, from seven sensors over
four days. Its out-of-distribution inputs are readings of another such transformer (ETTh2), and its own readings with a stuck or a noisy
sensor, or reversed in time. The sentences come from the docstrings of five installed libraries, and the transformer model predicts the
library. Its out-of-distribution inputs are sentences of other libraries, lines of program code, and known sentences with shuffled words.
Sentences are padded, so padding must not affect the risk. Nothing was chosen by these scores: neo has its defaults.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import inspect
import os
import pkgutil
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from speed_clock import cost_in_passes
from torch import Tensor, nn

from workbench import compose, fit, metrics, neo
from workbench.experiments.bench import table
from workbench.methods.densities import DENSITIES

if TYPE_CHECKING:
    import pandas as pd

HOURS, AHEAD = 96, 24
ETT = {
    "ETTh1": "f1141f82f9d46968f05afa77ba16abfc4f790fe07583f9de06bb685b29a5411f",
    "ETTh2": "41040ff6a385d9208bd0b6ca58c062859e92c380d1778d93e11dd093768b579a",
}
TRAIN, TEST = slice(0, 8640), slice(11520, 14400)  # hours, split as by the authors (Zhou et al. 2021)
KNOWN = ("numpy", "scipy", "torch", "pandas", "sklearn")
UNKNOWN = ("nbformat", "jinja2", "papermill")
WORDS, LENGTH = 4000, 40
METHODS = {
    "gru": ("knn", "gaussian", "flow", "signature"),
    "transformer": ("max_softmax", "energy", "max_logit", "knn", "classwise", "gaussian", "flow", "signature"),
}
EPOCHS = {"gru": 8, "transformer": 12}
BATCH = 128


class Forecast(nn.Module):
    """A recurrent network: readings [n, hours, sensors] -> one forecast [n, 1]."""

    def __init__(self, sensors: int = 7, width: int = 64) -> None:
        super().__init__()
        self.rnn = nn.GRU(sensors, width, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Sentences(nn.Module):
    """A transformer encoder: word indices [n, words], 0 is padding -> class scores [n, classes]."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=0)
        self.places = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        pad = x == 0
        h = self.encoder(self.words(x) + self.places, src_key_padding_mask=pad)
        return self.head(h.masked_fill(pad[..., None], 0).sum(1) / (~pad).sum(1, keepdim=True).clamp_min(1))


@functools.cache
def readings(name: str) -> Tensor:
    """Return all hourly readings of an electricity transformer, float32 [hours, 7]."""
    import pandas as pd

    path = Path(os.environ.get("WORKBENCH_DATA", ".")) / "ett" / f"{name}.csv.gz"
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != ETT[name]:
        raise FileNotFoundError(
            f"the folder ett of WORKBENCH_DATA has no {name}.csv.gz with the sha256 given in {Path(__file__).name}: get {name}.csv from "
            "github.com/zhouhaoyi/ETDataset (ETT-small) and gzip it"
        )
    return torch.tensor(pd.read_csv(path).drop(columns="date").to_numpy(), dtype=torch.float32)


def windows(name: str, hours_of: slice, every: int = 1) -> tuple[Tensor, Tensor]:
    """Return windows [n, hours, 7] of a part, standardized by ETTh1's training hours, and the last sensor a day later [n, 1]."""
    known = readings("ETTh1")[TRAIN]
    hours = (readings(name) - known.mean(0)) / known.std(0)
    starts = torch.arange(max(hours_of.start - HOURS, 0), hours_of.stop - HOURS - AHEAD, every)
    x = torch.stack([hours[s : s + HOURS] for s in starts])
    return x, torch.stack([hours[s + HOURS + AHEAD - 1, -1:] for s in starts])


def strange_windows(x: Tensor) -> dict[str, Tensor]:
    """Return out-of-distribution inputs made from test windows, by name."""
    generator = torch.Generator().manual_seed(0)
    noisy, stuck, back = x.clone(), x.clone(), x.flip(1)
    noisy[:, :, 1] += torch.randn(x.shape[:2], generator=generator)
    stuck[:, HOURS // 2 :, 0] = stuck[:, HOURS // 2, 0, None]
    return {
        "another transformer": windows("ETTh2", TEST, 4)[0],
        "stuck sensor": stuck,
        "noisy sensor": noisy,
        "reversed": back,
    }


@functools.cache
def sentences(package: str) -> tuple[str, ...]:
    """Return the distinct sentences of all docstrings of an installed package, sorted."""
    texts: set[str] = set()
    module = importlib.import_module(package)
    sources = [module]
    for info in pkgutil.iter_modules(module.__path__, f"{package}."):
        if not info.name.rpartition(".")[2].startswith("_") and "test" not in info.name and "conftest" not in info.name:
            try:
                sources.append(importlib.import_module(info.name))
            except Exception:  # an optional module whose dependencies are not installed
                continue
    for source in sources:
        members = [
            member for _, member in inspect.getmembers(source) if inspect.isroutine(member) or inspect.isclass(member)
        ]
        for member in [source, *members, *(m for c in members if inspect.isclass(c) for _, m in inspect.getmembers(c))]:
            text = getattr(member, "__doc__", None)
            if isinstance(text, str):
                prose = " ".join(line for line in text.splitlines() if ">>>" not in line)
                texts.update(s.strip() for s in re.split(r"(?<=[.:;])\s+", " ".join(prose.split())))
    return tuple(sorted(s for s in texts if 6 <= len(words(s)) <= LENGTH))


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[^\sa-z]", text.lower())


@functools.cache
def texts(most: int) -> dict[str, Any]:
    """Return sentences as word indices: "train" and "test" (x, y), and "strange", the out-of-distribution ones by name.

    Args:
        most: maximum number of sentences per library.
    """
    generator = torch.Generator().manual_seed(0)

    def some(package: str, n: int) -> list[list[str]]:
        all_sentences = sentences(package)
        return [words(all_sentences[int(i)]) for i in torch.randperm(len(all_sentences), generator=generator)[:n]]

    rows = [(text, label) for label, package in enumerate(KNOWN) for text in some(package, most)]
    order = torch.randperm(len(rows), generator=generator).tolist()
    rows = [rows[i] for i in order]
    cut = len(rows) * 4 // 5
    count = Counter(word for text, _ in rows[:cut] for word in text)
    number = {word: i for i, (word, _) in enumerate(count.most_common(WORDS - 2), 2)}

    def numbered(many: list[list[str]]) -> Tensor:
        out = torch.zeros(len(many), LENGTH, dtype=torch.int64)
        for i, text in enumerate(many):
            out[i, : min(len(text), LENGTH)] = torch.tensor([number.get(word, 1) for word in text[:LENGTH]])
        return out

    test = [text for text, _ in rows[cut:]]
    mixed = [[text[int(i)] for i in torch.randperm(len(text), generator=generator)] for text in test]
    code = [words(line) for line in inspect.getsource(argparse).splitlines()]
    strange = {
        "other libraries": [text for package in UNKNOWN for text in some(package, len(test) // len(UNKNOWN))],
        "code": [line for line in code if 6 <= len(line) <= LENGTH],
        "words in another order": mixed,
    }
    labels = torch.tensor([label for _, label in rows])
    return {
        "train": (numbered([text for text, _ in rows[:cut]]), labels[:cut]),
        "test": (numbered(test), labels[cut:]),
        "strange": {name: numbered(many) for name, many in strange.items()},
    }


@functools.cache
def trained(
    model: str, seed: int, epochs: int, rows: int
) -> tuple[nn.Module, Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return a trained network, its training inputs, test inputs and targets, and out-of-distribution inputs by name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net: nn.Module = Forecast() if model == "gru" else Sentences(len(KNOWN))
    if model == "gru":
        x, y = windows("ETTh1", TRAIN, 2 if not rows else 24)
        test, target = windows("ETTh1", TEST, 4)
        strange = strange_windows(test)
    else:
        splits = texts(rows or 4000)
        (x, y), (test, target), strange = splits["train"], splits["test"], splits["strange"]
    wrapped = compose()(net)
    fit(wrapped, (x, y), epochs=epochs, lr=0.003, batch_size=BATCH, standardize=False, seed=seed)
    return wrapped.unwrap().eval(), x, test, target, strange


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each network, seed and method."""
    return [
        {
            "model": model,
            "method": method,
            "seed": seed,
            "epochs": 1 if smoke else EPOCHS[model],
            "rows": 300 if smoke else 0,
        }
        for model, methods in METHODS.items()
        for seed in range(1 if smoke else 3)
        for method in (methods if not smoke else methods[-1:])
    ]


def run(model: str, method: str, seed: int, epochs: int, rows: int) -> list[dict[str, Any]]:
    """Return one row for each kind of out-of-distribution input."""
    net, x, test, y, strange = trained(model, seed, epochs, rows)
    if method in DENSITIES:
        wrapped: Any = neo.Wrapper(density=method, output="logits" if model == "transformer" else "values")(net).eval()
        wrapped.fit(x)

        def predict(batch: Tensor) -> tuple[Tensor, Tensor]:
            return wrapped(batch, return_risk=True)
    else:

        def predict(batch: Tensor) -> tuple[Tensor, Tensor]:
            scores = net(batch)
            return scores, 1 - scores.softmax(1).amax(1)

    answer, risk_in = _in_parts(predict, test)
    quality = (
        {"rmse": metrics.rmse(answer, y)} if model == "gru" else {"accuracy": metrics.accuracy(answer.softmax(1), y)}
    )
    cost = cost_in_passes(net, predict, x[:BATCH], 3 if rows else 25)
    results = []
    for name, inputs in strange.items():
        risk = _in_parts(predict, inputs)[1]
        scores = {"auroc": metrics.auroc(risk_in, risk).item(), "fpr95": metrics.fpr95(risk_in, risk).item()}
        results.append({**{key: value.item() for key, value in quality.items()}, "cost": cost, "out": name, **scores})
    return results


@torch.no_grad()
def _in_parts(predict: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    answers, risks = zip(*(predict(batch) for batch in x.split(500)), strict=True)
    return torch.cat(answers), torch.cat(risks)


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """Return a table for each network: AUROC for each kind of out-of-distribution input."""
    import pandas as pd

    parts = []
    for model, score, label in (("gru", "rmse", "RMSE"), ("transformer", "accuracy", "accuracy")):
        results = frame[frame["model"] == model]
        if results.empty:
            continue
        rows = []
        for method, group in results.groupby("method", sort=False):
            row = {"method": str(method)}
            for out, runs in group.groupby("out", sort=False):
                row[str(out)] = f"{runs['auroc'].mean():.3f} ± {runs['auroc'].std(ddof=0):.3f}"
            rows.append({**row, "cost": f"{group['cost'].mean():.2f}"})
        parts.append(f"### {model}: {label} {results[score].mean():.3f} on test rows\n\n{table(pd.DataFrame(rows))}")
    return (
        "AUROC for detecting each kind of out-of-distribution input among test inputs, by neo with each density (*max_softmax*, *energy* and "
        "*max_logit* use the class scores only): mean and standard deviation over three networks. *Cost*: processor time of prediction and "
        f"score relative to a pass of the plain network, with batches of {BATCH} rows.\n\n" + "\n\n".join(parts)
    )
