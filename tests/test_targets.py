"""What a wrapper is called on beside whole models: one method of a model, one part of it, classes of models."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import mlp
from torch import Tensor, nn

from workbench import Risk, WorkbenchWarning, Wrapped, compose, fit, is_wrapped, neo, sample, sculpt, unwrap, vote

MAKERS: dict[str, Callable[[], Any]] = {
    "vote": lambda: vote.Wrapper(3),
    "rank1": lambda: vote.Wrapper(3, share="rank1"),
    "last": lambda: vote.Wrapper(3, share=1),
    "sample": lambda: sample.Wrapper(3),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "neo": lambda: neo.Wrapper(),
    "composed": lambda: compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1)),
}
every_wrapper = pytest.mark.parametrize("name", MAKERS)

pytestmark = pytest.mark.usefixtures("seeded")


class Coder(nn.Module):
    """An encoder and a decoder, in one module; forward calls both methods."""

    norm: nn.BatchNorm1d

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.code = nn.Linear(8, 2)
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.gain = nn.Parameter(torch.ones(1))

    def encode(self, x: Tensor, shift: float = 0.0) -> Tensor:
        """The code of x."""
        return self.code(torch.tanh(self.hidden(x))) + shift

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class Outer(nn.Module):
    """Calls a method of a part, and a property."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Coder()
        self.head = nn.Linear(2, 1)
        self.parts: list[Any] = [self.backbone, self.head]

    @property
    def rate(self) -> Tensor:
        return self.head.bias.exp()

    def features(self, x: Tensor) -> Tensor:
        return self.backbone.encode(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts[0].encode(x)) * self.rate


def used(wrapped: Any) -> set[str]:
    """Names of the given model's parameters and buffers that the methods know."""
    return set(wrapped._workbench.slots)


def answers(wrapped: Any, call: Callable[[Any], Any]) -> Tensor:
    return torch.stack([call(voter) for voter in wrapped.voters()])


def ready(name: str, model: nn.Module, **where: Any) -> Any:
    wrapped: Any = MAKERS[name]()(model, **where).eval()
    return wrapped


# ---- another method --------------------------------------------------------------------------------------------------


def test_the_voters_of_a_method_are_those_of_plain_deep_copies() -> None:
    model = Coder().eval()
    x = torch.randn(5, 3)
    wrapped: Any = vote.Wrapper(3)(model, method="encode").eval()
    state = wrapped.state_dict()
    copies = []
    for i in range(3):
        plain = copy.deepcopy(model)
        plain.load_state_dict({k: state[k] if k in state else state[f"{k}@vote"][i] for k in model.state_dict()})
        copies.append(plain)
    expected = torch.stack([plain.encode(x, shift=0.5) for plain in copies])
    y, risk = wrapped.encode(x, shift=0.5, return_risk=True)
    assert torch.allclose(y, expected.mean(0), atol=1e-6)
    assert torch.allclose(risk, expected.std(0, correction=0), atol=1e-6)
    assert torch.allclose(wrapped.encode(x), expected.mean(0) - 0.5, atol=1e-6)
    for voter, plain in zip(wrapped.voters(), copies, strict=True):
        assert type(voter) is Coder
        assert torch.equal(voter(x), plain(x))
        assert not {id(t) for t in voter.state_dict(keep_vars=True).values()} & {
            id(t) for t in (*wrapped.state_dict(keep_vars=True).values(), *model.state_dict(keep_vars=True).values())
        }


@every_wrapper
def test_all_else_is_the_models_own(name: str) -> None:
    model = Coder().eval()
    x, z = torch.randn(5, 3), torch.randn(4, 2)
    wrapped = ready(name, model, method="encode")
    assert isinstance(wrapped, Coder)
    assert isinstance(wrapped, Wrapped)
    assert torch.equal(wrapped.decode(z), model.decode(z))
    assert wrapped.gain is model.gain
    assert wrapped.decoder[3].weight is model.decoder[3].weight
    with pytest.raises(TypeError, match="return_risk"):
        wrapped(x, return_risk=True)
    torch.manual_seed(3)
    code = wrapped.encode(x)
    torch.manual_seed(3)
    assert torch.allclose(wrapped(x), model.decode(code), atol=1e-6)  # forward gets the wrapped encode
    if name in ("sculpt", "neo"):
        assert torch.equal(wrapped(x), model(x))
    assert wrapped.encode.__doc__ == "The code of x."
    assert repr(wrapped).startswith("Coder.encode[")


