"""Costs before the first pass: time and memory of wrapping a model of 1e9 parameters compared with those of a deep copy, time of imports
compared with `import torch`, time of `workbench --help`, and time of the first report compared with nbconvert's.

Wrapping is measured in processor time in one process, alternating with copies; the others are measured in fresh processes, one after another.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
import subprocess
import sys
import tempfile
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

ROUNDS, REPORT_ROUNDS = 9, 3  # after a first one that is not counted
MAX_SECONDS, MAX_ADDED = 0.5, 0.01  # targets: seconds of wrapping, and added memory as a share of the model's
# targets: import time relative to `import torch`, and seconds of `--help`
MAX_IMPORT_RATIO, MAX_HELP_SECONDS = 1.15, 0.3
MAX_REPORT_SECONDS = 30  # target on two cores

# approximate millions of parameters -> width and number of layers or blocks
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
# n times the size of the model, so they are measured with a model a tenth as large
WHOLE = (
    "vote finetune, all layers",
    "vote, all layers",
)
MODELS = {"mlp": "MLP", "gpt2 classes": "GPT-2's shape, 10 classes", "gpt2 words": "GPT-2's shape, 50,257 words"}
NAMES, ANSWER = "from workbench import compose, fit, neo, sample, sculpt, vote", "workbench --help"
STARTS = {
    **{line: ("-c", line) for line in ("import torch", "import workbench", NAMES)},
    ANSWER: ("-m", "workbench", "--help"),
}
NOTEBOOK, REPORT, FOLDER = "notebooks/compare.ipynb", "workbench report", "a folder for the results of one process"
REPORTS = {
    "jupyter nbconvert": ("-m", "nbconvert", "--execute", "--to", "html", NOTEBOOK, "--output-dir", FOLDER),
    REPORT: ("-m", "workbench", "report", NOTEBOOK, "-o", FOLDER),
}


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for imports, one for reports, and one for each wrapper and model."""
    if smoke:
        return [_cell("gpt2 words", "sculpt, last layer", 1), _cell("mlp", WHOLE[0], 1)]
    few = [name for name in WRAPPERS if name not in WHOLE]
    wrap = [
        *(_cell(model, wrapper, 1000, on) for on in ("cpu", "cuda") for model in MODELS for wrapper in few),
        *(_cell("gpt2 classes", wrapper, 100, on) for on in ("cpu", "cuda") for wrapper in WHOLE),
    ]
    return [{"task": "start", "on": "cpu"}, {"task": "report", "on": "cpu"}, *wrap]


def _cell(model: str, wrapper: str, millions: int, on: str = "cpu") -> dict[str, Any]:
    return {"task": "wrap", "model": model, "wrapper": wrapper, "millions": millions, "on": on}


def possible(cell: dict[str, Any]) -> str:
    """Return why a cell can't run here, "" if it can."""
    if cell["on"] == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device"
    if cell["task"] != "wrap" and importlib.util.find_spec("resource") is None:
        return "this system cannot measure the processor time of another process"
    return ""


