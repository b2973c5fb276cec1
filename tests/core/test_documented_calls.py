"""The calls of wrapped models shown in the documentation of the interface."""

from __future__ import annotations

import contextlib
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import WorkbenchWarning, neo, sample, sculpt, vote

WRAPPERS = {
    "sculpt": lambda: sculpt.Wrapper(),
    "sample": lambda: sample.Wrapper(),
    "vote": lambda: vote.Wrapper(),
    "neo": lambda: neo.Wrapper(),
}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(n: int = 4) -> list[tuple[Tensor, Tensor]]:
    xs = [torch.randn(16, 3) for _ in range(n)]
    return [(x, x.sum(1, keepdim=True)) for x in xs]


# ---- sculpt: wrap, call, train ---------------------------------------------------------------------------------------


def test_sculpt_wraps_with_a_distribution_class_in_two_ways() -> None:
    model = mlp()
    dist = sculpt.Normal
    wrapper = sculpt.Wrapper(dist, n_layers=3)
    first: Any = wrapper(model)
    second: Any = sculpt.Wrapper(distribution=dist, n_layers=3)(model)
    x = torch.randn(5, 3)
    for wrapped_model in (first, second):
        prediction = wrapped_model(x)
        assert torch.equal(prediction, model(x))
        prediction, uncertainty = wrapped_model(x, return_risk=True)
        torch.testing.assert_close(prediction, model(x))  # exact only without risk: both heads may be computed at once
        assert uncertainty.shape == prediction.shape
        assert bool((uncertainty > 0).all())