@every_wrapper
def test_a_wrapped_method_is_copied_pickled_saved_and_loaded(name: str) -> None:
    wrapped = ready(name, Coder(), method="encode")
    if name == "neo":
        wrapped.fit(torch.randn(60, 3))
    x = torch.randn(5, 3)

    def answer(model: Any) -> list[Tensor]:
        torch.manual_seed(7)
        y, risk = model.encode(x, return_risk=True)
        torch.manual_seed(7)
        return [y, model(x), *([risk] if isinstance(risk, Tensor) else [risk[part] for part in risk])]

    expected = answer(wrapped)
    loaded = ready(name, Coder(), method="encode")
    loaded.load_state_dict(wrapped.state_dict())
    for twin in (copy.copy(wrapped), copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), loaded):
        assert isinstance(twin, Coder)
        assert all(torch.equal(a, b) for a, b in zip(answer(twin), expected, strict=True))
    assert answer(wrapped.double().float())[0].shape == (5, 2)
    plain: Any = unwrap(wrapped)
    assert not is_wrapped(plain)
    assert type(copy.copy(plain)) is Coder
    assert plain.state_dict().keys() == Coder().state_dict().keys()
    assert torch.equal(plain.decode(expected[0]), wrapped.decode(expected[0]))
    other = ready(name, Coder(), method="encode")
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.decoder[0].weight, plain.decoder[0].weight)
    if name == "vote":
        assert all(torch.equal(voter.encode(x), plain.encode(x)) for voter in other.voters())


def test_the_risk_head_is_made_of_the_last_layers_of_the_method() -> None:
    model = Coder().eval()
    wrapped: Any = sculpt.Wrapper(n_layers=1)(model, method="encode").eval()
    assert sorted(wrapped.risk_parameters()) == ["code.bias@sculpt", "code.weight@sculpt"]
    head = copy.deepcopy(model)
    head.load_state_dict(
        model.state_dict() | {n.removesuffix("@sculpt"): p for n, p in wrapped.risk_parameters().items()}
    )
    x = torch.randn(5, 3)
    y, risk = wrapped.encode(x, return_risk=True)
    assert torch.equal(y, model.encode(x))
    assert torch.allclose(risk, nn.functional.softplus(head.encode(x)), atol=1e-6)


def test_what_a_method_uses() -> None:
    def of(model: nn.Module, method: str) -> set[str]:
        return used(vote.Wrapper(2)(model, method=method))

    def below(model: nn.Module, *prefixes: str) -> set[str]:
        return {name for name in model.state_dict() if name.startswith(prefixes)}

    class Child(Coder):
        def encode(self, x: Tensor, shift: float = 0.0) -> Tensor:
            return super().encode(x) * self.scale + shift

        @functools.cached_property
        def scale(self) -> Tensor:
            layer: Any = self.decoder[0]
            return layer.weight.mean()

        @torch.no_grad()
        def quietly(self, x: Tensor) -> Tensor:
            return self.encode(x)

        def everything(self, x: Tensor) -> Tensor:
            return sum(p.sum() for p in self.parameters()) + self.decode(x)

        def handed(self, x: Tensor) -> Tensor:
            return vars(self)["_modules"]["first"](x)

        def indirect(self, x: Tensor) -> Tensor:
            return sum((layer(x) for layer in (self.first, self.norm)[:1]), self.gain)

    own = ("first", "norm", "code")
    assert of(Coder(), "encode") == below(Coder(), *own)
    assert of(Coder(), "decode") == below(Coder(), "decoder", "gain")
    assert of(Coder(), "hidden") == below(Coder(), "first", "norm")
    child = Child()
    assert of(child, "encode") == of(child, "quietly") == below(child, *own, "decoder")
    assert of(child, "indirect") == below(child, "first", "norm", "gain")
    assert of(child, "everything") == of(child, "handed") == set(child.state_dict())
    outer = Outer()
    assert of(outer, "features") == below(outer, *(f"backbone.{part}" for part in own))