def run(
    task: str, on: str, model: str = "", wrapper: str = "", millions: int = 0
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return a row for a wrapped model, or a row for each process."""
    hardware = torch.cuda.get_device_name() if on == "cuda" else processor()
    if task == "start":
        return [{"hardware": hardware, **row} for row in _start(STARTS, ROUNDS)]
    if task == "report":
        return [{"hardware": hardware, **row} for row in _start(REPORTS, REPORT_ROUNDS)]
    return {"hardware": hardware, **_wrap(build(model, millions, on), WRAPPERS[wrapper], on)}


# ---- wrapping
def build(model: str, millions: int, on: str) -> nn.Module:
    """Return a model in bfloat16 with constant parameters, which are written so that their memory is really allocated."""
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
    """Return seconds of processor time for each, measured in turn; each result is freed before the next starts."""
    times: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(ROUNDS + 1):
        for name, make in makers.items():
            gc.collect()  # wrapped models have reference cycles
            start = time.process_time()
            result = make()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.process_time() - start)
            del result
    return {name: values[1:] for name, values in times.items()}


# ---- starting
def _start(processes: dict[str, tuple[str, ...]], rounds: int) -> list[dict[str, Any]]:
    """Return processor and wall-clock times of whole processes, also relative to the first of them."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in processes}
    for _ in range(rounds + 1):
        for name, arguments in processes.items():
            times[name].append(_process(arguments))
    rows = []
    first = next(iter(times.values()))
    for name, pairs in times.items():
        row: dict[str, Any] = {"what": name, "rounds": rounds}
        for kind, values, others in zip(
            ("cpu", "wall"), zip(*pairs[1:], strict=True), zip(*first[1:], strict=True), strict=True
        ):
            row |= dict(zip((f"{kind}_s", f"{kind}_low", f"{kind}_high"), middle(list(values)), strict=True))
            row[f"{kind}_ratio"] = middle([value / other for value, other in zip(values, others, strict=True)])[0]
        rows.append(row)
    return rows


def _process(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Return processor and wall-clock seconds of a fresh Python process with as many threads as it likes, as from a shell.

    It is run in the repository, so that its package is imported.
    """
    import resource

    root = Path(__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *(folder if argument is FOLDER else argument for argument in arguments)]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


# ---- the page
INTRODUCTION = f"""*Seconds*: processor time of wrapping, median and quartiles of {ROUNDS} rounds. *To a copy*: median ratio, within a round, to
the time of a `copy.deepcopy` of the same model; an ensemble of five needs four such copies. *Added*: bytes of all tensors that exist with the
wrapped model and did not before, each storage counted once, as a share of the model's bytes. *At most*: peak of the memory of tensors while
wrapping, as the same share. Models are in bfloat16 and in memory; there are five voters. Allocating large tensors, copies included, takes up to
three times as long when the system provides fresh memory, page by page."""
WHY = """These wrappers add layers: a risk head on the last three layers copies these once, five voters on the last layer have it five
times, and five such voters with a risk head each have it ten times; the time is that of writing the weights. Both are small unless the layer
predicts one of 50,257 words; rank-one factors are for that case."""
FRESH = "Voters that are not fine-tuned draw all of their weights at random, which takes most of the time."


def summary(frame: pd.DataFrame, images: Path) -> str:
    """Return a table for each model, and one of imports, for each device."""
    sections = [INTRODUCTION]
    wraps = frame[frame["task"] == "wrap"]
    for hardware, rows in wraps.groupby("hardware", sort=False):
        sections += [f"### {hardware}", _targets(rows[~rows["wrapper"].isin(WHOLE)])]
        sections += [
            _wrapping(str(model), group) for (model, _), group in rows.groupby(["model", "millions"], sort=False)
        ]
        sections.append(FRESH if WHOLE[1] in set(rows["wrapper"]) else "")
    for task, tell in (("start", _starting), ("report", _reporting)):
        rows = frame[frame["task"] == task]
        sections += [tell(str(hardware), group) for hardware, group in rows.groupby("hardware", sort=False)]
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


def _targets(rows: pd.DataFrame) -> str:
    """Return the targets, and where and by how much they were missed."""
    missed = []
    for column, limit, text in (("wrap_s", MAX_SECONDS, "{:.2f} s".format), ("added", MAX_ADDED, _share)):
        for wrapper, group in rows[rows[column] >= limit].groupby("wrapper", sort=False):
            values = [f"{text(value)} ({MODELS[m]})" for value, m in zip(group[column], group["model"], strict=True)]
            missed.append(f"- {wrapper}: {', '.join(values)}")
    met = int(((rows["wrap_s"] < MAX_SECONDS) & (rows["added"] < MAX_ADDED)).sum())
    target = f"Targets, except for voters on all layers: less than {MAX_SECONDS} s, and less than {_share(MAX_ADDED)} added memory."
    sentence = f"{target} Both are met in {met} of {len(rows)} cases."
    return "\n\n".join([f"{sentence} Missed:", "\n".join(missed), WHY] if missed else [sentence])


def _starting(hardware: str, rows: pd.DataFrame) -> str:
    by = rows.set_index("what").to_dict("index")
    ratio, answer = max(by[NAMES]["cpu_ratio"], by[NAMES]["wall_ratio"]), by[ANSWER]["wall_s"]
    met = (
        "Both are met"
        if ratio <= MAX_IMPORT_RATIO and answer < MAX_HELP_SECONDS
        else f"Measured: {ratio:.3f} and {answer:.3f} s"
    )
    target = f"""Times of starting, on {hardware}, for whole processes including the start of the interpreter; median and quartiles of {ROUNDS}
    rounds, and the median ratio to `import torch` within a round. `import workbench` imports its modules, and torch, only when they are used,
    so that the third line shows the full cost. Targets: at most {MAX_IMPORT_RATIO} times `import torch` for the third line, and `--help` in
    less than {MAX_HELP_SECONDS} s. {met}."""
    return f"{target}\n\n{_processes(rows)}"


def _reporting(hardware: str, rows: pd.DataFrame) -> str:
    seconds = rows.set_index("what")["wall_s"][REPORT]
    met = "It is met" if seconds < MAX_REPORT_SECONDS else f"Measured: {seconds:.1f} s"
    target = f"""Time of a report, on {hardware}: `{NOTEBOOK}` is run with its defaults, as by `make report`, and made a page by nbconvert and by
    `workbench report`; median and quartiles of {REPORT_ROUNDS} rounds. Target: less than {MAX_REPORT_SECONDS} s. {met}."""
    return f"{target}\n\n{_processes(rows)}"


def _processes(rows: pd.DataFrame) -> str:
    import pandas as pd

    shown = {"fresh process": [f"`{what}`" for what in rows["what"]]}
    kinds = {"cpu": "processor", "wall": "wall-clock"}
    for kind, name in kinds.items():
        times = rows[[f"{kind}_s", f"{kind}_low", f"{kind}_high"]].itertuples(index=False)
        shown[f"{name} time (s)"] = ["{:.3f} ({:.3f} to {:.3f})".format(*time) for time in times]
    for kind, name in kinds.items():
        shown[f"{name} time to `{rows['what'].iloc[0]}`"] = [f"{ratio:.3f}" for ratio in rows[f"{kind}_ratio"]]
    return table(pd.DataFrame(shown))
