"""What `torch.func` lists as its limitations, done by wrapped models: the right answer, or a helpful error.

The code in the models is that of the page on UX limitations of `torch.func`. docs/limitations.md names each.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from helpers.reference_from_copies import NOISE, VOTERS, WRAPPERS, Net, asked, branches, close, expected, inputs, seeded
from torch import Tensor, nn

from workbench import vote

T = TypeVar("T", bound=type[nn.Module])
LIMITS: dict[str, type[nn.Module]] = {}
WORKS_UNDER_VMAP: list[str] = []


def limit(name: str, vmap: bool = False) -> Callable[[T], T]:
    """Register a model; `vmap` says that `torch.func` promises to run it in one pass."""

    def register(cls: T) -> T:
        LIMITS[name] = cls
        if vmap:
            WORKS_UNDER_VMAP.append(name)
        return cls

    return register


# ---- globals -------------------------------------------------------------------------------------------------------

intermediate: Any = None
STORE: dict[str, Any] = {}


def f(x: Tensor) -> Tensor:
    global intermediate
    intermediate = x.sin()  # limit: global_helper
    z = intermediate.sin()
    return z


@limit("global")
class AssignsGlobal(Net):
    def forward(self, x: Tensor) -> Tensor:
        global intermediate
        intermediate = self.h(x).sin()  # limit: global
        return intermediate.sin()


@limit("global_helper")
class CallsAssigningHelper(Net):
    def forward(self, x: Tensor) -> Tensor:
        return f(self.h(x))


@limit("global_container")
class FillsGlobalContainer(Net):
    def forward(self, x: Tensor) -> Tensor:
        STORE["intermediate"] = self.h(x).sin()  # limit: global_container
        return STORE["intermediate"].sin()


@limit("class_attribute")
class SetsClassAttribute(Net):
    intermediate: Any = None

    def forward(self, x: Tensor) -> Tensor:
        type(self).intermediate = self.h(x).sin()  # limit: class_attribute
        return type(self).intermediate.sin()


@limit("stored_by_hook")
class StoredByHook(Net):
    features: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.c.register_forward_hook(lambda module, args, output: self.features.append(output))  # limit: stored_by_hook


def left_behind(name: str) -> Tensor:
    """What a model left outside of itself, read: a tensor of a vmap that is over can't be."""
    places = {
        "global": lambda: intermediate,
        "global_helper": lambda: intermediate,
        "global_container": lambda: STORE["intermediate"],
        "class_attribute": lambda: SetsClassAttribute.intermediate,
        "stored_by_hook": lambda: torch.stack(StoredByHook.features),
    }
    try:
        return torch.tensor(places[name]().tolist()) if name in places else torch.zeros(())
    finally:
        StoredByHook.features.clear()


# ---- torch.autograd inside forward, and the torch.func equivalents -------------------------------------------------


