"""Page section of the speed benchmark, made from its results alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from speed_cases import WRAPPERS
from speed_models import MODELS
from speed_targets import LAUNCHES, PHASES, REASONS, TARGETS

from workbench.experiments.bench import table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

NAMES = {
    "sculpt 1": "sculpt, last layer",
    "sculpt": "sculpt, three layers",
    "sample": "sample, all layers",
    "sample last": "sample, last block",
    "vote last": "vote, last layer",
    "vote of sculpt last": "vote of sculpt, last layer",
    "vote": "vote, all layers",
    "vote rank1": "vote, rank-one factors",
    "vote dealt": "vote, dealt rows",
}
BY_HAND = {
    "loop": "loop",
    "loop_fused": "loop with fused Adam",
    "func": "torch.func",
    "stacked": "stacked weights",
    "tabm": "TabM's batched members (Gorishniy et al. 2025)",
    "laplace_torch": "laplace-torch",
    "uncertainty_ensemble": "torch-uncertainty, deep ensemble",
    "uncertainty_packed": "torch-uncertainty, packed ensemble",
    "uncertainty_dropout": "torch-uncertainty, MC dropout",
}
MARKS = "osD^vPX"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#444444", "#56B4E9", "#E69F00")
INTRODUCTION = """Each wrapper is compared with the following. *Plain pass*: a pass of the given model alone. *Loop*: passes of as many deep
copies as there are voters, one after another, and their mean and standard deviation; for `sample`, as many passes of one copy with dropout by
hooks. *By hand*: stacked weights and `torch.baddbmm`, for the two MLPs; on GPUs also `torch.func.vmap` over stacked copies. *Floor*: a lower
bound of the time, from the operations that cannot be shared at the best measured rate of matrix products and convolutions, or from reading the
parameters at the best rate of copies, whichever takes longer. *Training step*: loss, backward pass and Adam; each voter is trained on every
row, except with dealt rows, in the loop as well. *As in fit*: with gradients by `training.Backward`, which takes the steps of `fit`: voters are
trained one after another, or for the MLPs by a recorded graph. *Memory*: peak of the memory of tensors in a pass, above that before it. Ratios
are medians of the ratio within a round, over at least 9 rounds; all other numbers are medians, too. The file of results has the quartiles. On
GPUs, float32 does not use TF32. *n*: number of voters or samples.

Models: MLP 1-16-1 (tiny); MLP 8-256-256-1 (mlp); CNN of three convolutions with batch norm; ResNet-18 (width 16; 64 on GPUs); transformer
encoder (width 64, 3 layers, 32 steps); LSTM (64-128, 32 steps); a model with the architecture of GPT-2 (width 128, 4 blocks, 32 tokens; on
GPUs the smallest GPT-2 with 128 tokens). In addition, inside `frozen()` and as in `fit` an MLP 8-50-50-1 (small); for one target a U-Net
(width 16, three resolutions) with outputs of 19 classes for 512 x 512 pixels; on GPUs, in bfloat16, ResNet-50 and ViT-B/16 at 224 x 224 pixels
and the smallest GPT-2 with 1024 tokens. For `sample`, the last block, chosen by `at=`, is the last layer.

