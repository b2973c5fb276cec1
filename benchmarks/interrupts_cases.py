"""Cases of the benchmark `interrupts`: models, wrappers and actions, and all state that an interrupt could leave behind."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import workbench
from workbench import augment, compose, laplace, neo, sample, sculpt, snapshot, swag, vote

if TYPE_CHECKING:
    pass

X = torch.linspace(-2, 2, 48).reshape(16, 3)
Y = X.sum(1, keepdim=True).sin()


class Net(nn.Module):
    """A network with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


class Counting(Net):
    """`Net` with a counter of its calls, which makes passes under vmap impossible."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Quiet(Net):
    """`Net` without dropout, so that branches can share a trunk in training mode."""

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


# ---- state
def surroundings() -> dict[str, Any]:
    """Return the thread-local state of torch."""
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
    """Return everything in a model that an interrupt could change."""
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
    """Return predictions and risks in evaluation mode with a fixed seed, without changing modes or random states."""
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
    return [name for name in before if repr(before[name]) != repr(after[name])]  # repr, since NaN equals NaN there


# ---- cases
class Case:
    """One action on a wrapped model, to be interrupted repeatedly.

    Args:
        name: name of the wrapper.
        strategy: strategy of the engine.
        action: one of `ACTIONS`.
        cls: class of the model.
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
        answers(copy.deepcopy(self.wrapped))  # raises if the executor cannot run this wrapper

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

    def count(self, interruption: Any) -> int:
        """Return the number of events in a run, counted by an interruption without a moment; the model stays as it is."""
        trial = copy.copy(self)
        trial.wrapped, trial.given = copy.deepcopy(self.wrapped), copy.deepcopy(self.given)
        trial.run()
        with interruption:
            trial.run()
        return int(interruption.count)

    def attack(self, interruption: Any) -> tuple[bool, list[str]]:
        """Interrupt one run; return whether it was interrupted, and what was wrong afterwards."""
        wrapped, model = copy.deepcopy(self.wrapped), copy.deepcopy(self.given)
        trial = copy.copy(self)
        trial.wrapped, trial.given = wrapped, model
        if self.action in ("train", "eval", "loss") and interruption.k_odd:
            trial.run()  # so that not only first calls are interrupted
        answers_before = answers(wrapped)
        twin = copy.copy(trial)
        twin.wrapped, twin.given = copy.deepcopy(wrapped), copy.deepcopy(model)
        before, context, plain = state_of(wrapped), surroundings(), state_of(model)
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
        wrong = [f"torch: {name}" for name in differences(context, surroundings())]
        torch.set_grad_enabled(True)
        after, drawn = state_of(wrapped), torch.get_rng_state().tolist()
        torch.set_rng_state(torch.tensor(context["random"], dtype=torch.uint8))
        first = answers(wrapped)
        if repr(first) != repr(answers(wrapped)):
            wrong.append("two answers differ")
        if self.action == "fit":
            modes = set(after["training"].values())
            wrong += [] if len(modes) == 1 else ["training flags differ"]
            # only earlier entries are compared: an interrupted `fit` may have added some, such as a standardization
            for name in ("hooks", "forward", "requires_grad", "dtypes"):
                same = all(after[name].get(key, value) == value for key, value in before[name].items())
                wrong += [] if same else [name]
            fresh = copy.deepcopy(wrapped)
            wrong += [] if repr(answers(fresh)) == repr(first) else ["a copy answers otherwise"]
            return True, wrong
        changed = differences(before, after)
        if "torch: random" in wrong or (self.action in ("train", "eval", "loss", "load", "closed") and changed):
            twin.run()  # the state may also be that after a complete call
            if drawn == torch.get_rng_state().tolist() and "torch: random" in wrong:
                wrong.remove("torch: random")
            torch.set_rng_state(torch.tensor(context["random"], dtype=torch.uint8))
            changed = [
                name for name in differences(state_of(twin.wrapped), after) if name in changed and name != "objects"
            ]
            fresh = copy.deepcopy(wrapped)
            wrong += [] if repr(answers(fresh)) == repr(first) else ["a copy answers otherwise"]
        elif repr(answers_before) != repr(first):
            wrong.append("the answer has changed")
        wrong += changed
        if self.action not in ("train", "loss"):
            changed = differences(plain, state_of(model))
            if changed and self.action == "reload":  # the state may also be that after a complete call
                twin.run()
                changed = differences(state_of(twin.given), state_of(model))
            wrong += [f"given: {name}" for name in changed]
        if self.action == "save":
            no_other_files = [file.name for file in self.path.parent.iterdir()] == ["model"]
            workbench.load(self.path, copy.deepcopy(self.given))  # verifies all checksums
            wrong += [] if no_other_files else ["a leftover file"]
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
    """Return all possible combinations of wrapper, executor and action, each with the class of its model."""
    result = []
    for name in WRAPPERS:
        for action in ACTIONS:
            executors = STRATEGIES if action in ("train", "eval", "loss") else ("auto",)
            for strategy in executors:
                if strategy == "replay" and name not in ("trunk", "sculpt"):
                    continue
                if action == "closed" and name not in ("neo", "laplace", "swag", "snapshot", "all"):
                    continue
                if name == "augment" and action in ("load", "reload", "save"):
                    continue  # its transform is a function, which cannot be saved
                if (
                    name in ("neo", "laplace", "swag", "snapshot", "augment")
                    and strategy in ("vmap", "rescue")
                    and action != "eval"
                ):
                    continue
                result.append((name, strategy, action, {"loop": Counting, "replay": Quiet}.get(strategy, Net)))
    return result
