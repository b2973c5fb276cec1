"""Wrappers as decorators of functions and classes, in the forms that users write."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from helpers.models import mlp
from torch import Tensor, nn

from workbench import is_wrapped, sample, sculpt, vote

_global_net = mlp()


def global_helper(x: Tensor) -> Tensor:
    return _global_net(x) + 1


@vote.Wrapper  # type: ignore[arg-type]
def bare_outer(x: Tensor) -> Tensor:
    return 2 * global_helper(x)


def test_a_bare_decorator_on_a_function_wraps_what_helpers_use_and_only_there() -> None:
    x = torch.randn(6, 3)
    wrapped: Any = bare_outer
    assert is_wrapped(wrapped)
    y, risk = wrapped.eval()(x, return_risk=True)
    assert bool((risk > 0).all())
    assert torch.equal(global_helper(x), _global_net(x) + 1)
    answers = torch.stack([voter(x) for voter in wrapped.voters()])
    assert torch.allclose(y, answers.mean(0), atol=1e-6)


def test_a_decorated_function_leaves_its_model_alone() -> None:
    model = mlp()

    @vote.Wrapper()
    def wrapped_model(x: Tensor) -> Tensor:
        logits = model(x)
        return logits

    before = copy.deepcopy(model.state_dict())
    x = torch.randn(5, 3)
    out = wrapped_model(x)
    assert out.shape == (5, 1)
    loss = wrapped_model(x, return_risk=True)[0].sum()
    loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model(x), mlp_of(before)(x))


def mlp_of(state: dict[str, Tensor]) -> nn.Sequential:
    model = mlp()
    model.load_state_dict(state)
    return model


@sample.Wrapper(n_samples=5)
class Modern(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, width)
        self.fc2 = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


@vote.Wrapper  # type: ignore[arg-type]
class OldStyle(nn.Module):
    def __init__(self) -> None:
        super(OldStyle, self).__init__()  # noqa: UP008
        self.fc1 = nn.Linear(3, 8)
        self.fc2 = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class Child(OldStyle):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


@pytest.mark.parametrize("cls", [Modern, OldStyle, Child])
def test_a_decorated_class_builds_wrapped_instances(cls: type[nn.Module]) -> None:
    net: Any = cls()
    x = torch.randn(6, 3)
    assert isinstance(net, cls)
    assert isinstance(net, nn.Module)
    assert is_wrapped(net)
    y, risk = net.eval()(x, return_risk=True)
    assert y.shape == risk.shape == (6, 1)
    assert bool((risk > 0).any())
    twin: Any = cls()
    twin.load_state_dict(net.state_dict())
    torch.manual_seed(1)
    expected = net(x)
    torch.manual_seed(1)
    assert torch.equal(twin.eval()(x), expected)


def test_a_decorated_class_takes_its_own_arguments() -> None:
    net: Any = Modern(width=4)
    assert net.fc1.weight.shape == (4, 3)
    assert Modern.__name__ == "Modern"
    assert isinstance(copy.deepcopy(net), Modern)
    for cls in (Modern, OldStyle, Child):
        built: Any = cls()
        loaded: Any = pickle.loads(pickle.dumps(built))
        assert type(loaded) is type(built)
        x = torch.randn(4, 3)
        torch.manual_seed(1)
        expected = built.eval()(x)
        torch.manual_seed(1)
        assert torch.equal(loaded.eval()(x), expected)


@vote.Wrapper(2)
class OldStyleEverywhere(nn.Module):
    """Names itself in every super."""

    def __init__(self, width: int = 4) -> None:
        super(OldStyleEverywhere, self).__init__()  # noqa: UP008
        self.fc = nn.Linear(3, width)
        self.switched = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def train(self, mode: bool = True) -> Any:
        self.switched += 1
        return super(OldStyleEverywhere, self).train(mode)  # noqa: UP008

    def extra_repr(self) -> str:
        return super(OldStyleEverywhere, self).extra_repr() + "old"  # noqa: UP008


def test_old_style_super_in_every_method() -> None:
    net: Any = OldStyleEverywhere(width=2)
    x = torch.randn(4, 3)
    before = net.switched
    y, risk = net.eval()(x, return_risk=True)
    assert y.shape == risk.shape == (4, 2)
    assert net.switched == before + 1
    assert not net.fc.training
    assert "old" in repr(net)
    assert list(inspect.signature(OldStyleEverywhere).parameters) == ["width"]
    assert inspect.getdoc(OldStyleEverywhere) == "Names itself in every super."


def test_two_decorators_on_a_class_compose() -> None:
    @vote.Wrapper(3)
    @sculpt.Wrapper(n_layers=1)
    class Both(nn.Module):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.fc1 = nn.Linear(3, width)
            self.fc2 = nn.Linear(width, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(torch.tanh(self.fc1(x)))

    built = Both(width=5)
    assert isinstance(built, Both)
    net: Any = built
    x = torch.randn(4, 3)
    y, risk = net.eval()(x, return_risk=True)
    assert risk.names() == ("aleatoric", "epistemic", "total")
    answers = torch.stack([voter(x) for voter in net.voters()])
    assert torch.allclose(y, answers.mean(0), atol=1e-6)
    assert torch.allclose(risk.epistemic, answers.std(0, correction=0), atol=1e-6)


def test_a_decorated_child_uses_its_own_forward_in_every_voter() -> None:
    net: Any = Child()
    x = torch.randn(4, 3)
    answers = torch.stack([voter(x) for voter in net.eval().voters()])
    y, risk = net(x, return_risk=True)
    assert torch.allclose(y, answers.mean(0), atol=1e-6)
    assert torch.allclose(risk, answers.std(0, correction=0), atol=1e-6)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.startswith("gain"):
                p.zero_()
    assert torch.equal(net(x), torch.zeros(4, 1))