Not all combinations of n = 1, 5, 16, 64 and batches of 1, 64, 1024 are measured. Left out are: one sample, and one voter on the last layer, at
batches above 1; training steps of 64 voters; 1 and 64 voters of `vote of sculpt` and of rank-one factors, and 1 and 64 samples in the last
block; training steps of `sample` with several samples, since it draws once in training mode; and everything that is estimated from its
operations to take longer than 2.5 s (10 s if a target concerns it, 30 s on GPUs), which is most of ResNet-18 and GPT-2 with several voters on
all layers. The loop is not measured for wrappers of the last layer if it would take that long."""
Rows = list[dict[str, str]]


def page(frame: pd.DataFrame, images: Path) -> str:
    """Write the figures and return Markdown with a heading for each kind of hardware."""
    sections = [INTRODUCTION]
    kinds: list[str] = []
    for (kind, hardware), rows in frame.groupby(["on", "hardware"], sort=False):
        kinds.append(str(kind))
        stem = f"speed-{kind}" + (f"-{kinds.count(str(kind))}" if kinds.count(str(kind)) > 1 else "")
        sections += [f"### {hardware}", *_sections(rows.reset_index(drop=True), images, stem)]
    if "cuda" not in kinds:
        aims = (f"- {target.case}: {target.aim()}" for target in TARGETS if target.case.startswith("GPU"))
        sections.append("Targets on GPUs, not measured because none was available:\n\n" + "\n".join(aims))
    return "\n\n".join(section for section in sections if section)


def _sections(frame: pd.DataFrame, images: Path, stem: str) -> list[str]:
    wrapped = frame[frame["wrapper"].notna()] if "wrapper" in frame else frame.iloc[:0]
    if len(wrapped):  # rows of other packages have neither, which makes these columns floats
        wrapped = wrapped.astype({"n": int, "batch": int})
    sections = []
    if not wrapped.empty:
        usual = wrapped[
            (wrapped["how"] == "auto") & (wrapped["dtype"] == "float32") & wrapped["model"].isin(list(MODELS))
        ]
        sections = [
            _targets(wrapped),
            _ratios(usual, 64),
            _ratios(usual, 1),
            _costs(usual),
            _loops(usual),
            _special(wrapped),
            _utilization(wrapped),
        ]
        if (usual["batch"] == 64).any():
            _draw_ratios(usual, images / f"{stem}-ratios.png")
            sections.insert(2, f"![Ratio to a plain pass, a mark for each model and wrapper](images/{stem}-ratios.png)")
        if "loop" in usual and (usual["wrapper"] == "vote").any():
            _draw_loops(usual, images / f"{stem}-loops.png")
            sections.append(f"![Vote against the loop over copies, by number of voters](images/{stem}-loops.png)")
    return [*sections, _trainings(frame), _races(frame), _peers(frame)]


def _table(title: str, rows: Rows) -> str:
    import pandas as pd

    return f"{title}\n\n{table(pd.DataFrame(rows).fillna(''))}" if rows else ""


def _number(value: float) -> str:
    """Return a number with three significant digits: 0.985, 1.04, 12.3, 112."""
    return (
        ""
        if value != value
        else f"{value:.{max(0, 2 - max(0, len(str(int(value))) - 1))}f}"
        if value >= 1
        else f"{value:.3g}"
    )


# ---- tables
def _targets(wrapped: pd.DataFrame) -> str:
    rows, why = [], []
    cells = wrapped.to_dict("records")
    for target in TARGETS:
        met = [cell for cell in cells if target.holds(cell) and cell.get(target.column, float("nan")) >= 0]
        if not met:
            continue
        values = [cell[target.column] for cell in met]
        worst = target.worst(values)
        where, enough = met[values.index(worst)], target.met(worst)
        rows.append(
            {
                "case": target.case,
                "target": target.aim(),
                "worst": f"{target.text(worst)} ({where['model']}, batch {where['batch']})",
                "median": target.text(float(np.median(values))),
                "cells": str(len(values)),
                "met": "yes" if enough else "no",
            }
        )
        if not enough and target.case in REASONS:
            why.append(f"- {target.case}: {REASONS[target.case]}")
    reasons = "\n\nWhy targets are missed:\n\n" + "\n".join(why) if why else ""
    return _table("Targets, with the worst and the median value of all cells that they concern:", rows) + reasons


def _ratios(usual: pd.DataFrame, batch: int) -> str:
    """Return a table of the ratios of forward passes and training steps, by wrapper and model."""
    cells = usual[usual["batch"] == batch]
    rows = []
    for wrapper in WRAPPERS:
        group = cells[cells["wrapper"] == wrapper]
        for n in sorted(group["n"].unique()):
            row = {"wrapper": _named(wrapper, n)}
            for model in MODELS:
                pair = [_one(group, model, n, phase, "plain") for phase in ("forward", "step")]
                row[model] = " / ".join(pair) if any(pair) else ""
            rows.append(row)
    spread = ((cells["plain_high"] - cells["plain_low"]) / cells["plain"] / 2).quantile(0.9)
    precision = f"in nine of ten cells, half of the rounds are within ± {spread:.0%}"
    return _table(
        f"Time relative to the plain model at batch {batch}, by model: forward pass / training step; {precision}:", rows
    )


def _named(wrapper: str, n: int) -> str:
    return NAMES.get(wrapper, wrapper) + (f", n = {n}" if wrapper not in ("sculpt", "sculpt 1", "neo") else "")


def _one(cells: pd.DataFrame, model: str, n: int, phase: str, column: str) -> str:
    cell = cells[(cells["model"] == model) & (cells["n"] == n) & (cells["phase"] == phase)]
    return _number(float(cell[column].iloc[0])) if len(cell) and column in cell else ""


def _costs(usual: pd.DataFrame) -> str:
    """Return a table of time relative to the floor and memory relative to a plain pass, over models and batches."""
    rows = []
    cells = usual[(usual["batch"] > 1) & (usual["model"] != "tiny")]
    for (wrapper, phase), group in cells.groupby(["wrapper", "phase"], sort=False):
        memory = group["memory_wrapped"] / group["memory_plain"]
        rows.append(
            {
                "wrapper": f"{NAMES.get(wrapper, wrapper)}, {PHASES[phase]}",
                "time / floor": _number(float(group["floor"].median())),
                "plain pass / floor": _number(
                    float((group["floor"] * group["plain_ms"] / group["wrapped_ms"]).median())
                ),
                "memory / plain pass": _number(float(memory.median())),
                "n": ", ".join(str(n) for n in sorted(group["n"].unique())),
                "executors": ", ".join(sorted(group["executor"].unique())),
            }
        )
    title = """Time relative to the floor, and memory relative to a plain pass: medians over all models but the tiny one, batches of 64 and
