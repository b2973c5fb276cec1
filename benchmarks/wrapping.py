"""What is paid before the first pass: the time and memory of wrapping a model of 1e9 parameters beside those of a deep copy of it, of imports
beside `import torch`, and of `workbench --help`.

Times are of the processor in one process, taken in turn: wrap, copy, wrap, copy; for imports, in fresh processes, one after another.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from speed_clock import alive, middle, peak, size
from speed_models import Decoder, Tokens
from torch import nn

from workbench import compose, neo, sample, sculpt, vote
from workbench.experiments.bench import table
from workbench.experiments.environment import processor

if TYPE_CHECKING:
    import pandas as pd

ROUNDS = 9  # and one before, which is not counted
WITHIN, OVER = 0.5, 0.01  # aimed at: seconds of wrapping, and memory that it adds as a share of the model's
IMPORT, HELP = 1.15, 0.3  # aimed at: times `import torch`, and seconds

# millions of parameters, about -> width and number of layers or blocks
MLP = {1000: (4096, 60), 100: (4096, 6), 1: (256, 15)}
GPT2 = {1000: (1536, 33), 100: (768, 9), 1: (64, 18)}
WRAPPERS: dict[str, Any] = {
    "sculpt, last layer": sculpt.Wrapper(n_layers=1),
    "sculpt, three layers": sculpt.Wrapper(),
    "sample": sample.Wrapper(),
    "sample, noise on weights": sample.Wrapper(where="weights"),
    "neo": neo.Wrapper(),
    "vote finetune, rank-one factors": vote.Wrapper(5, finetune=True, share="rank1"),
    "vote finetune, last layer": vote.Wrapper(5, finetune=True, share=1),
    "vote finetune of sculpt, last layer, and neo": compose(
        vote.Wrapper(5, finetune=True, share=1), sculpt.Wrapper(n_layers=1), neo.Wrapper()
    ),
    "vote finetune, all layers": vote.Wrapper(5, finetune=True),
    "vote, all layers": vote.Wrapper(5),
}
WHOLE = ("vote finetune, all layers", "vote, all layers")  # n times the model: measured with a tenth of it
MODELS = {"mlp": "MLP", "gpt2 classes": "GPT-2's shape, 10 classes", "gpt2 words": "GPT-2's shape, 50,257 words"}
NAMES, ANSWER = "from workbench import compose, fit, neo, sample, sculpt, vote", "workbench --help"
STARTS = {
    **{line: ("-c", line) for line in ("import torch", "import workbench", NAMES)},
    ANSWER: ("-m", "workbench", "--help"),
}


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Imports, and every wrapper with every model."""
    if smoke:
        return [_cell("gpt2 words", "sculpt, last layer", 1), _cell("mlp", WHOLE[0], 1)]
    few = [name for name in WRAPPERS if name not in WHOLE]
    wrap = [
        *(_cell(model, wrapper, 1000, on) for on in ("cpu", "cuda") for model in MODELS for wrapper in few),
        *(_cell("gpt2 classes", wrapper, 100, on) for on in ("cpu", "cuda") for wrapper in WHOLE),
    ]
    return [{"task": "start", "on": "cpu"}, *wrap]


def _cell(model: str, wrapper: str, millions: int, on: str = "cpu") -> dict[str, Any]:
    return {"task": "wrap", "model": model, "wrapper": wrapper, "millions": millions, "on": on}


def possible(cell: dict[str, Any]) -> str:
    """Why a cell can't run here, "" if it can."""
    if cell["on"] == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device"
    if cell["task"] == "start" and importlib.util.find_spec("resource") is None:
        return "the system does not tell the time of another process"
    return ""


def run(
    task: str, on: str, model: str = "", wrapper: str = "", millions: int = 0
) -> dict[str, Any] | list[dict[str, Any]]:
    """A row for a wrapped model; a row for each way to start."""
    hardware = torch.cuda.get_device_name() if on == "cuda" else processor()
    if task == "start":
        return [{"hardware": hardware, **row} for row in _start()]
    return {"hardware": hardware, **_wrap(build(model, millions, on), WRAPPERS[wrapper], on)}


# ---- wrapping
def build(model: str, millions: int, on: str) -> nn.Module:
    """A model in bfloat16, all of whose values are the same, and in memory."""
    with torch.device("meta"):
        model_in_memory = _mlp(*MLP[millions]) if model == "mlp" else _gpt2(*GPT2[millions], model, millions)
    model_in_memory = model_in_memory.bfloat16().to_empty(device=on)
    with torch.no_grad():
        for parameter in model_in_memory.parameters():
            parameter.fill_(0.01)
    return model_in_memory


