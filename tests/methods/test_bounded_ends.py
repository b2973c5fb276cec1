"""Risk heads of models that end in a function of limited range: compared with heads that end in their last layer."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.training_models import quiet
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, sample, sculpt, vote

X = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
Y = torch.rand(12, 1, generator=torch.Generator().manual_seed(1))

# the end, and the raw output that its risk head should have for the result z of its last layer
ENDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "softplus": (F.softplus, lambda z: z),
    "relu": (torch.relu, lambda z: z - 16),
    "exp": (torch.exp, lambda z: z.exp().expm1().log()),
    "sigmoid": (torch.sigmoid, lambda z: z.sinh().where(z > 0, z)),
    "tanh": (torch.tanh, lambda z: (2 * z).sinh().where(z > 0, 2 * z)),
    "elu": (F.elu, lambda z: z),
}


class Net(nn.Module):
    """A network of one output with a given end, which forward names."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.hidden, self.last, self.end = nn.Linear(2, 8), nn.Linear(8, 1), end

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x).tanh())


class Softplus(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(super().forward(x))


class Relu(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.relu().reshape(-1, 1)


class Exp(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp()


class Sigmoid(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


class Tanh(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.decoded(self.hidden(x).tanh())

    def decoded(self, h: Tensor) -> Tensor:
        return torch.tanh(self.last(h))


class Elu(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = F.elu(super().forward(x))
        if self.training:
            assert y.isfinite().all()
        return y


MODELS: dict[str, type[Net]] = {
    "softplus": Softplus,
    "relu": Relu,
    "exp": Exp,
    "sigmoid": Sigmoid,
    "tanh": Tanh,
    "elu": Elu,
}
MODULES = {"softplus": nn.Softplus, "relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "elu": nn.ELU}


def made(end: str, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return MODELS[end](end)


def head_of(state: dict[str, Tensor], voter: int | None = None) -> Tensor:
    """Return the result of the last layer of a risk head, from its tensors; all layers of the model have their own in it."""

    def tensor(name: str) -> Tensor:
        return state[f"{name}@sculpt"] if voter is None else state[f"{name}@sculpt@vote"][voter]

    h = torch.tanh(X @ tensor("hidden.weight").T + tensor("hidden.bias"))
    return h @ tensor("last.weight").T + tensor("last.bias")


@pytest.mark.parametrize("end", ENDS)
def test_a_risk_head_ends_as_its_last_layer_does_and_the_prediction_stays(end: str) -> None:
    plain = made(end)
    wrapped: Any = sculpt.Wrapper()(plain).eval()
    y, risk = wrapped(X, return_risk=True)
    assert torch.equal(y, plain(X))
    assert torch.equal(wrapped(X), plain(X))
    expected = F.softplus(ENDS[end][1](head_of(wrapped.state_dict()).double()))
    torch.testing.assert_close(risk.double(), expected, rtol=2e-5, atol=1e-6)
    assert 0.1 < risk.min() < risk.max() < 5  # about as heads without an end start


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("order", ["together", "voters first", "heads first"])
def test_each_voter_has_such_a_head(end: str, order: str) -> None:
    plain, wrappers = made(end), (vote.Wrapper(3), sculpt.Wrapper())
    if order == "together":
        wrapped: Any = compose(*wrappers)(plain).eval()
    else:
        first, second = wrappers if order == "voters first" else reversed(wrappers)
        wrapped = second(first(plain)).eval()
    _, risk = wrapped(X, return_risk=True)
    raw = torch.stack([ENDS[end][1](head_of(wrapped.state_dict(), voter).double()) for voter in range(3)])
    expected = F.softplus(raw).square().mean(0).sqrt()
    torch.testing.assert_close(risk.aleatoric.double(), expected, rtol=2e-5, atol=1e-6)
    assert 0.1 < risk.aleatoric.min() < risk.aleatoric.max() < 5
    loss = wrapped.loss(None, X, Y).double()
    means = torch.stack([voter(X).double() for voter in wrapped.voters()])
    likelihood = -torch.distributions.Normal(means, F.softplus(raw) + 1e-9).log_prob(Y.double()).mean()
    torch.testing.assert_close(loss, likelihood, rtol=1e-4, atol=1e-5)


class Held(Net):
    """Keeps its end as an attribute."""

    def __init__(self, end: str) -> None:
        super().__init__(end)
        self.activation = ENDS[end][0]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(super().forward(x))


@pytest.mark.parametrize("end", ENDS)
def test_ends_that_the_model_holds_are_those_of_functions(end: str) -> None:
    plain = made(end)
    other = Held(end)
    other.load_state_dict(plain.state_dict())
    wrapped: list[Any] = [sculpt.Wrapper()(model).eval() for model in (plain, other)]
    wrapped[1].load_state_dict(wrapped[0].state_dict())
    answers = [each(X, return_risk=True) for each in wrapped]
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


@pytest.mark.parametrize("end", MODULES)
def test_ends_that_are_modules_are_those_of_functions(end: str) -> None:
    plain = made(end)
    layers = nn.Sequential(plain.hidden, nn.Tanh(), plain.last, MODULES[end]())
    torch.manual_seed(5)
    one: Any = sculpt.Wrapper()(plain).eval()
    torch.manual_seed(5)
    other: Any = sculpt.Wrapper()(layers).eval()
    assert torch.equal(one(X, return_risk=True)[1], other(X, return_risk=True)[1])


# far above, softplus and relu are lines, as above
@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "unit"),
    [
        *((end, 1e-3) for end in ("softplus", "relu", "exp", "sigmoid", "tanh")),
        ("exp", 1e3),
        ("sigmoid", 1e3),
        ("tanh", 1e3),
    ],
)
def test_noise_far_below_and_above_the_range_is_learned(end: str, unit: float) -> None:
    # without standardization; the prediction is right from the start, so that only the noise is learned, from unit / 5 to unit
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(400, 1, generator=generator) * 2 - 1
    sigma = unit * torch.exp(0.8 * (x - 1))
    bias, middle = {"sigmoid": (0.0, 0.5), "softplus": (0.5413, 1.0), "relu": (1.0, 1.0), "exp": (0.0, 1.0)}.get(
        end, (0.0, 0.0)
    )
    y = middle + sigma * torch.randn(400, 1, generator=generator)
    torch.manual_seed(3)
    net: Any = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1), _Named(end)).requires_grad_(False)
    net[2].weight.zero_()
    net[2].bias.fill_(bias)
    wrapped: Any = sculpt.Wrapper(n_layers=2)(net).train()
    heads = [parameter for name, parameter in wrapped.named_parameters() if "@sculpt" in name]
    optimizer = torch.optim.Adam(heads, lr=0.03, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=500)
    for _ in range(500):
        optimizer.zero_grad()
        sculpt.Normal.loss_function(y, *wrapped(x, return_risk=True)).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        learned = wrapped.eval()(x, return_risk=True)[1]
    assert (learned / sigma).log().abs().quantile(0.97) < 0.5


class _Named(nn.Module):
    def __init__(self, end: str) -> None:
        super().__init__()
        self.end = MODULES[end]() if end in MODULES else _Exponential()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(x)


class _Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)


@pytest.mark.parametrize("end", ENDS)
def test_states_copies_and_pickles_give_the_same_risk(end: str) -> None:
    wrapped: Any = sculpt.Wrapper(n_layers=1)(made(end)).eval()
    risk = wrapped(X, return_risk=True)[1]
    other: Any = sculpt.Wrapper(n_layers=1)(made(end, 1)).eval()
    other.load_state_dict(wrapped.state_dict())
    buffer = io.BytesIO()
    torch.save(wrapped, buffer)
    buffer.seek(0)
    loaded = [
        other,
        copy.deepcopy(wrapped),
        pickle.loads(pickle.dumps(wrapped)),
        torch.load(buffer, weights_only=False),
    ]
    for same in loaded:
        assert torch.equal(same(X, return_risk=True)[1], risk)


def _earlier(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state as it was saved before risk heads undid ends."""
    settings = json.loads(bytes(state["settings@workbench"].tolist()).decode())
    del settings["ends@sculpt"]
    return {**state, "settings@workbench": torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("strict", [True, False])
def test_an_earlier_state_keeps_its_risk_and_says_so_again(end: str, strict: bool) -> None:
    wrapped: Any = sculpt.Wrapper(n_layers=1)(made(end)).eval()
    old = _earlier(wrapped.state_dict())
    new: Any = sculpt.Wrapper(n_layers=1)(made(end, 1)).eval()
    new.load_state_dict(old, strict=strict)
    h = torch.tanh(X @ old["hidden.weight"].T + old["hidden.bias"])
    bounded = ENDS[end][0](h @ old["last.weight@sculpt"].T + old["last.bias@sculpt"])
    torch.testing.assert_close(new(X, return_risk=True)[1], F.softplus(bounded))
    new.load_state_dict(wrapped.state_dict())
    assert torch.equal(new(X, return_risk=True)[1], wrapped(X, return_risk=True)[1])


def test_a_plain_state_leaves_the_heads_as_they_are() -> None:
    wrapped: Any = sculpt.Wrapper()(made("softplus")).eval()
    wrapped.load_state_dict(made("softplus", 1).state_dict())
    torch.testing.assert_close(wrapped(X, return_risk=True)[1], F.softplus(head_of(wrapped.state_dict())))


def test_a_value_that_the_end_cannot_have_is_nan() -> None:
    wrapped: Any = sculpt.Wrapper()(nn.Sequential(nn.Linear(2, 1), nn.Softplus())).eval()
    wrapped[1].threshold = -1e9  # softplus is then the identity
    with pytest.warns(UserWarning, match="the risk is NaN"):
        risk = wrapped(10 * X, return_risk=True)[1]
    assert risk.isnan().any()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_risks_of_bounded_ends_in_other_precisions(end: str, dtype: torch.dtype) -> None:
    wrapped: Any = sculpt.Wrapper()(made(end)).eval()
    risk = wrapped(X, return_risk=True)[1]
    low = wrapped.to(dtype)(X.to(dtype), return_risk=True)[1]
    tolerance = 0.1 if dtype is torch.bfloat16 else 0.02
    torch.testing.assert_close(low.float(), risk, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("end", ENDS)
def test_saturated_ends_have_finite_risks_and_gradients(end: str) -> None:
    wrapped: Any = sculpt.Wrapper()(made(end)).eval()
    with torch.no_grad():
        wrapped.state_dict()["last.weight@sculpt"].mul_(60)
    _, risk = wrapped(X, return_risk=True)
    risk.clamp(1e-6, 1e6).log().sum().backward()
    assert risk.isfinite().all()
    assert all(p.grad.isfinite().all() for p in wrapped.parameters() if p.grad is not None)


@pytest.mark.parametrize("end", ["softplus", "relu", "tanh"])
def test_the_heads_of_samples_undo_the_end(end: str) -> None:
    quietly = compose(sample.Wrapper(2, sample.Normal(1e-7)), sculpt.Wrapper())
    wrapped: Any = quietly(made(end)).eval()
    expected = F.softplus(ENDS[end][1](head_of(wrapped.state_dict())))
    torch.testing.assert_close(wrapped(X, return_risk=True)[1].aleatoric, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_fit_learns_the_noise_of_several_voters_and_folds() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(300, 2, generator=generator)
    y = 2 + x[:, :1] + 0.01 * torch.randn(300, 1, generator=generator)
    for wrapper, options in ((sculpt.Wrapper(), {}), (compose(vote.Wrapper(3), sculpt.Wrapper()), {"folds": 3})):
        wrapped = wrapper(Softplus("softplus"))
        quiet(wrapped, (x, y), epochs=60, lr=0.03, standardize=False, **options)
        risk: Any = wrapped(x, return_risk=True)[1]
        assert getattr(risk, "aleatoric", risk).median() < 0.2