1024, and the numbers n of voters or samples. *Executors*: ways of the engine to run them:"""
    return _table(title, rows)


def _loops(usual: pd.DataFrame) -> str:
    """Return a table of vote on all layers relative to the loop and to versions by hand."""
    cells = usual[usual["wrapper"] == "vote"]
    rows = []
    for n, batch in sorted({*zip(cells["n"], cells["batch"], strict=True)}):
        same_batch = cells[cells["batch"] == batch]
        row = {"n, batch": f"{n}, {batch}"}
        for model in MODELS:
            pair = [_one(same_batch, model, n, phase, "loop") for phase in ("forward", "step")]
            row[model] = " / ".join(pair) if any(pair) else ""
        for model in ("tiny", "mlp"):
            pair = [_one(same_batch, model, n, phase, "hand") for phase in ("forward", "step")]
            row[f"{model}, by hand"] = " / ".join(pair) if any(pair) else ""
        for model in LAUNCHES:
            pair = [_one(same_batch, model, n, phase, "func") for phase in ("forward", "step")]
            if any(pair):
                row[f"{model}, torch.func"] = " / ".join(pair)
        rows.append(row)
    return _table(
        "Time of vote on all layers relative to the loop over copies, by model, and to the versions *by hand*: forward pass / training step:",
        rows,
    )


def _special(wrapped: pd.DataFrame) -> str:
    """Return a table of autocast, "tune", torch.compile and `frozen()`."""
    rows = []
    for cell in wrapped[(wrapped["how"] != "auto") | (wrapped["dtype"] != "float32")].to_dict("records"):
        way = {
            "auto": "autocast",
            "tune": '"tune"',
            "compiled": "torch.compile",
            "frozen": "`frozen()`",
            "backward": "`Backward`",
        }
        rows.append(
            {
                "case": f"{cell['model']}, {_named(cell['wrapper'], cell['n'])}, batch {cell['batch']}, {PHASES[cell['phase']]}",
                "how": way[cell["how"]],
                "to a plain pass": _number(cell["plain"]),
                "to the loop": _number(cell.get("loop", float("nan"))),
                **({"to torch.func": _number(cell["func"])} if "func" in wrapped else {}),
                "to the best executor": _number(cell.get("best", float("nan"))),
                "memory": _number(cell["memory_wrapped"] / cell["memory_plain"]),
                "executor": str(cell["executor"]),
            }
        )
    return _table(
        'Time ratios under autocast to bfloat16, with the executor chosen by measurement ("tune"), compiled, inside `frozen()`, where a '
        "recorded graph answers, and with gradients by `Backward`. The plain pass is of the same kind; the loop is never compiled. "
        "*Memory*: relative to a plain pass.",
        rows,
    )


def _utilization(wrapped: pd.DataFrame) -> str:
    """Return a table of the utilization of a GPU by large models."""
    cells = wrapped[wrapped["utilization"].notna()] if "utilization" in wrapped else wrapped.iloc[:0]
    rows = [
        {
            "case": f"{cell['model']}, {_named(cell['wrapper'], cell['n'])}, batch {cell['batch']}, {PHASES[cell['phase']]}",
            "loop": f"{cell['tflops_loop']:.0f}",
            "vote": f"{cell['tflops_wrapped']:.0f}",
            "best product": f"{cell['tflops_best']:.0f}",
            "vote / loop": f"{cell['utilization']:.2f}",
        }
        for cell in cells.to_dict("records")
    ]
    return _table(
        "Utilization in TFLOP/s: operations of the plain passes, as counted by torch, divided by the time; and that of the best matrix product:",
        rows,
    )


def _trainings(frame: pd.DataFrame) -> str:
    """Return a table of whole trainings by `fit` and by hand."""
    cells = frame[frame["training"].notna()] if "training" in frame else frame.iloc[:0]
    nothing = float("nan")
    measured = {
        name: title for name, title in BY_HAND.items() if f"fit_{name}" in cells and cells[f"fit_{name}"].notna().any()
    }
    rows = [
        {
            "training": str(cell["training"]),
            "steps": str(int(cell["steps"])),
            "fit": f"{cell['fit_s']:.2f} s",
            "recording of graphs": f"{cell['making_s']:.2f} s" if cell.get("making_s", nothing) >= 0 else "",
            'strategy="eager"': f"{cell['eager_s']:.2f} s",
            "loop by hand": f"{cell['loop_s']:.2f} s",
            **{f"fit / {title}": _number(cell.get(f"fit_{name}", nothing)) for name, title in measured.items()},
            "fit / without sculpt": _number(cell.get("fit_vote", nothing)),
            "error (fit; by hand)": _errors(cell),
        }
        for cell in cells.to_dict("records")
    ]
    return _table(
        """Whole trainings, including the time of recording graphs, which is also shown by itself. MLPs have 1024 steps of 64 rows, larger