def test_sculpt_trains_with_the_added_loss() -> None:
    dist, scale, loss_fn = sculpt.Normal, 0.5, nn.MSELoss()
    model: Any = sculpt.Wrapper(dist, n_layers=3)(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen = []
    for x_batch, y_batch in batches() * 10:
        optimizer.zero_grad()
        y_pred, y_risk = model(x_batch, return_risk=True)
        loss = loss_fn(y_batch, y_pred)
        loss += scale * dist.loss_function(y_batch, y_pred, y_risk)
        z = (y_batch - y_pred) / y_risk
        by_hand = (y_risk.log() + z.square() / 2 + torch.log(torch.tensor(2 * torch.pi)) / 2).mean()
        assert torch.allclose(loss, loss_fn(y_batch, y_pred) + scale * by_hand, rtol=1e-5)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    assert sum(seen[-4:]) < 0.5 * sum(seen[:4])


def test_sculpt_trains_with_sampled_predictions() -> None:
    dist, loss_fn = sculpt.Normal, nn.MSELoss()
    model: Any = sculpt.Wrapper(dist, n_layers=3)(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen = []
    for x_batch, y_batch in batches() * 10:
        optimizer.zero_grad()
        y_pred, y_risk = model(x_batch, return_risk=True)
        sampled_y_pred = dist.sample((y_pred, y_risk))
        loss = loss_fn(y_batch, sampled_y_pred)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        seen.append(loss.item())
    assert sum(seen[-4:]) < 0.7 * sum(seen[:4])


def test_a_function_is_sculpted_and_its_pair_sampled() -> None:
    net, loss_fn = mlp(), nn.MSELoss()

    def model(x: Tensor) -> Tensor:
        return 2 * net(x)

    dist = sculpt.Normal
    wrapped: Any = sculpt.Wrapper(dist, n_layers=3)(model)
    x, y = batches(1)[0]
    assert torch.equal(wrapped(x), model(x))
    y_hat, y_risk = wrapped(x, return_risk=True)
    assert torch.isfinite(loss_fn(y_hat, y) + dist.loss_function(y, y_hat, y_risk))
    y_hat_and_risk = wrapped(x, return_risk=True)
    y_hat_sampled = dist.sample(y_hat_and_risk, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(16, 1, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(y_hat_sampled, y_hat + y_risk * noise)
    assert torch.isfinite(loss_fn(y_hat_sampled, y))


# ---- training and saving ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("called_before", [True, False])
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_optimizer_has_every_parameter_called_before_or_not(name: str, called_before: bool) -> None:
    wrapped_model: Any = WRAPPERS[name]()(mlp())
    x = torch.randn(6, 3)
    if called_before:
        _ = wrapped_model(x)
    opt = torch.optim.Adam(wrapped_model.parameters(), lr=0.001)
    held = {id(p) for group in opt.param_groups for p in group["params"]}
    wrapped_model(x, return_risk=True)
    assert {id(p) for p in wrapped_model.parameters()} == held


@pytest.mark.parametrize("name", WRAPPERS)
def test_gradients_by_the_two_groups_of_parameters(name: str) -> None:
    wrapped_model: Any = WRAPPERS[name]()(mlp())
    x, y = batches(1)[0]
    out, risk = wrapped_model(x, return_risk=True)
    loss = (out - y).square().mean() + risk.mean()
    risk_vars, user_vars = wrapped_model.risk_parameters(), wrapped_model.base_parameters()
    trainable = [*risk_vars, *user_vars]
    assert {id(p) for p in trainable} == {id(p) for p in wrapped_model.parameters()}
    assert len(trainable) == len(list(wrapped_model.parameters()))
    gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
    assert any(gradient is not None and bool(gradient.abs().sum() > 0) for gradient in gradients)


@pytest.mark.parametrize("name", WRAPPERS)
def test_state_saved_to_disk_loads_strictly_right_after_wrapping(name: str, tmp_path: Path) -> None:
    trained: Any = WRAPPERS[name]()(mlp())
    x, y = batches(1)[0]
    opt = torch.optim.Adam(trained.parameters(), lr=0.01)
    for _ in range(3):
        opt.zero_grad()
        (trained(x) - y).square().mean().backward()
        opt.step()
    if name == "neo":
        trained.fit(x)
    path = tmp_path / "weights.pt"
    torch.save(trained.state_dict(), path)
    restored: Any = WRAPPERS[name]()(mlp())
    missing, unexpected = restored.load_state_dict(torch.load(path), strict=True)
    assert not missing
    assert not unexpected
    assert restored.state_dict().keys() == trained.state_dict().keys()
    trained.eval(), restored.eval()
    torch.manual_seed(3)
    out, risk = trained(x, return_risk=True)
    torch.manual_seed(3)
    out_restored, risk_restored = restored(x, return_risk=True)
    assert torch.equal(out, out_restored)
    assert torch.equal(risk, risk_restored)


def test_pickled_variables_are_set_in_an_object_wrapped_alike() -> None:
    model = mlp()
    wrapper = vote.Wrapper()
    trained: Any = wrapper(model)
    torch.manual_seed(1)
    restored: Any = wrapper(model)
    x = torch.randn(4, 3)
    file = io.BytesIO()
    pickle.dump(dict(trained.named_risk_parameters()), file)
    file.seek(0)
    assert not torch.equal(trained.eval()(x), restored.eval()(x))
    restored.set_risk_parameters(pickle.load(file))
    out, risk = restored(x, return_risk=True)
    assert torch.equal(out, trained(x))
    assert torch.equal(risk, trained(x, return_risk=True)[1])


# ---- awkward modules and what each call of a wrapped one means -------------------------------------------------------


class InnerModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


class OuterModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner_mod = InnerModule()
        self.linear = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner_mod(x)
        x = self.linear(x)
        x = self.helper_fn(x)
        return x

    def add_3_and_call(self, x: Tensor, **kwargs: Any) -> Any:
        return self.forward(x + 3, **kwargs)

    def helper_fn(self, x: Tensor) -> Tensor:
        return x * 5


@pytest.mark.parametrize("name", WRAPPERS)
def test_methods_that_call_forward_get_the_wrapped_one(name: str) -> None:
    mod = OuterModule()
    wrapped_mod: Any = WRAPPERS[name]()(mod).eval()
    if name == "neo":
        wrapped_mod.fit(torch.randn(50, 5))
    x = torch.randn(2, 5)
    torch.manual_seed(1)
    out = wrapped_mod(x + 3)
    torch.manual_seed(1)
    assert torch.equal(wrapped_mod.add_3_and_call(x), out)
    torch.manual_seed(1)
    _, risk = wrapped_mod.add_3_and_call(x, return_risk=True)
    torch.manual_seed(1)
    assert torch.equal(risk, wrapped_mod(x + 3, return_risk=True)[1])


@pytest.mark.parametrize("name", WRAPPERS)
def test_helpers_and_inner_modules_called_by_themselves_are_plain(name: str) -> None:
    mod = OuterModule()
    wrapped_mod: Any = WRAPPERS[name]()(mod)
    x = torch.randn(2, 5)
    assert torch.equal(wrapped_mod.helper_fn(x), x * 5)
    first = wrapped_mod.voters()[0] if name == "vote" else mod
    # voters have layers of their own, and one of them answers
    told = pytest.warns(WorkbenchWarning, match="first voter only") if name == "vote" else contextlib.nullcontext()
    with told:
        inner_out = wrapped_mod.inner_mod(x)
    assert torch.equal(inner_out, first.inner_mod(x))
    linear_out = wrapped_mod.linear(x)
    assert torch.equal(linear_out, first.linear(x))


class InPlaceMod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.forward_count = 0
        self.calls: Any
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        x = self.layer(x)
        self.forward_count += 1
        self.calls += 1
        return x


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", WRAPPERS)
def test_changes_in_place_end_as_if_called_once(name: str, training: bool) -> None:
    mod = InPlaceMod()
    wrapped: Any = WRAPPERS[name]()(mod).train(training)
    x = torch.randn(6, 3)
    original = x.clone()
    for call in range(1, 4):
        if name == "neo" or (name == "vote" and training):
            wrapped(x)  # neo takes its features in a pass of its own; dealt rows are copies
        else:
            wrapped(x, return_risk=True)
        assert wrapped.forward_count == call
        assert int(wrapped.voters()[0].calls if name == "vote" else wrapped.calls) == call
        if not (name == "vote" and training):
            assert torch.equal(x, original * 2**call)
    assert mod.forward_count == 0


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_every_voter_sees_the_input_once_modified(strategy: str) -> None:
    wrapped: Any = vote.Wrapper(3, strategy="loop" if strategy == "loop" else "auto")(InPlaceMod()).eval()
    x = torch.randn(6, 3)
    expected = torch.stack([voter.layer(2 * x) for voter in wrapped.voters()])
    y, risk = wrapped(x, return_risk=True)
    assert torch.allclose(y, expected.mean(0), atol=1e-6)
    assert torch.allclose(risk, expected.std(0, correction=0), atol=1e-6)


class TextModule(nn.Module):
    """Takes a string, prints, and returns what is no floating-point tensor."""

    def __init__(self, with_scores: bool) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 4)
        self.with_scores = with_scores

    def forward(self, input_prompt: str) -> Any:
        encoded = torch.tensor([float(ord(letter)) for letter in input_prompt[:4]]) / 100
        out = self.scores(encoded)
        print(out.shape)
        top_ind = torch.argmax(out)
        out_str = "answer" if self.with_scores else "abcd"[int(top_ind)]
        return (out, out_str, top_ind) if self.with_scores else (out_str, top_ind)


def test_text_goes_in_and_passes_through() -> None:
    wrapped: Any = vote.Wrapper(3)(TextModule(with_scores=True)).eval()
    expected = torch.stack([voter("word")[0] for voter in wrapped.voters()])
    (out, out_str, top_ind), risk = wrapped("word", return_risk=True)
    assert out_str == "answer"
    assert top_ind.dtype == torch.int64
    assert torch.allclose(out, expected.mean(0), atol=1e-6)
    assert torch.allclose(risk[0], expected.std(0, correction=0), atol=1e-6)


def test_an_output_without_numbers_is_refused_with_a_remedy() -> None:
    wrapped: Any = sculpt.Wrapper()(TextModule(with_scores=False)).eval()
    with pytest.raises(TypeError, match=r"outside the wrapped model|return it as a tensor"):
        wrapped("word", return_risk=True)
