"""Ctrl-C at random moments of calls, trainings, loads and saves, which must leave all as it was: modes, numbers, hooks, random draws and
what torch keeps for a thread.

`python benchmarks/interrupts.py --interrupts 500 --seed 7` makes others than `workbench bench interrupts`. Three kinds: at the k-th line of
workbench's own code, at the k-th moment at which CPython looks for signals (both the same again with the same seed), and by a real signal after
a random time. After each, all that an interrupt could leave behind is compared with what was there before, or with what a whole call leaves.
`tests/test_interrupts.py` runs some hundred of them.
"""

from __future__ import annotations

import argparse
import copy
import dis
import functools
import inspect
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import workbench
from workbench import augment, compose, laplace, neo, sample, sculpt, snapshot, swag, vote
from workbench.experiments.bench import table

if TYPE_CHECKING:
    import pandas as pd

X = torch.linspace(-2, 2, 48).reshape(16, 3)
Y = X.sum(1, keepdim=True).sin()
KINDS = ("line", "call", "signal")
SEEDS, TRIED, EACH = (
    4,
    108,
    4,
)  # of the benchmark, interrupts of each cell, and those of a case before the next one's turn


class Net(nn.Module):
    """A network with dropout, batch statistics and an attribute that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


class Counting(Net):
    """The same, counting its calls, so that no pass under vmap is possible."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Quiet(Net):
    """The same without dropout, so that the branches can share a trunk in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()  # type: ignore[assignment]


def net(cls: type[Net] = Net) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = cls()
        model(torch.randn(32, 3))
    return model.eval()


WRAPPERS: dict[str, Callable[[], Any]] = {
    "vote": lambda: vote.Wrapper(3),
    "rank1": lambda: vote.Wrapper(3, share="rank1"),
    "trunk": lambda: compose(vote.Wrapper(3, share=1), sculpt.Wrapper(n_layers=1)),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "sample": lambda: sample.Wrapper(3),
    "weights": lambda: sample.Wrapper(3, where="weights", randomness="same"),
    "neo": lambda: neo.Wrapper(),
    "laplace": lambda: laplace.Wrapper(),
    "swag": lambda: swag.Wrapper(2, rank=2, start=0.0),
    "snapshot": lambda: snapshot.Wrapper(2),
    "augment": lambda: augment.Wrapper(transforms=[lambda x: x + 0.1 * torch.randn_like(x)]),
    "all": lambda: compose(vote.Wrapper(2), sample.Wrapper(2), sculpt.Wrapper(n_layers=1), neo.Wrapper()),
}
STRATEGIES = ("auto", "vmap", "rescue", "replay", "loop")


# ---- what is there
def surroundings() -> dict[str, Any]:
    """What torch keeps for a thread."""
    functorch: Any = torch._C._functorch
    return {
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "transforms": functorch.get_dynamic_layer_stack_depth(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "random": torch.get_rng_state().tolist(),
    }


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything in a model that an interrupt could change."""
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_load_state_dict_post_hooks",
    )
    modules = list(model.named_modules())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "training": {path: module.training for path, module in modules},
        "hooks": {path: [len(getattr(module, kind)) for kind in hooks] for path, module in modules},
        "forward": {path: "forward" in module.__dict__ for path, module in modules},
        "calls": {path: module.__dict__.get("calls") for path, module in modules},
        "requires_grad": {name: tensor.requires_grad for name, tensor in tensors},
        "dtypes": {name: tensor.dtype for name, tensor in tensors},
        "objects": {name: id(tensor) for name, tensor in model.named_parameters()},
        "numbers": {name: tensor.detach().flatten().tolist() for name, tensor in tensors},
    }


def answers(wrapped: Any) -> list[list[float]]:
    """What it says in evaluation mode, from one and the same noise; nothing is left of asking."""
    modes = [(module, module.training) for module in wrapped.modules()]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        wrapped.eval()
        try:
            out = wrapped(X[:5], return_risk=True) if wrapped.methods and ready(wrapped) else (wrapped(X[:5]), ())
        finally:
            for module, mode in modes:
                module.training = mode
    y, risk = out
    return [t.flatten().tolist() for t in (y, *([risk] if isinstance(risk, Tensor) else [risk[k] for k in risk]))]


def ready(wrapped: Any) -> bool:
    try:
        for method in wrapped._workbench.methods:
            method.check_ready(wrapped)
    except workbench.NotFittedError:
        return False
    return True


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if repr(before[name]) != repr(after[name])]  # NaN is like NaN


