"""A wrapper applied to one part of a model, which is wrapped inside a copy of the whole."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from helpers.models import mlp
from helpers.target_models import Outer, answers, every_wrapper, ready, used
from torch import Tensor, nn

from workbench import WorkbenchWarning, compose, fit, is_wrapped, sculpt, unwrap, vote


def staged() -> Any:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), mlp(2), nn.Linear(2, 1)).eval()


@every_wrapper
def test_a_part_is_wrapped_inside_a_copy_of_the_whole(name: str) -> None:
    model = staged()
    x = torch.randn(5, 3)
    before, state = model(x), copy.deepcopy(model.state_dict())
    out = ready(name, model, at="2")
    assert not is_wrapped(out)
    assert type(copy.copy(out)) is nn.Sequential
    assert is_wrapped(out[2])
    assert issubclass(type(out[2]), nn.Sequential)
    assert not is_wrapped(model[2])
    assert torch.equal(model(x), before)
    for key in ("0.weight", "1.running_mean", "3.bias"):  # shared
        assert out.state_dict(keep_vars=True)[key] is model.state_dict(keep_vars=True)[key]
    h = model[1](model[0](x))
    if name == "neo":
        out[2].fit(torch.randn(60, 3))
    torch.manual_seed(3)
    inner, risk = out[2](h, return_risk=True)
    assert inner.shape == (5, 2)
    assert len(risk if isinstance(risk, Tensor) else risk.total) == 5
    torch.manual_seed(3)
    assert torch.allclose(out(x), model[3](inner), atol=1e-6)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    if name in ("vote", "rank1", "last", "composed"):
        assert torch.allclose(inner, torch.stack([voter(h) for voter in out[2].voters()]).mean(0), atol=1e-6)
    if name in ("sculpt", "neo"):
        assert torch.equal(out(x), before)


@every_wrapper
def test_a_model_with_a_wrapped_part_is_copied_saved_loaded_and_trained(name: str) -> None:
    def build() -> Any:
        return ready(name, Outer(), at="backbone.decoder")

    def answer(model: Any) -> Tensor:
        torch.manual_seed(7)
        return model.backbone(x)

    whole = build()
    x = torch.randn(12, 3)
    expected = answer(whole)
    loaded = build()
    loaded.load_state_dict(whole.state_dict())
    file = io.BytesIO()
    torch.save(whole, file)
    file.seek(0)
    for twin in (copy.deepcopy(whole), loaded, torch.load(file, weights_only=False)):
        assert torch.allclose(answer(twin), expected, atol=1e-6)
        assert twin.parts[0] is twin.backbone
        assert is_wrapped(twin.backbone.decoder)
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(1)
        assert torch.equal(answer(whole), expected)
    plain = Outer()
    whole.load_state_dict(plain.state_dict())
    assert torch.equal(whole.head.weight, plain.head.weight)
    if name in ("vote", "sculpt"):
        assert torch.allclose(answer(whole), plain.eval().backbone(x), atol=1e-6)
    whole.train()
    opt = torch.optim.Adam(whole.parameters(), lr=0.01)
    before = {key: p.detach().clone() for key, p in whole.named_parameters()}
    for _ in range(2):
        opt.zero_grad()
        whole.backbone(x).square().mean().backward()
        opt.step()
    for key, p in whole.named_parameters():
        expected_still = key.startswith("head") or "@sculpt" in key or "extras@" in key
        assert torch.equal(p, before[key]) == expected_still, key


def test_a_part_registered_twice_is_one_part_and_lists_follow() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(3)
            self.again = self.net
            self.layers = [self.net]
            self.call = lambda x: self.net(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](self.again(x)) + self.call(x)

    out: Any = vote.Wrapper(3)(Twice(), at="again").eval()
    assert out.net is out.again
    assert out.layers[0] is out.net
    x = torch.randn(5, 3)
    mean = lambda h: torch.stack([voter(h) for voter in out.net.voters()]).mean(0)  # noqa: E731
    assert torch.allclose(out(x), mean(mean(x)) + mean(x), atol=1e-6)


def test_tensors_tied_to_the_rest_of_the_model() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.out = nn.Linear(4, 5, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.body(self.embed(ids)))

    model = Tied().eval()
    ids = torch.arange(5)
    out: Any = sculpt.Wrapper()(model, at="out").eval()
    assert out.out.weight is out.embed.weight is model.embed.weight
    assert torch.equal(out(ids), model(ids))
    voted: Any = vote.Wrapper(3)(model, at="out").eval()
    # the voters have outputs of their own, the rest keeps the given one
    assert voted.embed.weight is model.embed.weight
    h = model.body(model.embed(ids))
    rows = dict(voted.out.named_risk_parameters())["weight@vote"]
    assert torch.allclose(voted(ids), torch.stack([h @ row.T for row in rows]).mean(0), atol=1e-6)


def test_a_method_of_a_part() -> None:
    model = Outer().eval()
    out: Any = vote.Wrapper(3)(model, at="backbone", method="encode").eval()
    x = torch.randn(5, 3)
    code, risk = out.backbone.encode(x, return_risk=True)
    expected = answers(out.backbone, lambda voter: voter.encode(x))
    assert torch.allclose(code, expected.mean(0), atol=1e-6)
    assert torch.allclose(risk, expected.std(0, correction=0), atol=1e-6)
    assert torch.allclose(out(x), model.head(expected.mean(0)) * model.rate, atol=1e-6)
    assert torch.allclose(out.features(x), expected.mean(0), atol=1e-6)
    assert used(out.backbone) == {n for n in model.backbone.state_dict() if n.startswith(("first", "norm", "code"))}


def test_several_parts_one_after_another() -> None:
    model = Outer().eval()
    x = torch.randn(5, 3)
    one: Any = vote.Wrapper(3)(model, at="backbone", method="encode")
    both: Any = sculpt.Wrapper()(one, at="head").eval()
    assert not is_wrapped(one.head)
    assert is_wrapped(both.backbone)
    assert is_wrapped(both.head)
    code = answers(both.backbone, lambda voter: voter.encode(x)).mean(0)
    assert torch.allclose(both.backbone.encode(x), code, atol=1e-6)
    assert torch.allclose(both(x), model.head(code) * model.rate, atol=1e-6)
    assert both.head(code, return_risk=True)[1].shape == (5, 1)
    more: Any = sculpt.Wrapper(n_layers=1)(both, at="backbone", method="encode").eval()
    assert more.backbone.methods == ("vote", "sculpt")
    assert both.backbone.methods == ("vote",)
    assert more.backbone.encode(x, return_risk=True)[1].names() == ("aleatoric", "epistemic", "total")
    for p in one.parameters():  # a copy shares what the first has, and shows it
        p.data.mul_(0.5)
    assert torch.allclose(both.backbone.encode(x), one.eval().backbone.encode(x), atol=1e-6)
    with pytest.warns(WorkbenchWarning, match="called directly, and answers as the first voter"):
        assert torch.allclose(both.backbone.first(x), one.backbone.voters()[0].first(x), atol=1e-6)


@pytest.mark.parametrize(
    ("at", "says"),
    [
        ("bakbone", "no sub-module 'bakbone'; nearest: backbone"),
        ("backbone.decodr", r"nearest: backbone\.decoder"),
        ("backbone.encode", "'encode' is a method, give method='encode'"),
        ("", "no sub-module ''"),
        ("head.weight", r"no sub-module 'head\.weight'"),
        (0, "dotted name of a sub-module"),
    ],
)
def test_an_unknown_part_is_refused(at: Any, says: str) -> None:
    model = Outer()
    keys = list(model.__dict__)
    with pytest.raises(ValueError, match=says):
        compose(vote.Wrapper(3), sculpt.Wrapper())(model, at=at)
    assert list(model.__dict__) == keys


def test_parts_that_cannot_be_wrapped_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="no floating-point parameters"):
        vote.Wrapper()(model, at="1")
    whole: Any = vote.Wrapper(3)(model)
    with pytest.raises(ValueError, match="lies inside the model itself, which is wrapped"):
        sculpt.Wrapper()(whole, at="0")
    part: Any = vote.Wrapper(3)(model, at="2")
    with pytest.raises(ValueError, match="lies inside 2, which is wrapped"):
        sculpt.Wrapper()(part, at="2.0")
    with pytest.raises(ValueError, match="carries vote already"):
        vote.Wrapper()(part, at="2")
    with pytest.raises(ValueError, match=r"'2'.*wrapped already"):
        sculpt.Wrapper()(part)
    with pytest.raises(TypeError, match=r"its wrapped part is '2'"):
        unwrap(part)
    fitted: Any = sculpt.Wrapper()(model, at="2")
    with pytest.raises(TypeError):
        fit(fitted, (torch.randn(20, 3), torch.randn(20, 3)), epochs=1, progress=False)


def test_the_example_of_a_part_is_one_of_the_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 3), mlp(2))
    out: Any = vote.Wrapper(3, example=torch.zeros(2, 4))(model, at="1")
    assert out.training
    assert out[1].training
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        vote.Wrapper(3, example=torch.zeros(2, 3))(model, at="1")


@pytest.mark.parametrize("name", ["vote", "sculpt"])
def test_a_part_of_a_compiled_model(name: str) -> None:
    compiled: Any = torch.compile(mlp(2), backend="eager")
    model = nn.Sequential(nn.Linear(3, 3), compiled)
    out = ready(name, model, at="1")
    assert out[1](torch.randn(4, 3), return_risk=True)[1].shape == (4, 2)
    again = ready("neo", out, at="0")
    assert is_wrapped(again[0])
    assert again[1](torch.randn(4, 3), return_risk=True)[1].shape == (4, 2)
