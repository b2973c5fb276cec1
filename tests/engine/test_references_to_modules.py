"""References of a model to its own modules that `copy.deepcopy` keeps: weak ones, and those of functions."""

import copy
import functools
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import Wrapped, compose, sculpt, vote
from workbench.errors import UnreachedParametersError

WRAPPERS = {
    "vote": lambda: vote.Wrapper(3),
    "sculpt": sculpt.Wrapper,
    "both": lambda: compose(vote.Wrapper(3), sculpt.Wrapper()),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def trunk(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x)) * self.gain


class KeyedWeakly(Net):
    """Finds numbers of its layers in a dict that does not keep them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = weakref.WeakKeyDictionary({self.a: 2.0, self.b: 3.0})
        self.layers = weakref.WeakValueDictionary({"a": self.a, "b": self.b})

    def trunk(self, x: Tensor) -> Tensor:
        for name in ("a", "b"):
            x = torch.tanh(self.layers[name](x) * self.factors.get(self.layers[name], 1.0))
        return x


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, h: Tensor) -> Tensor:
        return h * self.parent().gain.exp()  # type: ignore[operator, union-attr]


class KnowsParent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.child = Child(self)

    def trunk(self, x: Tensor) -> Tensor:
        return self.child(super().trunk(x))


class PatchedLayer(Net):
    """Replaces the forward of a layer by a method that refers to the whole model, as adapters written by hand do."""

    def __init__(self) -> None:
        super().__init__()
        layers, plain = {"b": self.b}, self.a.forward

        def forward(layer: nn.Linear, x: Tensor) -> Tensor:
            return plain(x) * self.gain + layers["b"].bias

        self.a.forward = types.MethodType(forward, self.a)  # type: ignore[method-assign]


class Defaults(Net):
    """Keeps its layers in the defaults of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [lambda x, layer=layer: torch.tanh(layer(x)) for layer in (self.a, self.b)]

        def last(x: Tensor, *, layer: nn.Module = self.c) -> Tensor:
            return layer(x)

        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return self.last(x) * self.gain


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("build", [KeyedWeakly, KnowsParent, PatchedLayer, Defaults])
def test_references_of_a_model_to_its_modules_lead_to_those_of_the_branch(build: Any, wrapper: str, keep: bool) -> None:
    original = build()
    wrapped, x = WRAPPERS[wrapper]()(original).eval(), torch.randn(6, 5)
    if not keep:
        del original  # weak references to it die
    answers = []
    for voter in Wrapped.voters(wrapped):
        model = build().eval()
        model.load_state_dict(voter.state_dict())
        answers.append(model(x))
        torch.testing.assert_close(voter(x), answers[-1])
    expected = torch.stack(answers)
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(y, expected.mean(0))
    torch.testing.assert_close(wrapped(x), expected.mean(0))
    if wrapper != "sculpt":
        torch.testing.assert_close(getattr(risk, "epistemic", risk), expected.std(0, correction=0))


class HoldsParameters(Net):
    def __init__(self) -> None:
        super().__init__()
        weight, bias = self.c.weight, self.c.bias
        self.last = lambda h: F.linear(h, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.trunk(x)) * self.gain


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_heads_and_voters_that_would_use_the_given_parameters_are_refused(wrapper: str, gradients: bool) -> None:
    wrapped = WRAPPERS[wrapper]()(HoldsParameters())
    with torch.set_grad_enabled(gradients), pytest.raises(UnreachedParametersError, match=r"c\.bias, c\.weight"):
        wrapped(torch.randn(6, 5), return_risk=True)


class HoldsWeight(Net):
    def __init__(self) -> None:
        super().__init__()
        self.held = types.SimpleNamespace(weight=self.c.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.trunk(x), self.held.weight, self.c.bias) * self.gain


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("with_heads", [True, False])
def test_a_weight_that_is_used_without_its_factors_is_refused(with_heads: bool, gradients: bool) -> None:
    wrapper: Any = vote.Wrapper(3, share="rank1")
    wrapped = (compose(wrapper, sculpt.Wrapper()) if with_heads else wrapper)(HoldsWeight()).eval()
    with torch.set_grad_enabled(gradients), pytest.raises(UnreachedParametersError, match=r"uses c\.weight by"):
        wrapped(torch.randn(6, 5), return_risk=True)


LAYER: Any = None


def patch_forward(wrapped: Any) -> None:
    wrapped.c.forward = lambda h: F.linear(h, LAYER.weight, LAYER.bias)