def test_a_method_that_is_set_on_the_object_may_use_everything() -> None:
    model = Coder().eval()
    net: Any = model
    net.embed = lambda x: 3 * model.first(x)
    wrapped: Any = vote.Wrapper(3)(model, method="embed").eval()
    x = torch.randn(5, 3)
    y, risk = wrapped.embed(x, return_risk=True)
    expected = torch.stack([3 * voter.first(x) for voter in wrapped.voters()])
    assert torch.allclose(y, expected.mean(0), atol=1e-6)
    assert torch.allclose(risk, expected.std(0, correction=0), atol=1e-6)


def test_training_a_method_deals_rows_and_moves_statistics_once() -> None:
    model = Coder()
    wrapped: Any = vote.Wrapper(3)(model, method="encode").train()
    x, y = torch.randn(12, 3), torch.randn(12, 2)
    dealt = wrapped.encode(x)
    whole = wrapped.encode(x, tile_and_reduce=True)
    assert not torch.allclose(dealt, whole)
    counts = wrapped.state_dict()["norm.num_batches_tracked@vote"]
    assert counts.tolist() == [2, 2, 2]
    assert int(wrapped.decoder[1].num_batches_tracked) == 0
    wrapped(x)
    assert counts.tolist() == [3, 3, 3]
    assert int(wrapped.decoder[1].num_batches_tracked) == 1
    before = copy.deepcopy(wrapped)
    wrapped.loss(nn.MSELoss(), x, y).backward()
    for i, voter in enumerate(before.voters()):
        nn.functional.mse_loss(voter.train().encode(x), y).backward()
        row = wrapped.risk_parameters()["code.weight@vote"].grad[i]
        assert torch.allclose(row, voter.code.weight.grad / 3, atol=1e-6)
    assert wrapped.gain.grad is None
    wrapped(x).square().sum().backward()
    assert wrapped.gain.grad is not None


def test_hooks_of_the_object_belong_to_its_forward() -> None:
    model = Coder().eval()
    fired: list[str] = []
    model.register_forward_hook(lambda module, args, output: fired.append(type(module).__name__))
    wrapped: Any = vote.Wrapper(2)(model, method="encode").eval()
    wrapped.encode(torch.randn(4, 3), return_risk=True)
    assert fired == []
    wrapped(torch.randn(4, 3))
    assert len(fired) == 1