models 320 steps of 16. The trainings by hand have the same schedule, with two heads in place of sculpt and dropout in place of sample: a loop
over copies, torch.func's vmap over their gradients, and batched products of stacked weights, the last two with fused Adam. *Error*: root mean
square distance of the mean from the truth on new rows. Targets: at most .35 of the loop for 5 voters, .2 for 16, .6 with sculpt, 1.02 for CNN,
transformer and LSTM; 1.4 of stacked weights without sculpt; and with sculpt in the last layer, where its heads share a trunk, 1.6 of the
voters alone:""",
        rows,
    )


def _errors(cell: dict[str, Any]) -> str:
    """Return the error of `fit` and the range of those by hand; "" for models with random targets."""
    errors = [error for name in BY_HAND if (error := cell.get(f"{name}_rmse", float("nan"))) >= 0]
    return f"{cell['fit_rmse']:.3f}; {min(errors):.3f} to {max(errors):.3f}" if errors else ""


def _races(frame: pd.DataFrame) -> str:
    """Return a table of the time that trainings by hand take until they are as good as `fit`."""
    cells = frame[frame["race"].notna()] if "race" in frame else frame.iloc[:0]
    rows = [
        {
            "training": str(cell["race"]),
            "by hand": title,
            "fit": f"{cell['fit_s']:.2f} s",
            "until as good": f"{cell[f'{name}_s']:.2f} s",
            "fit / by hand": f"{_number(cell[f'fit_{name}'])} ({_number(cell[f'fit_{name}_low'])}, {_number(cell[f'fit_{name}_high'])})",
            "NLL (fit; by hand)": f"{cell['fit_nll']:.3f}; {cell[f'{name}_nll']:.3f}",
            "as good": f"{cell[f'{name}_reached']:.0f} of {cell['rounds']:.0f}",
        }
        for cell in cells.to_dict("records")
        for name, title in BY_HAND.items()
        if cell.get(f"{name}_s", float("nan")) >= 0
    ]
    return _table(
        """Time to the same quality in these trainings: the whole time of `fit`, and the time of the training by hand until its NLL on new rows,
