"""Passes that a cell of the speed benchmark measures: the wrapped model, a plain pass, a loop over deep copies, a batched version by hand."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from speed_clock import WARM_UP_CALLS, Pass, bytes_a_second, operations, operations_a_second
from speed_models import MAPS, Encoder, batch_of, build
from speed_targets import BUSY, LAUNCHES
from torch import Tensor, nn

from workbench import compose, neo, sample, sculpt, vote
from workbench.outputs import Logits
from workbench.training import Backward

CRITERION = nn.MSELoss()
P = 0.1  # dropout rate, the default of sample
FITTED = 256  # rows that neo is fitted on

WRAPPERS: dict[str, Callable[..., Any]] = {
    "sculpt": lambda n, **how: sculpt.Wrapper(**how),
    "sculpt 1": lambda n, **how: sculpt.Wrapper(n_layers=1, **how),
    "neo": lambda n, **how: neo.Wrapper(**how),
    "sample": lambda n, **how: sample.Wrapper(n, **how),
    "sample last": lambda n, **how: sample.Wrapper(n, **how),
    "vote last": lambda n, **how: vote.Wrapper(n, share=1, **how),
    "vote of sculpt last": lambda n, **how: compose(vote.Wrapper(n, share=1, **how), sculpt.Wrapper(n_layers=1, **how)),
    "vote": lambda n, **how: vote.Wrapper(n, **how),
    "vote rank1": lambda n, **how: vote.Wrapper(n, share="rank1", **how),
    "vote dealt": lambda n, **how: vote.Wrapper(n, **how),
}
EXECUTORS = ("vmap", "rescue", "replay", "loop")


@dataclass
class CellPasses:
    """The passes of a cell and their properties.

    Args:
        passes: "wrapped" and "plain", and as applicable "loop", "hand", "func" and "strategy NAME" for each executor that "tune" can choose.
        floor: lower bound of the seconds of any implementation.
        bound: what determines the floor, "operations" or "bytes".
        work: floating-point operations of all copies one after another.
        rate: maximum floating-point operations per second of the device.
        refused: reasons why passes are not possible for this model, by name.
        engine: wrapped object that can explain how it ran.
        served: context in which it is frozen, if it is.
    """

    passes: dict[str, Pass] = field(default_factory=dict)
    floor: float = 0.0
    bound: str = ""
    work: float = 0.0
    rate: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)
    engine: Any = None
    served: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def executor(self) -> str:
        """Return the executor of the last kind of call."""
        return str(self.engine.explain().rows[-1][2])

    def guard(self) -> Pass | None:
        """Return the check whether a graph may answer a call; None if no graph did."""
        runtime = self.engine.__dict__["_engine"]
        return (lambda: runtime.recorded.hold(runtime.frozen)) if runtime.recorded.replays else None

    def add(self, name: str, run: Pass) -> None:
        """Add a pass, or the reason why it is not possible for this model."""
        try:
            run()
            self.passes[name] = run
        except (RuntimeError, ValueError) as error:
            self.refused[name] = str(error).splitlines()[0][:120]

    def utilization(self, wrapped: float, loop: float) -> dict[str, float]:
        """Return TFLOP/s from the seconds of a pass, and ours as a share of the loop's."""
        rates = {"wrapped": self.work / wrapped, "loop": self.work / loop, "best": self.rate}
        return {**{f"tflops_{name}": rate / 1e12 for name, rate in rates.items()}, "utilization": loop / wrapped}