@limit("autograd_grad")
class AutogradGrad(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()  # limit: autograd_grad
            (grad,) = torch.autograd.grad(self.h(x).sum(), x, create_graph=True)
        return grad


@limit("autograd_backward")
class AutogradBackward(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()  # limit: autograd_backward
            y = self.h(x)
            torch.autograd.backward(y.sum(), inputs=[x], retain_graph=True)
        assert x.grad is not None
        return y + x.grad


@limit("functional_jvp")
class FunctionalJvp(Net):
    def forward(self, x: Tensor) -> Tensor:
        from torch.autograd.functional import jvp

        return jvp(self.h, x, torch.ones_like(x), create_graph=True)[1]  # limit: functional_jvp


@limit("functional_jacobian")
class FunctionalJacobian(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.autograd.functional.jacobian(self.h, x[0], create_graph=True)  # limit: functional_jacobian


@limit("functional_hessian")
class FunctionalHessian(Net):
    def forward(self, x: Tensor) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            return self.h(row).sum()

        return torch.autograd.functional.hessian(energy, x[0], create_graph=True)  # limit: functional_hessian


@limit("func_grad", vmap=True)
class FuncGrad(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: self.h(t).sum())(x)


@limit("func_vjp", vmap=True)
class FuncVjp(Net):
    def forward(self, x: Tensor) -> Tensor:
        y, pullback = torch.func.vjp(self.h, x)[:2]
        return y + pullback(torch.ones_like(y))[0]


# ---- mutation ------------------------------------------------------------------------------------------------------


@limit("pop_and_print", vmap=True)
class PopsAndPrints(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lst = [0, 1, 2, 3]

    def forward(self, x: Tensor) -> Tensor:
        self.lst.pop()
        print("hello!")
        return self.h(x) * len(self.lst)


@limit("add_into_unbatched")
class AddsIntoUnbatched(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.h(x)
        x = torch.zeros(5, 3)
        x.add_(y)  # limit: add_into_unbatched
        return x


@limit("add_into_batched", vmap=True)
class AddsIntoBatched(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.h(x)
        x = torch.zeros_like(y)
        x.add_(y)
        return x


@limit("add_into_input")
class AddsIntoInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(self.h(x))  # limit: add_into_input
        return x * 1


def diag_embed_zeros(vec: Tensor) -> Tensor:
    assert vec.dim() == 1
    result = torch.zeros(vec.shape[0], vec.shape[0])
    result.diagonal().copy_(vec)  # limit: diag_embed_zeros
    return result


def diag_embed_new_zeros(vec: Tensor) -> Tensor:
    assert vec.dim() == 1
    result = vec.new_zeros(vec.shape[0], vec.shape[0])
    result.diagonal().copy_(vec)
    return result


@limit("diag_embed_zeros")
class DiagEmbedZeros(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([diag_embed_zeros(vec) for vec in self.h(x)])


@limit("diag_embed_new_zeros", vmap=True)
class DiagEmbedNewZeros(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([diag_embed_new_zeros(vec) for vec in self.h(x)])


@limit("out")
class WritesOut(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.h(x)
        doubled = torch.empty_like(h)
        torch.mul(h.detach(), 2, out=doubled)  # limit: out
        return h + doubled


# ---- control flow, values and shapes that depend on the data -------------------------------------------------------


def relu(x: Tensor) -> Tensor:
    if x > 0:  # limit: data_dependent_if
        return x
    return torch.zeros(())


def custom_dot(x: Tensor) -> Tensor:
    if x.dim() == 1:
        return torch.dot(x, x)
    return (x * x).sum()


@limit("data_dependent_if")
class DataDependentIf(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([relu(value) for value in self.h(x).flatten()])


@limit("shape_dependent_if", vmap=True)
class ShapeDependentIf(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.h(x)
        return torch.stack([custom_dot(row) for row in h]) + custom_dot(h)


@limit("data_dependent_while")
class DataDependentWhile(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.h(x)
        while h.abs().max() > 0.3:  # limit: data_dependent_while
            h = h / 2
        return h


@limit("item")
class Item(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.h(x)
        return h * h.mean().item()  # limit: item


@limit("nonzero")
class Nonzero(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.h(x)
        return h * len(torch.nonzero(h > 0))  # limit: nonzero


@limit("is_nonzero")
class IsNonzero(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.h(x)
        return h * 2 if torch.is_nonzero(h.sum() > 0) else h  # limit: is_nonzero


@limit("nonzero_of_input", vmap=True)
class NonzeroOfInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.h(x[torch.nonzero(x[:, 0] > 0).squeeze(1)])


# ---- the right answer, or an error that helps ----------------------------------------------------------------------


def built(name: str) -> nn.Module:
    with seeded(0):
        return LIMITS[name]().eval()


def line_of(name: str) -> str:
    """Where a model does what it is here for, as error messages write it."""
    source = inspect.getsource(inspect.getmodule(line_of)).splitlines()  # type: ignore[arg-type]
    (number,) = [i for i, line in enumerate(source, 1) if line.endswith(f"# limit: {name}")]
    return f"test_limits.py:{number}"


FOUND_AFTERWARDS = (
    "global",
    "global_helper",
    "global_container",
    "class_attribute",
    "stored_by_hook",
    "add_into_input",
)


def helps(error: Exception, name: str) -> None:
    """Assert that an error names the model, the line (where it is an operation that fails) and what to do."""
    line = () if name in FOUND_AFTERWARDS else (line_of(name),)
    for words in (LIMITS[name].__name__, 'strategy="loop"', *line):
        assert words in str(error), f"{words} is not in: {error}"


@pytest.mark.parametrize("strategy", ["loop", "auto"])
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("name", LIMITS)
def test_every_model_is_right(name: str, kind: str, strategy: str) -> None:
    plain = built(name)
    with seeded(1):
        wrapped: Any = WRAPPERS[kind](strategy, NOISE)(copy.deepcopy(plain))
    for seed in (1, 2):  # the second call knows what the first one found
        answer, left = asked(wrapped, (inputs(seed),)), left_behind(name)
        close(answer, expected(kind, plain, wrapped, (inputs(seed),), NOISE))
        assert left.isfinite().all()
        if name == "pop_and_print":
            plain.lst.pop()  # type: ignore[operator, union-attr]
            assert wrapped.lst == plain.lst


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("name", LIMITS)
def test_under_vmap_it_is_right_or_refused_with_model_line_and_remedy(name: str, kind: str) -> None:
    plain = built(name)
    noise = 0.0  # with noise, vmap draws other numbers than a loop
    with seeded(1):
        wrapped: Any = WRAPPERS[kind]("vmap", noise)(copy.deepcopy(plain))
    try:
        answer, left = asked(wrapped, (inputs(),)), left_behind(name)
    except (RuntimeError, ValueError) as error:
        assert name not in WORKS_UNDER_VMAP
        helps(error, name)
        return
    close(answer, expected(kind, plain, wrapped, (inputs(),), noise))
    assert left.isfinite().all()


def test_why_the_loop_runs_is_explained_with_the_line() -> None:
    wrapped: Any = vote.Wrapper(VOTERS, share=1)(built("item"))
    wrapped(inputs(), return_risk=True)
    report = wrapped.explain()
    assert repr(report) == str(report)  # as lines
    assert ".item()" in report
    assert line_of("item") in report


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_input_ends_as_if_one_branch_had_run(kind: str) -> None:
    plain = built("add_into_input")
    wrapped: Any = WRAPPERS[kind]("auto", 0.0)(copy.deepcopy(plain))
    x = inputs()
    asked(wrapped, (x,))
    ends = [inputs() + model.h(inputs()) for _, model in branches(kind, plain, wrapped, 0.0)]  # type: ignore[operator]
    assert any(torch.allclose(x, end, atol=1e-5) for end in ends)


class NonzeroOut(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nonzero(self.h(x) > 0).float()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_an_output_of_another_shape_in_each_branch_is_refused(kind: str) -> None:
    wrapped: Any = WRAPPERS[kind]("auto", NOISE)(NonzeroOut()).eval()
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    with pytest.raises(
        RuntimeError, match=r"output has different shapes in different branches: .*; return a fixed shape"
    ):
        asked(wrapped, (x,))
