"""A wrapper applied to one method of a model: only this method answers with risk."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from helpers.target_models import Coder, Outer, every_wrapper, ready, used
from torch import Tensor, nn

from workbench import Risk, Wrapped, calibrate, compose, fit, is_wrapped, laplace, neo, sculpt, selective, unwrap, vote
from workbench.calibration import adapt_batch_norm


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
    assert wrapped.encode.__doc__ == "Return the code of x."
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
    assert sorted(name for name, _ in wrapped.named_risk_parameters()) == ["code.bias@sculpt", "code.weight@sculpt"]
    head = copy.deepcopy(model)
    head.load_state_dict(
        model.state_dict() | {n.removesuffix("@sculpt"): p for n, p in wrapped.named_risk_parameters()}
    )
    x = torch.randn(5, 3)
    y, risk = wrapped.encode(x, return_risk=True)
    torch.testing.assert_close(y, model.encode(x))  # both heads are computed at once, in a kernel for stacked weights
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

    parts = ("first", "norm", "code")
    assert of(Coder(), "encode") == below(Coder(), *parts)
    assert of(Coder(), "decode") == below(Coder(), "decoder", "gain")
    assert of(Coder(), "hidden") == below(Coder(), "first", "norm")
    child = Child()
    assert of(child, "encode") == of(child, "quietly") == below(child, *parts, "decoder")
    assert of(child, "indirect") == below(child, "first", "norm", "gain")
    assert of(child, "everything") == of(child, "handed") == set(child.state_dict())
    outer = Outer()
    assert of(outer, "features") == below(outer, *(f"backbone.{part}" for part in parts))


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
        row = dict(wrapped.named_risk_parameters())["code.weight@vote"].grad[i]
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
        ("encod", "no instance method 'encod'.*nearest: encode"),
        ("eval", "no instance method 'eval'"),
        ("gain", "no instance method 'gain'"),
        ("decoder", "'decoder' is a sub-module.*at='decoder'"),
        ("zzz", "no instance method 'zzz'.*it has decode, encode, hidden"),
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
    with pytest.raises(ValueError, match="no instance method 'halved'"):
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
    wrapped.unscale()
    assert torch.allclose(kept.decode(z), 10 * wrapped.voters()[0].decode(z) + 1, atol=1e-5)


class Encoder(Coder):
    """The encoder alone, as a model of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.decoder, self.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def test_what_is_trained_calibrated_and_adapted_is_the_method() -> None:
    x, y = torch.randn(60, 3), torch.randn(60, 2)
    wrapper = compose(vote.Wrapper(2), sculpt.Wrapper(), neo.Wrapper())
    torch.manual_seed(0)
    whole: Any = wrapper(Encoder())
    torch.manual_seed(0)
    part: Any = wrapper(Coder(), method="encode")
    for model in (whole, part):
        torch.manual_seed(1)
        fit(model, (x, y), epochs=2, batch_size=20, progress=False)
        model.eval()
    expected = whole(x, return_risk=True)
    torch.testing.assert_close(part.encode(x, return_risk=True)[0], expected[0])
    torch.testing.assert_close(part.encode(x, return_risk=True)[1].total, expected[1].total)
    for calibrated in (calibrate(part, (x, y)), calibrate(whole, (x, y))):
        torch.testing.assert_close(calibrated(x)[:3], expected[0][:3])
    ours, theirs = (calibrate(model, (x, y))(x, return_risk=True)[1] for model in (part, whole))
    torch.testing.assert_close(ours.total, theirs.total)
    kept, expected_kept = (selective(model, (x, y)).predictor(coverage=0.5)(x) for model in (part, whole))
    torch.testing.assert_close(kept.risk, expected_kept.risk)
    torch.testing.assert_close(kept.prediction, expected_kept.prediction)
    torch.testing.assert_close(adapt_batch_norm(part, x).encode(x), adapt_batch_norm(whole, x)(x))


def test_laplace_of_a_method_is_tuned_by_its_classes() -> None:
    x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    torch.manual_seed(0)
    whole: Any = laplace.Wrapper(output="logits")(Encoder())
    torch.manual_seed(0)
    part: Any = laplace.Wrapper(output="logits")(Coder(), method="encode")
    for model in (whole, part):
        model.eval()
        model.fit([(x, y)])
        laplace.tune(model, [(x, y)])
    torch.testing.assert_close(part.encode(x, return_risk=True)[1].total, whole(x, return_risk=True)[1].total)