def _mlp(width: int, depth: int) -> nn.Module:
    layers = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*layers, nn.Linear(width, 1))


def _gpt2(width: int, blocks: int, model: str, millions: int) -> nn.Module:
    words = 50_257 if millions > 1 else 3000
    head = nn.Linear(width, 10) if model == "gpt2 classes" else nn.Linear(width, words, bias=False)
    parts = {"entry": Tokens(words, 1024, width), "body": Decoder(width, width // 64, blocks), "head": head}
    return nn.Sequential(OrderedDict(parts))


def _wrap(model: nn.Module, wrapper: Any, device: str) -> dict[str, Any]:
    makers: dict[str, Callable[[], object]] = {"wrap": lambda: wrapper(model), "copy": lambda: copy.deepcopy(model)}
    times = _timed(makers, device)
    row: dict[str, Any] = {}
    for name, values in times.items():
        row |= dict(zip((f"{name}_s", f"{name}_low", f"{name}_high"), middle(values), strict=True))
    ratios = [wrap / copied for wrap, copied in zip(times["wrap"], times["copy"], strict=True)]
    row |= dict(zip(("ratio", "ratio_low", "ratio_high"), middle(ratios), strict=True))
    parameter_bytes, before = size(model.parameters()), alive()
    wrapped = wrapper(model)
    row |= {"rounds": ROUNDS, "parameters": sum(p.numel() for p in model.parameters()), "bytes": parameter_bytes}
    row["added"] = (alive() - before) / parameter_bytes
    del wrapped
    for name, make in makers.items():
        row[f"peak_{name}"] = peak(make, device) * 2**20 / parameter_bytes
    return row


def _timed(makers: dict[str, Callable[[], object]], device: str) -> dict[str, list[float]]:
    """Seconds of the processor for each, in turn; what was made is gone before the next begins."""
    times: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(ROUNDS + 1):
        for name, make in makers.items():
            gc.collect()  # a wrapped model is in cycles
            start = time.process_time()
            result = make()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.process_time() - start)
            del result
    return {name: values[1:] for name, values in times.items()}


# ---- starting
def _start() -> list[dict[str, Any]]:
    """Times of whole processes, by the processor and by the clock."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in STARTS}
    for _ in range(ROUNDS + 1):
        for name, arguments in STARTS.items():
            times[name].append(_process(arguments))
    rows = []
    for name, pairs in times.items():
        row: dict[str, Any] = {"what": name, "rounds": ROUNDS}
        for kind, values, others in zip(
            ("cpu", "wall"), zip(*pairs[1:], strict=True), zip(*times["import torch"][1:], strict=True), strict=True
        ):
            row |= dict(zip((f"{kind}_s", f"{kind}_low", f"{kind}_high"), middle(list(values)), strict=True))
            row[f"{kind}_ratio"] = middle([value / other for value, other in zip(values, others, strict=True)])[0]
        rows.append(row)
    return rows


def _process(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Seconds of the processor and of the clock that a fresh Python takes, in the repository, so that its own package is found."""
    import resource

    root = Path(__file__).parent.parent
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=root, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


# ---- the page
INTRODUCTION = f"""*Seconds*: of the processor, median and quartiles of {ROUNDS} rounds. *To a copy*: the median of the ratio to `copy.deepcopy`
of the same model within a round; an ensemble of five needs four of these. *Added*: bytes of all tensors that live with the wrapped
model and did not before, each storage once, as a share of the model's bytes. *At most*: the most that tensors take at one time while
it is wrapped, as such a share. Models are in bfloat16, with their values in memory; there are five voters. Large tensors, those of
copies too, take up to three times as long where their memory comes fresh from the system, page by page."""
WHY = """Layers of their own are what these wrappers give: a risk head on the last three layers has these once more, five voters on the
last layer have it five times, and five such voters with a risk head each ten times; the time is that of writing these numbers. It is
little, unless the layer tells one of 50,257 words: rank-one factors are for that case."""
FRESH = "Voters that are not fine-tuned draw all of their numbers, which is what takes their time."


def summary(frame: pd.DataFrame, images: Path) -> str:
    """A table for each model, and one of imports, for each device."""
    sections = [INTRODUCTION]
    wraps = frame[frame["task"] == "wrap"]
    for hardware, rows in wraps.groupby("hardware", sort=False):
        sections += [f"### {hardware}", _aims(rows[~rows["wrapper"].isin(WHOLE)])]
        sections += [_wrapping(str(model), of) for (model, _), of in rows.groupby(["model", "millions"], sort=False)]
        sections.append(FRESH if WHOLE[1] in set(rows["wrapper"]) else "")
    starts = frame[frame["task"] == "start"]
    sections += [_starting(str(hardware), rows) for hardware, rows in starts.groupby("hardware", sort=False)]
    return "\n\n".join(section for section in sections if section)


def _wrapping(model: str, rows: pd.DataFrame) -> str:
    import pandas as pd

    order = rows.set_index("wrapper").loc[[name for name in WRAPPERS if name in set(rows["wrapper"])]].reset_index()
    shown = pd.DataFrame(
        {
            "wrapper": order["wrapper"],
            "seconds": [f"{row.wrap_s:.3f} ({row.wrap_low:.3f} to {row.wrap_high:.3f})" for row in order.itertuples()],
            "to a copy": [f"{ratio:.3f}" for ratio in order["ratio"]],
            "added": [_share(value) for value in order["added"]],
            "at most": [_share(value) for value in order["peak_wrap"]],
        }
    )
    first = order.iloc[0]
    copied = f"a copy takes {order['copy_s'].median():.2f} s and {_share(order['peak_copy'].median())}"
    return f"{MODELS[model]}, {first['parameters'] / 1e9:.3g}e9 parameters, {first['bytes'] / 1e9:.3g} GB; {copied}:\n\n{table(shown)}"


def _share(value: float) -> str:
    """Example:
    >>> _share(5.0), _share(0.0767), _share(0.00368), _share(2.5e-6), _share(0.0)
    ('500 %', '7.67 %', '0.368 %', '< 0.01 %', '0')
    """
    return "0" if value == 0 else "< 0.01 %" if value < 1e-4 else f"{100 * value:.3g} %"


def _aims(rows: pd.DataFrame) -> str:
    """What was aimed at, and by how much it was missed."""
    missed = []
    for column, limit, text in (("wrap_s", WITHIN, "{:.2f} s".format), ("added", OVER, _share)):
        for wrapper, of in rows[rows[column] >= limit].groupby("wrapper", sort=False):
            values = [f"{text(value)} ({MODELS[m]})" for value, m in zip(of[column], of["model"], strict=True)]
            missed.append(f"- {wrapper}: {', '.join(values)}")
    met = int(((rows["wrap_s"] < WITHIN) & (rows["added"] < OVER)).sum())
    aim = f"Aimed at, but for voters on all layers: less than {WITHIN} s, and less than {_share(OVER)} more memory."
    sentence = f"{aim} Both hold in {met} of {len(rows)} cases."
    return "\n\n".join([f"{sentence} Missed:", "\n".join(missed), WHY] if missed else [sentence])


def _starting(hardware: str, rows: pd.DataFrame) -> str:
    import pandas as pd

    shown = pd.DataFrame(
        {
            "a fresh process": [f"`{what}`" for what in rows["what"]],
            "processor (s)": [
                f"{row.cpu_s:.3f} ({row.cpu_low:.3f} to {row.cpu_high:.3f})" for row in rows.itertuples()
            ],
            "clock (s)": [f"{row.wall_s:.3f} ({row.wall_low:.3f} to {row.wall_high:.3f})" for row in rows.itertuples()],
            "to `import torch`, processor": [f"{ratio:.3f}" for ratio in rows["cpu_ratio"]],
            "clock": [f"{ratio:.3f}" for ratio in rows["wall_ratio"]],
        }
    )
    by = rows.set_index("what").to_dict("index")
    ratio, answer = max(by[NAMES]["cpu_ratio"], by[NAMES]["wall_ratio"]), by[ANSWER]["wall_s"]
    met = "Both hold" if ratio <= IMPORT and answer < HELP else f"Found: {ratio:.3f} and {answer:.3f} s"
    aim = f"""Starting, on {hardware}; whole processes, the interpreter's own start included. `import workbench` imports nothing before
it is used, torch neither, so that the third line is what is paid in the end. Aimed at: at most {IMPORT} times `import torch` for that,
too, and `--help` in less than {HELP} s. {met}."""
    return f"{aim}\n\n{table(shown)}"
