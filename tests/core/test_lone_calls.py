"""Methods other than forward that compute with one model only give a warning with the line to write; nothing else does."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import WorkbenchWarning, compose, neo, sample, sculpt, snapshot, swag, vote

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.ModuleList([nn.Linear(3, 8), nn.Linear(8, 8)]), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(8))

    def forward_features(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(x).relu()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x) * self.scale)

    def penalty(self) -> Tensor:
        return self.head.weight.square().sum()

    def first_penalty(self) -> Tensor:
        return self.body[0].weight.square().sum()

    def rescaled(self, x: Tensor, by: float = 2.0) -> Tensor:
        """Multiply by the scale."""
        return F.normalize(x * by * self.scale)

    def classes(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)

    def empty(self, n: int) -> Tensor:
        return self.scale.new_zeros(n, self.head.weight.shape[1], device=self.scale.device)

    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def finish(self) -> nn.Module:
        return self.body.eval()


def told(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in seen if issubclass(w.category, WorkbenchWarning)]


AVERAGES = {
    "vote": vote.Wrapper(3),
    "vote_sculpt": compose(vote.Wrapper(3), sculpt.Wrapper()),
    "rank1": vote.Wrapper(3, share="rank1"),
    "sample": sample.Wrapper(),
    "sample_weights": sample.Wrapper(where="weights"),
    "swag": swag.Wrapper(),
    "snapshot": snapshot.Wrapper(),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_features_of_one_model_are_told_once_with_the_line_to_write(name: str) -> None:
    wrapped = AVERAGES[name](Encoder()).eval()
    (message,) = told(lambda: [wrapped.forward_features(X), wrapped.forward_features(X)])
    assert "Encoder.forward_features (" in message
    assert "test_lone_calls.py:" in message
    assert "method='forward_features'" in message
    assert not told(lambda: wrapped(X))


@pytest.mark.parametrize("wrapper", [sculpt.Wrapper(), neo.Wrapper(), vote.Wrapper(3, share=1), compose()])
def test_features_that_are_those_of_every_model_are_not_told(wrapper: Any) -> None:
    plain = Encoder().eval()
    wrapped = wrapper(plain).eval()
    assert not told(lambda: wrapped.forward_features(X))
    assert torch.equal(wrapped.forward_features(X), plain.forward_features(X))


def test_a_training_of_the_weights_themselves_is_not_told() -> None:
    for wrapper in (swag.Wrapper(), snapshot.Wrapper()):  # which answer with those, and keep some of them on the way
        wrapped = wrapper(Encoder()).train()
        assert not told(lambda model=wrapped: [model(X), model.forward_features(X)])


@pytest.mark.parametrize(
    ("method", "args", "slot"),
    [
        ("penalty", (), "head.weight"),
        ("first_penalty", (), "body.0.weight"),
        ("rescaled", (torch.ones(4, 8),), "scale"),
    ],
)
def test_parameters_of_the_first_voter_alone_are_told_once(method: str, args: tuple, slot: str) -> None:
    wrapped = vote.Wrapper(3)(Encoder())
    (message,) = told(lambda: [getattr(wrapped, method)(*args), getattr(wrapped, method)(*args)])
    assert message.startswith(f"Encoder.{method} (")
    assert repr(slot) in message
    assert f"method={method!r}" in message
    first = wrapped.voters()[0]
    assert torch.equal(getattr(wrapped, method)(*args), getattr(first, method)(*args))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(vote.Wrapper(3)(Encoder()))))
    assert len(told(lambda: getattr(twin, method)(*args))) == 1


def lasso(model: nn.Module) -> Tensor:
    return sum((m.weight.abs().sum() for m in model.modules() if isinstance(m, nn.Linear)), torch.zeros(()))


@pytest.mark.parametrize("penalty", [lasso, lambda model: model.head.weight.square().sum()], ids=["loop", "layer"])
def test_a_loss_in_a_loop_that_takes_parameters_of_the_first_voter_is_told_once(penalty: Any) -> None:
    wrapped = vote.Wrapper(3)(Encoder())

    def step() -> None:
        (wrapped(X).square().mean() + penalty(wrapped)).backward()

    (message,) = told(lambda: [step(), step()])
    assert "weight'" in message
    assert "named_parameters()" in message
    for twin in (copy.deepcopy(vote.Wrapper(3)(Encoder())), pickle.loads(pickle.dumps(vote.Wrapper(3)(Encoder())))):
        assert len(told(penalty(twin).backward)) == 1
    single, shared = vote.Wrapper(1)(Encoder()), sample.Wrapper()(Encoder())
    assert not told(lambda: [penalty(single).backward(), penalty(shared).backward()])
    assert not told(lambda: [penalty(voter).backward() for voter in wrapped.voters()])


def test_a_penalty_of_all_voters_is_not_told() -> None:
    wrapped = vote.Wrapper(3)(Encoder())
    weights = [tensor for name, tensor in wrapped.named_parameters() if "weight" in name]
    assert not told(lambda: (wrapped(X).mean() + sum(weight.abs().sum() for weight in weights) / 3).backward())
    gradients = [row for weight in weights for row in weight.grad.flatten(1)]
    assert all(gradient.any() for gradient in gradients)


def test_the_remedies_hold() -> None:
    """A penalty beside the prediction reaches every voter, and a wrapped method answers with the mean."""

    class Penalized(Encoder):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.penalty()

    wrapped = vote.Wrapper(3, output={"0": "values", "1": "mean"})(Penalized()).eval()
    penalty = wrapped(X)[1]
    torch.testing.assert_close(penalty, torch.stack([voter.penalty() for voter in wrapped.voters()]).mean())
    penalty.backward()
    assert all(row.any() for row in dict(wrapped.named_parameters())["head.weight@vote"].grad)
    encoder = vote.Wrapper(3)(Encoder(), method="forward_features").eval()
    y, risk = encoder.forward_features(X, return_risk=True)
    answers = torch.stack([voter.forward_features(X) for voter in encoder.voters()])
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0))
    assert not told(lambda: encoder.forward_features(X))


def test_what_needs_no_value_of_a_voter_is_not_told() -> None:
    wrapped = vote.Wrapper(3)(Encoder()).eval()
    assert not told(
        lambda: [wrapped.classes(X), wrapped.empty(2), wrapped.size(), wrapped.finish(), wrapped.state_dict()]
    )
    shared = vote.Wrapper(3, share=1)(Encoder()).eval()
    assert not told(lambda: [shared.rescaled(torch.ones(4, 8)), shared.first_penalty()])
    assert not told(lambda: sample.Wrapper()(Encoder()).penalty())  # the weights are those of every sample
    assert not told(lambda: wrapped.voters()[0].forward_features(X))
    assert not told(lambda: wrapped.unwrap().penalty())


def test_methods_keep_their_names_signatures_and_texts() -> None:
    wrapped = vote.Wrapper(3)(Encoder())
    for name in ("rescaled", "penalty", "forward_features"):
        assert inspect.signature(getattr(wrapped, name)) == inspect.signature(getattr(Encoder(), name))
        assert getattr(wrapped, name).__doc__ == getattr(Encoder, name).__doc__
        assert inspect.getsource(getattr(wrapped, name)) == inspect.getsource(getattr(Encoder, name))