def case_of(
    model: str, wrapper: str, n: int, batch: int, phase: str, on: str, dtype: str, how: str, loop: bool
) -> CellPasses:
    """Return everything that a cell measures; see `speed.cells` for the other arguments.

    Args:
        loop: whether to measure the loop over copies.
    """
    large = on == "cuda"
    x, y = (tensor.to(on) for tensor in batch_of(model, batch, large))
    plain = build(model, large).to(on)
    low = contextlib.nullcontext if dtype == "float32" else _autocast(on)
    training = phase == "step"
    plain.train(training)
    compiled = _compiler(on) if how == "compiled" else lambda function: function

    case = CellPasses()
    wrapped = wrap(plain, wrapper, n, model, large, "auto" if how in ("compiled", "frozen", "backward") else how)
    case.engine = wrapped.head if wrapper == "sample last" else wrapped
    if how == "backward":
        case.passes["wrapped"] = _as_in_fit(wrapped, x, y, records=model in ("tiny", "small"))
    else:
        case.passes["wrapped"] = _wrapped_pass(wrapped, wrapper, phase, x, y, low, compiled)
    if how == "frozen":
        case.served.enter_context(wrapped.frozen())
    copied = copy.deepcopy(plain)
    case.passes["plain"] = _steps([copied], x, y, low, compiled) if training else _alone(copied, x, low, compiled)
    if loop and wrapper.startswith(("vote", "sample")):
        if wrapper == "vote dealt":
            case.passes["loop"] = _dealt_step([copy.deepcopy(plain) for _ in range(n)], x, y, low)
        elif not training:
            case.passes["loop"] = _passes(_members(plain, wrapper, n), x, low)
        elif wrapper.startswith("vote"):
            case.passes["loop"] = _steps([copy.deepcopy(plain) for _ in range(n)], x, y, low)
    if wrapper == "vote" and model in ("tiny", "mlp"):
        case.passes["hand"] = _by_hand(plain, n, x, y if training else None, low)
    if on == "cuda" and wrapper == "vote" and n > 1 and model in LAUNCHES:
        case.add("func", _by_func(plain, n, x, y if training else None, low, compiled))
    if how == "tune":
        for executor in EXECUTORS:
            forced = wrap(plain, wrapper, n, model, large, executor)
            run = _wrapped_pass(forced, wrapper, phase, x, y, low, compiled)
            case.add(f"strategy {executor}", run)
    case.floor, case.bound = floor(plain, wrapper, n, x, phase, on, dtype)
    if model in BUSY:
        case.work = n * operations(plain, x, training)[""]
        case.rate = operations_a_second(on, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    return case


def _autocast(device: str) -> Callable[[], Any]:
    return lambda: torch.autocast(device, torch.bfloat16)


def _compiler(device: str) -> Callable[[Any], Any]:
    """Reset the compiler and return a function that compiles, on a GPU into CUDA graphs."""
    torch.compiler.reset()
    return lambda function: torch.compile(function, mode="reduce-overhead" if device == "cuda" else None)


def wrap(plain: nn.Module, wrapper: str, n: int, model: str, large: bool, strategy: str) -> Any:
    """Return the wrapped model, fitted if necessary, in the mode of the plain one."""
    meaning = {"output": Logits(dim=1)} if model in MAPS else {}
    wrapped = WRAPPERS[wrapper](n, strategy=strategy, **meaning)(plain, at="head" if wrapper == "sample last" else None)
    if wrapper == "neo":
        device = next(plain.parameters()).device
        wrapped.eval().fit([batch.to(device) for batch in batch_of(model, FITTED, large)[0].split(64)])
    return wrapped.train(plain.training)


def _wrapped_pass(
    wrapped: Any, wrapper: str, phase: str, x: Tensor, y: Tensor, low: Any, compiled: Callable[[Any], Any]
) -> Pass:
    if phase == "fit":
        return lambda: wrapped.fit(x)
    if phase == "step":

        def loss(x: Tensor, y: Tensor) -> Tensor:
            with low():
                return CRITERION(wrapped(x), y) if wrapper == "vote dealt" else wrapped.loss(CRITERION, x, y)

        return _step(compiled(loss), wrapped.parameters(), x, y)

    def predict(x: Tensor) -> Any:
        if wrapper != "sample last":
            return wrapped(x) if phase == "predict" else wrapped(x, return_risk=True)
        h = wrapped.body(wrapped.entry(x))
        return wrapped.head(h) if phase == "predict" else wrapped.head(h, return_risk=True)

    return _without_gradients(compiled(predict), x, low)


def _without_gradients(predict: Callable[[Tensor], Any], x: Tensor, low: Any) -> Pass:
    def run() -> Any:
        with torch.no_grad(), low():
            return predict(x)

    return run


def _step(
    loss: Callable[[Tensor, Tensor], Tensor], parameters: Iterable[nn.Parameter | Tensor], x: Tensor, y: Tensor
) -> Pass:
    """Return a training step that frees its gradients at its end, so that its memory is measured in full."""
    optimizer = torch.optim.Adam(parameters)

    def run() -> None:
        loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _as_in_fit(wrapped: Any, x: Tensor, y: Tensor, records: bool) -> Pass:
    """Return a training step by `Backward`; if it records one, after that."""
    backward, optimizer = Backward(wrapped, CRITERION), torch.optim.Adam(wrapped.parameters())

    def run() -> None:
        backward(x, y)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP_CALLS if records else 0):
        run()
    return run