def add_hook(wrapped: Any) -> None:
    wrapped.c.register_forward_hook(lambda layer, inputs, output: output + F.linear(*inputs, LAYER.weight, LAYER.bias))


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("change", [patch_forward, add_hook])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_layers_reached_by_a_global_name_from_a_later_function_are_refused(
    wrapper: str, change: Any, gradients: bool, called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped, x = WRAPPERS[wrapper]()(Net()).eval(), torch.randn(6, 5)
    monkeypatch.setitem(globals(), "LAYER", wrapped.c)
    with torch.set_grad_enabled(gradients):
        if called:
            wrapped(x, return_risk=True)
        change(wrapped)
        with pytest.raises(UnreachedParametersError, match=r"c\.bias, c\.weight by a reference"):
            wrapped(x, return_risk=True)


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_hooks_reach_the_layer_of_their_branch_by_their_argument(wrapper: str, called: bool) -> None:
    wrapped, x = WRAPPERS[wrapper]()(Net()).eval(), torch.randn(6, 5)
    if called:
        wrapped(x, return_risk=True)
    wrapped.c.register_forward_hook(lambda layer, inputs, output: output + F.linear(*inputs, layer.weight, layer.bias))
    answers = [(voter.c(voter.trunk(x))) * voter.gain for voter in Wrapped.voters(wrapped)]
    torch.testing.assert_close(wrapped(x, return_risk=True)[0], torch.stack(answers).mean(0))


def test_inputs_may_be_computed_from_the_weights_that_the_model_shows() -> None:
    wrapped, x = vote.Wrapper(3)(Net()).eval(), torch.randn(6, 5)
    x = x * wrapped.c.weight.sum()
    expected = torch.stack([voter(x) for voter in Wrapped.voters(wrapped)]).mean(0)
    torch.testing.assert_close(wrapped(x, return_risk=True)[0], expected)


class Recorder:
    """Notes the mean output of the layers that call it as a hook."""

    def __init__(self, notes: list[Tensor]) -> None:
        self.notes = notes

    def __call__(self, module: Any, args: Any, output: Tensor) -> None:
        self.notes.append(output.mean())


class Hooked(nn.Module):
    """Adds to its output what hooks of its layers have noted in a list of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, self.notes, self.seen = nn.Linear(3, 4), nn.Linear(4, 2), [], [2.0]
        notes, append, seen, outside = self.notes, self.notes.append, self.seen, []
        self.recorder = Recorder(self.notes) if way == "recorder" else None
        hooks: dict[str, Any] = {
            "method": self.note,
            "recorder": self.recorder,
            "unchanged list": lambda module, args, output: self.note(module, args, seen[0] * output),
            "list outside": lambda module, args, output: outside.append(output) or self.note(module, args, output),
            "closure": lambda module, args, output: notes.append(output.mean()),
            "default": lambda module, args, output, store=notes: store.append(output.mean()),
            "method of the list": lambda module, args, output: append(output.mean()),
            "partial": functools.partial(lambda store, module, args, output: store.append(output.mean()), notes),
            "object": Recorder(notes),
        }
        for layer in (self.a, self.b):
            layer.register_forward_hook(hooks[way])

    def note(self, module: Any, args: Any, output: Tensor) -> None:
        self.notes.append(output.mean())

    def forward(self, x: Tensor) -> Tensor:
        self.notes.clear()
        y = self.b(self.a(x))
        return y + torch.stack([torch.zeros(()), *self.notes]).sum()


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("wrapper", [vote.Wrapper(3), sculpt.Wrapper(n_layers=1)], ids=repr)
@pytest.mark.parametrize("way", ["method", "unchanged list", "list outside"])
def test_hooks_write_into_the_list_of_the_branch(way: str, wrapper: Any, called: bool) -> None:
    model, x = Hooked(way), torch.randn(5, 3)
    if called:
        model(x)
    wrapped = wrapper(model).eval()
    plain = [Hooked(way) for _ in range(3)] if isinstance(wrapper, vote.Wrapper) else [Hooked(way)]
    voters = wrapped.voters() if isinstance(wrapper, vote.Wrapper) else [model]
    for one, voter in zip(plain, voters, strict=True):
        one.load_state_dict(voter.state_dict())
    for inputs in (x, x + 1, x[:2]):
        y, _ = wrapped(inputs, return_risk=True)
        torch.testing.assert_close(y, torch.stack([one(inputs) for one in plain]).mean(0))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("wrapper", [vote.Wrapper(3), sculpt.Wrapper(n_layers=1)], ids=repr)
@pytest.mark.parametrize("way", ["closure", "default", "method of the list", "partial", "object", "recorder"])
def test_hooks_that_hold_a_list_of_the_model_are_refused(way: str, wrapper: Any, called: bool) -> None:
    model = Hooked(way)
    if called:
        model(torch.randn(5, 3))
    wrapped = wrapper(model).eval()
    with pytest.raises(RuntimeError, match=r"a hook of a holds a list .* \(notes\).* as a method of the module"):
        wrapped(torch.randn(5, 3), return_risk=True)


class Meter(nn.Module):
    """Counts in a function of its own, which it makes anew when it is unpickled, as metrics of torchmetrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients, self.total = False, torch.zeros(())
        self.update = self.counting(self.update)

    def update(self, value: Tensor) -> None:
        self.total = self.total + value

    def counting(self, update: Any) -> Any:
        @functools.wraps(update)
        def counted(value: Tensor) -> None:
            with torch.set_grad_enabled(self.gradients):
                update(value)

        return counted

    def reset(self) -> None:
        self.total = torch.zeros(())

    def forward(self, value: Tensor) -> Tensor:
        self.reset()
        self.gradients = True
        self.update(value)
        self.gradients = False
        return self.total

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "update"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.update = self.counting(self.update)


class Measures(Net):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()


@pytest.mark.parametrize("name", WRAPPERS)
def test_functions_that_a_part_leaves_out_of_its_state_work_on_the_copy(name: str) -> None:
    model = Measures()
    wrapped: Any = WRAPPERS[name]()(model)
    others = [copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), wrapped.unwrap(), *wrapped.voters()]
    for number, each in enumerate([model, wrapped, *others]):
        each.meter.reset()
        each.meter.update(torch.tensor(float(number)))
    assert [float(each.meter.total) for each in [model, wrapped, *others]] == list(range(2 + len(others)))
    assert wrapped.meter(torch.ones((), requires_grad=True)).requires_grad