evaluated after each epoch, is within .01 nats of the final NLL of `fit`; the time of the evaluation is not counted. A training that never gets
there counts with its whole time; *as good* is the number of rounds that do. The NLL is that of the uniform mixture of all networks, each with
its own noise; by hand this is a deep ensemble (Lakshminarayanan et al. 2017). Networks of torch-uncertainty are trained by a loop by hand with
fused Adam; those of its packed ensemble are narrower, as its default alpha = 2 has them. Ratios are shown with quartiles:""",
        rows,
    )


def _peers(frame: pd.DataFrame) -> str:
    if "peer" not in frame:
        return ""
    rows = [
        {
            "package and task": f"{cell['peer']}: {cell['task']}",
            "ours (ms)": _number(cell["wrapped_ms"]),
            "theirs (ms)": _number(cell["peer_ms"]),
            "ratio": f"{_number(cell['peer_ratio'])} ({_number(cell['peer_ratio_low'])}, {_number(cell['peer_ratio_high'])})",
            "memory (MiB), ours / theirs": f"{_number(cell['memory_wrapped'])} / {_number(cell['memory_peer'])}",
        }
        for cell in frame[frame["peer"].notna()].to_dict("records")
    ]
    title = """Other packages on the same task. laplace-torch: fit a Kronecker-factored posterior of the last of two layers, with 512 features
    and 2048 rows and the prior of the largest marginal likelihood, and predict 16 rows with 32 draws of the logits. torch-uncertainty: mean
    and spread of the CNN's outputs for 64 images; it imports torchvision, which has no build for CPUs, so that on a CPU an empty module
    replaced it, which these two methods do not use. Ratios of times, ours to theirs, with quartiles:"""
    return _table(title, rows)


# ---- pictures
def _draw_ratios(usual: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained", facecolor="white")
    some = usual[(usual["batch"] == 64) & (usual["n"].isin((1, 5, 16)))]
    device = some["on"].iloc[0]
    for ax, phase in zip(figure.subplots(1, 2, sharey=True), ("forward", "step"), strict=True):
        of = some[some["phase"] == phase]
        pairs = [(w, n) for w in WRAPPERS for n in sorted(of.loc[of["wrapper"] == w, "n"].unique())]
        for k, model in enumerate(MODELS):
            rows = of[of["model"] == model]
            places = [pairs.index((w, n)) + 0.1 * (k - 3) for w, n in zip(rows["wrapper"], rows["n"], strict=True)]
            ax.scatter(
                places,
                rows["plain"],
                marker=MARKS[k],
                color=PALETTE[k],
                s=26,
                linewidths=0,
                label=_legend_entry(model, rows),
            )
        for place, (wrapper, n) in enumerate(pairs):
            like = {"wrapper": wrapper, "n": n, "batch": 64, "phase": phase, "dtype": "float32", "how": "auto"}
            limits = {
                t.limit
                for t in TARGETS
                if t.column == "plain" and any(t.holds({**like, "model": m, "on": device}) for m in MODELS)
            }
            for limit in limits:
                ax.hlines(limit, place - 0.42, place + 0.42, colors="#444444", linewidth=1.4)
        ax.axhline(1, color="#999999", linewidth=0.8)
        ax.set_yscale("log")
        labels = [f"{NAMES.get(w, w)}{f', {n}' if n > 1 else ''}" for w, n in pairs]
        ax.set_xticks(range(len(pairs)), labels, rotation=50, ha="right", fontsize="small")
        ax.set_title(f"{PHASES[phase]}, batch 64")
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", linewidth=0.6, alpha=0.35)
    figure.axes[0].set_ylabel("ratio to a plain pass (bar: target)")
    _finish(figure)
    figure.savefig(path, dpi=80, metadata={"Software": None})


def _draw_loops(usual: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    of = usual[usual["wrapper"] == "vote"].dropna(subset="loop")
    batches = sorted(of["batch"].unique())
    figure = Figure(figsize=(11, 5.4), layout="constrained", facecolor="white")
    grid = figure.subplots(2, len(batches), sharex=True, sharey=True, squeeze=False)
    for line, phase in zip(grid, ("forward", "step"), strict=True):
        for ax, batch in zip(line, batches, strict=True):
            for k, model in enumerate(MODELS):
                rows = of[(of["model"] == model) & (of["batch"] == batch) & (of["phase"] == phase)].sort_values("n")
                spread = [rows["loop"] - rows["loop_low"], rows["loop_high"] - rows["loop"]]
                look = {"marker": MARKS[k], "color": PALETTE[k], "ms": 4, "lw": 1.2}
                ax.errorbar(rows["n"], rows["loop"], spread, label=_legend_entry(model, rows), **look)
            ax.axhline(1, color="#444444", linestyle=(0, (4, 2)), linewidth=1)
            ax.set_xscale("log", base=4)
            ax.set_yscale("log")
            ax.set_xticks([1, 5, 16, 64], ["1", "5", "16", "64"])
            ax.minorticks_off()
            ax.set_title(f"{PHASES[phase]}, batch {batch}", fontsize="medium")
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(axis="y", linewidth=0.6, alpha=0.35)
    for ax in grid[-1]:
        ax.set_xlabel("voters")
    for line in grid:
        line[0].set_ylabel("vote / loop over copies")
        low, high = line[0].get_ylim()
        line[0].set_yticks([2.0**k for k in range(-6, 7) if low < 2.0**k < high])
    _finish(figure)
    figure.savefig(path, dpi=80, metadata={"Software": None})


def _legend_entry(model: str, rows: pd.DataFrame) -> str | None:
    """Return the label of a model, None if it has no rows and is no part of the legend."""
    return model if len(rows) else None


def _finish(figure: Figure) -> None:
    """Add one legend for all axes, and label them with numbers instead of powers of ten."""
    named = {text: handle for ax in figure.axes for handle, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside right upper", frameon=False, fontsize="small")
    for ax in figure.axes:
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