def _alone(model: nn.Module, x: Tensor, low: Any, compiled: Callable[[Any], Any]) -> Pass:
    return _without_gradients(compiled(model), x, low)


def _steps(models: list[Any], x: Tensor, y: Tensor, low: Any, compiled: Callable[[Any], Any] | None = None) -> Pass:
    """Return a training step of several models, one after another, each with its own optimizer."""

    def one(model: nn.Module) -> Pass:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            with low():
                return CRITERION(model(x), y)

        return _step(loss if compiled is None else compiled(loss), model.parameters(), x, y)

    steps = [one(model) for model in models]

    def run() -> None:
        for step in steps:
            step()

    return run


def _dealt_step(models: list[Any], x: Tensor, y: Tensor, low: Any) -> Pass:
    """Return a training step in which each model gets its share of the rows."""
    shares = list(zip(models, x.tensor_split(len(models)), strict=True))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with low():
            return CRITERION(torch.cat([model(rows) for model, rows in shares]), y)

    return _step(loss, [p for model in models for p in model.parameters()], x, y)


def _members(plain: nn.Module, wrapper: str, n: int) -> list[nn.Module]:
    if wrapper.startswith("vote"):
        return [copy.deepcopy(plain) for _ in range(n)]
    return [noisy(plain, last=wrapper == "sample last")] * n


def noisy(plain: nn.Module, last: bool) -> nn.Module:
    """Return a copy with dropout, by hooks, on the inputs of each layer but the first, or only of the last one."""
    noised = copy.deepcopy(plain)
    kinds = (nn.Embedding, nn.Linear, nn.Conv2d, nn.LSTM, nn.MultiheadAttention)
    layers = [noised.head] if last else [m for m in noised.modules() if isinstance(m, kinds)][1:]
    for layer in layers:
        if not isinstance(layer, nn.Embedding):
            layer.register_forward_pre_hook(
                lambda _, args: tuple(F.dropout(v, P) if isinstance(v, Tensor) else v for v in args)
            )
    return noised


def _passes(models: list[nn.Module], x: Tensor, low: Any) -> Pass:
    """Return a pass of all models, one after another, with the mean and spread of their outputs."""

    def run() -> Any:
        with torch.no_grad(), low():
            outputs = torch.stack([model(x) for model in models])
            return outputs.mean(0), outputs.std(0, correction=0)

    return run


def _by_hand(plain: nn.Module, n: int, x: Tensor, y: Tensor | None, low: Any) -> Pass:
    """Return a pass with stacked weights and one batched product per layer."""
    layers = [module for module in plain.modules() if isinstance(module, nn.Linear)]
    stacked = nn.ParameterList()
    for layer in layers:
        stacked.append(layer.weight.detach().t().repeat(n, 1, 1))
        stacked.append(layer.bias.detach().repeat(n, 1, 1))
    weights, biases = list(stacked)[::2], list(stacked)[1::2]

    def outputs(x: Tensor) -> Tensor:
        h = x.expand(n, *x.shape)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            h = torch.baddbmm(bias, h.relu() if i else h, weight)
        return h

    return _batched_pass(outputs, stacked, n, x, y, low)