def test_a_hook_that_holds_its_module_gets_that_of_the_branch_and_those_of_voters_their_own() -> None:
    """As the hooks of captum's layer attributions do, which look for the result under the wrapped model's module."""

    def recorded(model: Any) -> dict[nn.Module, Tensor]:
        results: dict[nn.Module, Tensor] = {}

        def hook_of(layer: nn.Module) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                results[layer] = output

            return hook

        handle = model[1].register_forward_hook(hook_of(model[1]))
        model(x)
        handle.remove()
        return results

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    wrapped: Any = vote.Wrapper(3)(nn.Sequential(nn.Linear(3, 5), nn.Tanh())).eval()
    assert wrapped[1] not in recorded(wrapped)
    for voter in wrapped.voters():
        torch.testing.assert_close(recorded(voter)[voter[1]], voter(x))


class Extracting(Net):
    """Records what a layer computes, by a hook that its first call registers, as the extractors of vit_pytorch do."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[Any] = []
        self.hidden: Tensor | None = None

    def record(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.hidden = output.detach()

    def forward(self, x: Tensor) -> Any:  # the answer, and what the layer has computed
        if not self.handles:
            self.handles.append(self.b.register_forward_hook(self.record))
        y = super().forward(x)
        assert self.hidden is not None
        return y, self.hidden


@pytest.mark.parametrize("share", [None, 1])
def test_a_hook_that_forward_registers_is_that_of_each_branch_and_its_handle_removes_it(share: int | None) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    wrapped: Any = vote.Wrapper(3, share=share)(Extracting()).eval()
    voters = [copy.deepcopy(voter) for voter in wrapped.voters()]
    expected = [torch.stack(leaves) for leaves in zip(*(voter(x) for voter in voters), strict=True)]
    for _ in range(3):
        prediction, risk = wrapped(x, return_risk=True)
        for i, values in enumerate(expected):
            torch.testing.assert_close(prediction[i], values.mean(0))
            torch.testing.assert_close(risk[i], values.std(0, correction=0), atol=1e-6, rtol=1e-5)
    [handle] = wrapped.handles
    assert len(wrapped.b._forward_hooks) == 1
    handle.remove()
    assert not wrapped.b._forward_hooks


class Skip:
    """Holds what a layer computed last, as the hooks of fastai's U-Nets do."""

    def __init__(self, layer: nn.Module) -> None:
        self.stored: Any = None
        self.handle = layer.register_forward_hook(self.store)

    def store(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.stored = output.detach()


class Skipping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.skip = Skip(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x) + self.skip.stored)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_hook_writes_into_the_object_that_the_model_reads_whatever_was_collected(wrapper: str, called: bool) -> None:
    model = Skipping().eval()
    if called:
        with torch.no_grad():
            model(torch.zeros(2, 5))
    wrapped: Any = WRAPPERS[wrapper]()(model)
    voters = [Skipping() for _ in wrapped.voters()]
    for voter, state in zip(voters, wrapped.voters(), strict=True):
        voter.load_state_dict(state.state_dict())
    for rows in (4, 4, 3):
        gc.collect()  # of what handles refer to weakly
        x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(wrapped(x), torch.stack([voter(x) for voter in voters]).mean(0))