def test_composition_on_one_method_and_refusal_on_two() -> None:
    model = Coder().eval()
    x = torch.randn(5, 3)
    with torch.random.fork_rng():
        one: Any = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))(model, method="encode")
    both: Any = sculpt.Wrapper(n_layers=1)(vote.Wrapper(3)(model, method="encode"), method="encode")
    for wrapped in (one, both):
        risk = wrapped.eval().encode(x, return_risk=True)[1]
        assert isinstance(risk, Risk)
        assert torch.allclose(risk.total**2, risk.aleatoric**2 + risk.epistemic**2)
    assert one.state_dict().keys() == both.state_dict().keys()
    for method in ("decode", "forward"):
        with pytest.raises(ValueError, match=r"answers with risk in encode\(\).*method='encode'"):
            sculpt.Wrapper()(one, method=method)
    with pytest.raises(ValueError, match="answers with risk in forward"):
        sculpt.Wrapper()(vote.Wrapper(3)(model), method="encode")


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("encod", "no method 'encod'.*nearest: encode"),
        ("eval", "no method 'eval' of its own"),
        ("gain", "no method 'gain'"),
        ("decoder", "'decoder' is a sub-module.*at='decoder'"),
        ("zzz", "no method 'zzz'.*it has decode, encode, hidden"),
    ],
)
def test_an_unknown_method_is_refused(method: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        vote.Wrapper()(Coder(), method=method)


def test_a_method_without_parameters_is_refused() -> None:
    class Net(Coder):
        def twice(self, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def halved(x: Tensor) -> Tensor:
            return x / 2

    with pytest.raises(ValueError, match=r"Net\.twice uses no floating-point parameters"):
        vote.Wrapper()(Net(), method="twice")
    with pytest.raises(ValueError, match="no method 'halved' of its own"):
        vote.Wrapper()(Net(), method="halved")


def test_example_and_scaling_are_those_of_the_method() -> None:
    wrapped: Any = vote.Wrapper(3, example=torch.zeros(2, 2))(Coder(), method="decode").eval()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        vote.Wrapper(3, example=torch.zeros(2, 3))(Coder(), method="decode")
    z = torch.randn(5, 2)
    y, risk = wrapped.decode(z, return_risk=True)
    wrapped.scale(y_mean=torch.ones(3), y_scale=torch.full((3,), 10.0))
    scaled, scaled_risk = wrapped.decode(z, return_risk=True)
    assert torch.allclose(scaled, 10 * y + 1, atol=1e-5)
    assert torch.allclose(scaled_risk, 10 * risk, atol=1e-5)
    kept: Any = wrapped.voters()[0]
    wrapped.scale(None)
    assert torch.allclose(kept.decode(z), 10 * wrapped.voters()[0].decode(z) + 1, atol=1e-5)


# ---- a part ----------------------------------------------------------------------------------------------------------


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
    assert (
        voted.embed.weight is model.embed.weight
    )  # the voters have outputs of their own, the rest keeps the given one
    h = model.body(model.embed(ids))
    rows = voted.out.risk_parameters()["weight@vote"]
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
    with pytest.warns(WorkbenchWarning, match="called by itself, and answers as the first voter"):
        assert torch.allclose(both.backbone.first(x), one.backbone.voters()[0].first(x), atol=1e-6)


@pytest.mark.parametrize(
    ("at", "says"),
    [
        ("bakbone", "no sub-module 'bakbone'; nearest: backbone"),
        ("backbone.decodr", r"nearest: backbone\.decoder"),
        ("backbone.encode", "'encode' is a method, give method='encode'"),
        ("", "no sub-module ''"),
        ("head.weight", r"no sub-module 'head\.weight'"),
        (0, "no sub-module 0"),
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


# ---- classes ---------------------------------------------------------------------------------------------------------


@vote.Wrapper(3)
class Decorated(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@vote.Wrapper  # type: ignore[arg-type]  # a checker wants the parentheses
class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


ByMethod: Any = vote.Wrapper(3)(Coder, method="encode")
ByPart: Any = vote.Wrapper(3)(Outer, at="backbone.decoder")


@sample.Wrapper(3)
@dataclass(eq=False)
class AsDataclass(nn.Module):
    width: int = 4

    def __post_init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("cls", [Decorated, Bare, AsDataclass])
def test_instances_of_decorated_classes_give_risk_and_are_what_they_are(cls: Any) -> None:
    net = cls().eval()
    x = torch.randn(5, 3)
    assert isinstance(net, cls)
    assert is_wrapped(net)
    _, risk = net(x, return_risk=True)
    assert bool((risk > 0).any())
    twin = cls()
    twin.load_state_dict(net.state_dict())
    torch.manual_seed(1)
    expected = net(x)
    torch.manual_seed(1)
    assert torch.equal(twin.eval()(x), expected)
    if cls is AsDataclass:
        assert (net.width, cls(width=6).net[0].out_features) == (4, 6)


def test_a_class_wrapped_in_a_method_or_a_part_builds_such_instances() -> None:
    x = torch.randn(5, 3)
    coder = ByMethod().eval()
    assert issubclass(type(coder), Coder)
    code, risk = coder.encode(x, return_risk=True)
    assert torch.allclose(code, answers(coder, lambda voter: voter.encode(x)).mean(0), atol=1e-6)
    assert risk.shape == (5, 2)
    assert torch.allclose(coder(x), coder.decode(code), atol=1e-6)
    assert used(coder) == {n for n in Coder().state_dict() if n.startswith(("first", "norm", "code"))}
    outer = ByPart().eval()
    assert issubclass(type(outer), Outer)
    assert not is_wrapped(outer)
    assert outer.backbone.decoder(code, return_risk=True)[1].shape == (5, 3)
    assert outer(x).shape == (5, 1)
    with pytest.raises(ValueError, match="nearest: encode"):
        vote.Wrapper()(Coder, method="encoding")()