def _by_func(
    plain: nn.Module, n: int, x: Tensor, y: Tensor | None, low: Any, compiled: Callable[[Any], Any] | None = None
) -> Pass:
    """Return a pass with one vmap over copies with stacked parameters and buffers, as in the tutorial of torch.func."""
    parameters, buffers = torch.func.stack_module_state([copy.deepcopy(plain) for _ in range(n)])
    shell = copy.deepcopy(plain).to("meta")
    for part in shell.modules():
        # training mode avoids the fused kernels of evaluation, which vmap would call one by one; there is no dropout
        if isinstance(part, Encoder):
            part.train()
    one = torch.func.vmap(
        lambda weights, buffers, x: torch.func.functional_call(shell, (weights, buffers), (x,)), in_dims=(0, 0, None)
    )
    return _batched_pass(lambda x: one(parameters, buffers, x), parameters.values(), n, x, y, low, compiled)


def _batched_pass(
    outputs: Callable[[Tensor], Tensor],
    parameters: Iterable[nn.Parameter | Tensor],
    n: int,
    x: Tensor,
    y: Tensor | None,
    low: Any,
    compiled: Callable[[Any], Any] | None = None,
) -> Pass:
    """Return a pass for the mean and spread of the outputs [n, rows, ...] of all copies, or with a target a training step of all at once."""
    compiled = compiled or (lambda function: function)

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        answers = outputs(x)
        return answers.mean(0), answers.std(0, correction=0)

    if y is None:
        return _without_gradients(compiled(predict), x, low)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with low():
            return CRITERION(outputs(x), y.expand(n, *y.shape))

    return _step(compiled(loss), parameters, x, y)


# ---- floor
def floor(plain: nn.Module, wrapper: str, n: int, x: Tensor, phase: str, device: str, dtype: str) -> tuple[float, str]:
    """Return the seconds of the operations at the best rate, or of the parameters at the best rate of copies, and which of these is larger.

    Work that branches can share is counted once: the layers before voters or risk heads, and the first layer, which has no noise on its inputs.
    A forward pass reads every parameter once; a step of Adam reads and writes it and both of its moments.
    """
    step = phase == "step"
    counts = operations(plain, x, step)
    layers = [
        path
        for path, module in plain.named_modules()
        if any(p.dim() > 1 for p in module.parameters(recurse=False)) and not isinstance(module, nn.Embedding)
    ]
    sizes = {path: sum(p.numel() for p in plain.get_submodule(path).parameters()) for path in ("", *layers)}

    def total(amounts: dict[str, int], kind: str) -> float:
        last = amounts.get(layers[-1], 0)
        if kind in ("vote", "vote rank1"):
            return n * amounts[""]
        if kind == "sculpt":
            return amounts[""] + sum(amounts.get(path, 0) for path in layers[-3:])
        if kind == "sculpt 1":
            return amounts[""] + last
        if kind == "sample" and not step:
            return n * amounts[""] - (n - 1) * amounts.get("entry", 0)
        if kind in ("vote last", "sample last") and not (kind == "sample last" and step):
            return amounts[""] + (n - 1) * last
        if kind == "vote of sculpt last":
            return amounts[""] + (2 * n - 1) * last
        return amounts[""]

    shared = {"sample": "plain", "sample last": "plain", "vote rank1": "plain", "vote dealt": "vote"}
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    moved = 4 * (6 if step else 1) * total(sizes, shared.get(wrapper, wrapper))
    ways = {
        "operations": total(counts, wrapper) / operations_a_second(device, kind),
        "bytes": moved / bytes_a_second(device, int(moved)),
    }
    bound = max(ways, key=lambda way: ways[way])
    return ways[bound], bound