# ---- interrupts
class Interruption:
    """Raises KeyboardInterrupt once in this thread, at the k-th event of a kind; counts them if k is None.

    Args:
        kind: "line" (each line, call and return in files of workbench), or "call" (calls and returns from C, everywhere: the moments at which
            CPython delivers signals).
        k: which event.
    """

    def __init__(self, kind: str, k: int | None) -> None:
        self.kind, self.k, self.count, self.where = kind, k, 0, ""

    def _event(self, frame: Any) -> None:
        self.count += 1
        if self.count == self.k:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            self._stop()
            raise KeyboardInterrupt

    def _trace(self, frame: Any, event: str, arg: Any) -> Any:
        if "workbench/" not in frame.f_code.co_filename:
            return None
        self._event(frame)
        return self._trace

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename != __file__ and not _is_thrown_into(frame, event):
            self._event(frame)

    def _stop(self) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def __enter__(self) -> Interruption:
        (sys.settrace if self.kind == "line" else sys.setprofile)(
            self._trace if self.kind == "line" else self._profile  # type: ignore[arg-type]
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop()


def _is_thrown_into(frame: Any, event: str) -> bool:
    """Whether a generator is being closed or thrown into: no moment for signals, and CPython loses what a profiler raises there."""
    if event != "call" or not frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_lasti < 0:
        return False
    return frame.f_code.co_code[frame.f_lasti] != dis.opmap["RESUME"]


class Signal:
    """Raises KeyboardInterrupt by a real signal after so many seconds."""

    where = "signal"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def _send(self) -> None:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            if self.over:
                return
        signal.raise_signal(signal.SIGINT)

    def __enter__(self) -> Signal:
        self.over = False
        self.thread = threading.Thread(target=self._send)
        self.thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.over = True
        self.thread.join()


# ---- what is interrupted
class Case:
    """One action on a wrapped model, to be interrupted again and again.

    Args:
        name: of the wrapper.
        strategy: of the engine.
        action: see `ACTIONS`.
        cls: of the model.
    """

    def __init__(self, name: str, strategy: str, action: str, cls: type[Net] = Net) -> None:
        self.label = f"{name}/{strategy}/{action}"
        self.given, self.cls, self.action = net(cls), cls, action
        self.make = lambda: WRAPPERS[name]().with_options(strategy=strategy)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.wrapped = self.make()(self.given)
        self.wrapped.train(action in ("train", "loss", "fit"))
        if action in ("eval", "load", "save"):
            self.wrapped.eval()
            self._fit()
        if action == "closed":
            self._collect()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "model"
        if action in ("load", "reload"):
            other = copy.deepcopy(self.wrapped)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.add_(0.5) if parameter.is_floating_point() else None
            workbench.save(other, self.path)
        if action == "save":
            workbench.save(self.wrapped, self.path)
        answers(copy.deepcopy(self.wrapped))  # a rung that does not run this wrapper says so here

    def _collect(self) -> None:
        for name, module in (("swag", swag), ("snapshot", snapshot)):
            if name in self.wrapped.methods:
                module.collect(self.wrapped), module.collect(self.wrapped)

    def _fit(self) -> None:
        self._collect()
        if self.wrapped.needs_fit:
            self.wrapped.fit([(X, Y)])

    def run(self) -> Any:
        wrapped, action = self.wrapped, self.action
        if action == "eval":
            return wrapped(X, return_risk=True)
        if action == "train":
            return wrapped(X)
        if action == "loss":
            return wrapped.loss(nn.functional.mse_loss, X, Y)
        if action == "fit":
            return workbench.fit(wrapped, (X, Y), epochs=2, batch_size=8, progress=False, validation=0)
        if action == "closed":
            return self.wrapped.fit([(X, Y)]) if self.wrapped.needs_fit else snapshot.collect(self.wrapped)
        if action == "wrap":
            return self.make()(self.given)
        if action == "load":
            return workbench.load(self.path, wrapped)
        if action == "reload":
            return workbench.load(self.path, self.given)
        return workbench.save(wrapped, self.path)

    def count(self, kind: str) -> int:
        """The events in a run, and the model as it was."""
        trial = copy.copy(self)
        trial.wrapped, trial.given = copy.deepcopy(self.wrapped), copy.deepcopy(self.given)
        trial.run()
        with Interruption(kind, None) as interruption:
            trial.run()
        return interruption.count

    def attack(self, interruption: Any) -> tuple[bool, list[str]]:
        """Interrupt one run: whether it was, and what was wrong afterwards."""
        wrapped, given = copy.deepcopy(self.wrapped), copy.deepcopy(self.given)
        trial = copy.copy(self)
        trial.wrapped, trial.given = wrapped, given
        if self.action in ("train", "eval", "loss") and interruption.k_odd:
            trial.run()  # not always the first call
        said = answers(wrapped)
        twin = copy.copy(trial)
        twin.wrapped, twin.given = copy.deepcopy(wrapped), copy.deepcopy(given)
        before, around, plain = state_of(wrapped), surroundings(), state_of(given)
        hit = False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with torch.set_grad_enabled(self.action != "eval"), interruption:
                    out = trial.run()
                if self.action == "fit":
                    hit = out.interrupted
        except KeyboardInterrupt:
            hit = True
        if not hit:
            return False, []
        wrong = [f"torch: {name}" for name in differences(around, surroundings())]
        torch.set_grad_enabled(True)
        after, drawn = state_of(wrapped), torch.get_rng_state().tolist()
        torch.set_rng_state(torch.tensor(around["random"], dtype=torch.uint8))
        first = answers(wrapped)
        if repr(first) != repr(answers(wrapped)):
            wrong.append("two answers differ")
        if self.action == "fit":
            modes = set(after["training"].values())
            wrong += [] if len(modes) == 1 else ["training flags differ"]
            for name in (
                "hooks",
                "forward",
                "requires_grad",
                "dtypes",
            ):  # what is there now may be more, such as a standardisation
                same = all(after[name].get(key, value) == value for key, value in before[name].items())
                wrong += [] if same else [name]
            fresh = copy.deepcopy(wrapped)
            wrong += [] if repr(answers(fresh)) == repr(first) else ["a copy answers otherwise"]
            return True, wrong
        changed = differences(before, after)
        if "torch: random" in wrong or (self.action in ("train", "eval", "loss", "load", "closed") and changed):
            twin.run()  # as before, or as after the whole call
            if drawn == torch.get_rng_state().tolist() and "torch: random" in wrong:
                wrong.remove("torch: random")
            torch.set_rng_state(torch.tensor(around["random"], dtype=torch.uint8))
            changed = [
                name for name in differences(state_of(twin.wrapped), after) if name in changed and name != "objects"
            ]
            fresh = copy.deepcopy(wrapped)
            wrong += [] if repr(answers(fresh)) == repr(first) else ["a copy answers otherwise"]
        elif repr(said) != repr(first):
            wrong.append("the answer is another")
        wrong += changed
        if self.action not in ("train", "loss"):
            changed = differences(plain, state_of(given))
            if changed and self.action == "reload":  # as after the whole call, which came to its end
                twin.run()
                changed = differences(state_of(twin.given), state_of(given))
            wrong += [f"given: {name}" for name in changed]
        if self.action == "save":
            whole = [file.name for file in self.path.parent.iterdir()] == ["model"]
            workbench.load(self.path, copy.deepcopy(self.given))  # which looks at all checksums
            wrong += [] if whole else ["a file beside it"]
        return True, wrong


ACTIONS = {
    "train": "`wrapped(x)` in training mode",
    "eval": "`wrapped(x, return_risk=True)`",
    "loss": "`wrapped.loss`",
    "fit": "`workbench.fit`",
    "closed": "`wrapped.fit`, `snapshot.collect`",
    "wrap": "wrapping",
    "load": "`load` into a wrapped model",
    "reload": "`load` with a plain model",
    "save": "`save`",
}


def cases() -> list[tuple[str, str, str, type[Net]]]:
    """Every wrapper x rung x action that there is."""
    every = []
    for name in WRAPPERS:
        for action in ACTIONS:
            rungs = STRATEGIES if action in ("train", "eval", "loss") else ("auto",)
            for strategy in rungs:
                if strategy == "replay" and name not in ("trunk", "sculpt"):
                    continue
                if action == "closed" and name not in ("neo", "laplace", "swag", "snapshot", "all"):
                    continue
                if name == "augment" and action in ("load", "reload", "save"):
                    continue  # a function of the user's own
                if (
                    name in ("neo", "laplace", "swag", "snapshot", "augment")
                    and strategy in ("vmap", "rescue")
                    and action != "eval"
                ):
                    continue
                every.append((name, strategy, action, {"loop": Counting, "replay": Quiet}.get(strategy, Net)))
    return every


@functools.cache
def made(row: tuple[str, str, str, type[Net]]) -> Case | None:
    """The case of a row, None if the rung does not run this wrapper."""
    try:
        return Case(*row)
    except (ValueError, RuntimeError) as error:
        if "is not possible for" not in str(error):
            raise
        return None


@functools.cache
def events(row: tuple[str, str, str, type[Net]], kind: str) -> int:
    case = made(row)
    assert case is not None
    return case.count(kind)


Attack = tuple[tuple[str, str, str, type[Net]], str, bool, str, list[str]]


def attacks(
    interrupts: int, seed: int, kinds: tuple[str, ...] = KINDS, chosen: Callable[..., bool] | None = None
) -> Iterator[Attack]:
    """Interrupts at random moments, of one case after another.

    Args:
        interrupts: how many to try.
        seed: of the order of the cases, and of moments.
        kinds: of interrupts.
        chosen: which cases; all by default.

    Yields:
        The row of the case, the kind, whether the interrupt came before the end, where, and what was wrong afterwards.
    """
    draw = random.Random(seed)
    wanted = [row for row in cases() if chosen is None or chosen(*row)]
    while True:
        for row in draw.sample(wanted, len(wanted)):
            case, kind = made(row), draw.choice(kinds)
            for _ in range(EACH if case is not None else 0):
                count = events(row, "call" if kind == "signal" else kind)
                if kind == "signal":
                    interruption: Any = Signal(count * 4e-7 * draw.random() ** 2 * 4)
                else:
                    interruption = Interruption(kind, draw.randint(1, count))
                interruption.k_odd = draw.random() < 0.5
                hit, faults = case.attack(interruption)  # type: ignore[union-attr]
                yield row, kind, hit, interruption.where, faults
                interrupts -= 1
                if not interrupts:
                    return


def soak(
    interrupts: int, seed: int, kinds: tuple[str, ...] = KINDS, chosen: Callable[..., bool] | None = None
) -> tuple[int, list[str]]:
    """How many interrupts hit, and what was wrong after which; the arguments are those of `attacks`."""
    hits, wrong = 0, []
    for row, kind, hit, where, faults in attacks(interrupts, seed, kinds, chosen):
        hits += hit
        if faults:
            wrong.append(f"{'/'.join(row[:3])} [{kind}] at {where}: {', '.join(faults)}")
            print(wrong[-1], flush=True)
    return hits, wrong


# ---- the benchmark
def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Every wrapper, with several seeds."""
    if smoke:
        return [{"wrapper": "vote", "seed": 0, "interrupts": 8}]
    return [{"wrapper": name, "seed": seed, "interrupts": TRIED} for seed in range(SEEDS) for name in WRAPPERS]


def run(wrapper: str, seed: int, interrupts: int) -> list[dict[str, Any]]:
    """One row for each rung and action: the interrupts of each kind that came before the end, and what they left behind."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker ignores it
    try:
        for (_, strategy, action, _), kind, hit, where, faults in attacks(
            interrupts, seed, chosen=lambda name, *_: name == wrapper
        ):
            start = {"strategy": strategy, "action": action, **dict.fromkeys(KINDS, 0), "left_behind": 0, "faults": ""}
            row = rows.setdefault((strategy, action), start)
            row[kind] += hit
            if faults:
                row["left_behind"] += 1
                row["faults"] += f"[{kind}] at {where}: {', '.join(faults)}; "
    finally:
        signal.signal(signal.SIGINT, handler)
    return list(rows.values())


def summary(frame: pd.DataFrame, images: Path) -> str:
    """A table of actions, and how many interrupts left something behind."""
    import pandas as pd

    frame = frame.assign(hits=frame[list(KINDS)].sum(axis=1))
    actions = frame.groupby("action")[[*KINDS, "hits", "left_behind"]].sum().loc[list(ACTIONS)]
    shown = pd.DataFrame(
        {
            "interrupted": [ACTIONS[action] for action in actions.index],
            "at a line": [f"{n:,}" for n in actions["line"]],
            "at a call": [f"{n:,}" for n in actions["call"]],
            "by a signal": [f"{n:,}" for n in actions["signal"]],
            "left something behind": [f"{n:,}" for n in actions["left_behind"]],
        }
    )
    pairs = len(frame[frame["hits"] > 0].drop_duplicates(["wrapper", "strategy", "action"]))
    said = (
        f"{int(frame['left_behind'].sum())} of {int(frame['hits'].sum()):,} interrupts left something behind, in {pairs} "
        f"combinations of {frame['wrapper'].nunique()} wrappers, rungs of the engine and actions."
    )
    return f"{said}\n\n{table(shown)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interrupts", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    args = parser.parse_args()
    start = time.perf_counter()
    hits, wrong = soak(args.interrupts, args.seed, tuple(args.kinds))
    print(Counter(line.partition(" [")[0].rpartition("/")[2] for line in wrong))
    print(f"{len(wrong)} of {hits} interrupts left something behind ({time.perf_counter() - start:.0f} s)")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
