"""The rows that fit trains on: of any form, with a validation share, standardized, and with risks in original units."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training_models import WRAPPERS, Stream, net, plain, plane, quiet, same, weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from workbench import compose, data, sample, sculpt, vote
from workbench.core.batches.rows import TensorRows
from workbench.errors import WorkbenchWarning
from workbench.training.batches import Batches
from workbench.training.standardization import moments
from workbench.training.validation import hold_out

# ---- units -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_predictions_and_risks_are_in_original_units() -> None:
    x, y = plane(300, noise=0.5)
    small, large = (sculpt.Wrapper(n_layers=1)(net()) for _ in range(2))
    large.load_state_dict(small.state_dict())
    quiet(small, (x, y), epochs=60, lr=0.02)
    quiet(large, (1e3 * x - 7e3, 1e6 * y + 3e6), epochs=60, lr=0.02)
    (y0, s0), (y1, s1) = small(x, return_risk=True), large(1e3 * x - 7e3, return_risk=True)
    torch.testing.assert_close(y1, 1e6 * y0 + 3e6, rtol=0.02, atol=3e4)
    torch.testing.assert_close(s1, 1e6 * s0, rtol=0.02, atol=1e4)
    assert 0.35 < s0.median().item() < 0.65


def test_the_standardization_is_of_the_rows_trained_on() -> None:
    x, y = plane(50)
    x[:, 1] = 4.0
    wrapped = plain()
    quiet(wrapped, (x, y), epochs=1, validation=0.2, seed=3)
    kept, held = hold_out(TensorRows(x, y), 0.2, 3)
    assert isinstance(kept, TensorRows)
    assert (len(kept), len(held)) == (40, 10)  # type: ignore[arg-type]
    scaling = wrapped.scaling
    np.testing.assert_allclose(scaling.x_mean, kept.x.numpy().mean(0), rtol=1e-5)  # type: ignore[union-attr]
    np.testing.assert_allclose(scaling.x_scale, [kept.x.numpy()[:, 0].std(), 1.0], rtol=1e-5)  # type: ignore[union-attr]
    np.testing.assert_allclose(scaling.y_scale, kept.y.numpy().std(0), rtol=1e-5)


def test_moments_of_images_are_of_all_pixels_and_may_be_uncentred() -> None:
    values = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    mean, scale = moments(values)
    assert (mean.item(), scale.item()) == pytest.approx((values.numpy().mean(), values.numpy().std()), rel=1e-5)
    mean, scale = moments(torch.tensor([[3.0], [4.0]]), centre=False)
    assert (mean.item(), scale.item()) == (0, pytest.approx(12.5**0.5))


def test_positive_targets_of_a_lognormal_are_scaled_but_not_shifted() -> None:
    from workbench.distributions import LogNormal

    x, y = plane(60)
    wrapped: Any = sculpt.Wrapper(LogNormal, n_layers=1)(nn.Sequential(*net(), nn.Softplus()))
    quiet(wrapped, (x, y.exp()), epochs=1, validation=0)
    assert wrapped.scaling.y_mean == 0
    assert wrapped.scaling.y_scale.item() == pytest.approx(y.exp().square().mean().sqrt().item(), rel=1e-5)


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return 1 / (0.01 + 2 * self.last(x).sigmoid()[:, 0]).unsqueeze(-1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) + self.last(x).relu()


class Relus(nn.Module):
    """A softplus that is undone, and a relu after a layer that isn't the last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(2, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        size = self.inner(x).relu()
        return {"share": F.softplus(self.last(size)), "size": size}


ENDS: list[tuple[nn.Module, str]] = [
    (nn.Sequential(nn.Linear(2, 1), nn.Softplus()), ""),
    (nn.Sequential(nn.Linear(2, 1), nn.ReLU()), ""),
    (nn.Sequential(nn.Linear(2, 1), nn.Softplus(beta=2)), "softplus"),
    (nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU()), "relu"),
    (nn.Sequential(nn.Linear(2, 1), nn.Hardsigmoid()), "hardsigmoid"),
    (Inverse(), "sigmoid"),
    (nn.Sequential(nn.Linear(2, 1), nn.LeakyReLU()), ""),
    (nn.Sequential(nn.ReLU(), nn.Linear(2, 1)), ""),
    (Residual(), ""),
]


@pytest.mark.parametrize("wrapper", [sculpt.Wrapper(), compose(vote.Wrapper(2), sculpt.Wrapper())], ids=str)
@pytest.mark.parametrize(("model", "end"), ENDS, ids=lambda part: type(part).__name__ if part else "none")
def test_a_model_that_ends_in_a_bounded_function_is_told_what_its_risk_head_cannot_say(
    model: nn.Module, end: str, wrapper: Any
) -> None:
    x, y = plane(40)
    wrapped = wrapper(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(wrapped, (x, y - y.min()), epochs=1, standardize=False)
    said = [str(one.message) for one in caught if "risk heads" in str(one.message)]
    assert len(said) == bool(end)
    if end:
        assert f"the model ends in {end}" in said[0]
        assert "torch.distributions.LogNormal" in said[0]
        with torch.no_grad():
            risk: Any = wrapped(x, return_risk=True)[1]
        assert float(getattr(risk, "aleatoric", risk).min()) >= math.log(2)  # as it says


@pytest.mark.parametrize("wrapper", [sculpt.Wrapper(), compose(vote.Wrapper(5), sculpt.Wrapper())], ids=str)
@pytest.mark.parametrize("by", ["loss", "risk"])
def test_own_loops_are_told_once_that_a_bounded_end_limits_the_risk(wrapper: Any, by: str) -> None:
    x, y = plane(40)

    def step(wrapped: Any) -> None:
        if by == "loss":
            wrapped.loss(F.mse_loss, x, y).backward()
        else:
            loc, risk = wrapped(x, return_risk=True)
            sculpt.Normal.loss_function(y, loc, getattr(risk, "aleatoric", risk)).backward()

    ends = wrapper(nn.Sequential(nn.Linear(2, 1), nn.Softplus(beta=2))).eval()
    with torch.no_grad():
        ends(x, return_risk=True)  # who only predicts has no model to change
    ends.train()
    with pytest.warns(WorkbenchWarning, match="the model ends in softplus, and so do the risk heads") as told:
        step(ends)
    assert len(told) == 1
    step(ends)
    step(wrapper(nn.Linear(2, 1)).train())
    step(wrapper(nn.Sequential(nn.Linear(2, 1), nn.Softplus())).train())


def test_the_output_is_named_whose_end_is_not_undone() -> None:
    x, y = plane(40)
    targets = {"share": y, "size": y}
    wrapped: Any = sculpt.Wrapper(output=dict.fromkeys(targets, "values"))(Relus()).train()
    with pytest.warns(WorkbenchWarning, match="output 'size' of the model ends in relu"):
        wrapped.loss(None, x, targets)
    sculpt.Wrapper()(Relus()).train().loss(None, x, targets)  # a warning would be an error


def test_who_decides_about_standardization() -> None:
    binary = (plane()[0], (plane()[1] > 0).float())
    wrapped = plain()
    quiet(wrapped, binary, epochs=1, criterion=F.binary_cross_entropy_with_logits)  # 0 and 1 must stay 0 and 1
    assert wrapped.scaling.y_mean is None
    assert wrapped.scaling.x_mean is not None
    quiet(wrapped, plane(scale=9.0), epochs=1, criterion=nn.L1Loss())  # what is there stays
    assert wrapped.scaling.y_mean is None
    quiet(wrapped, plane(scale=9.0), epochs=1, criterion=F.huber_loss, standardize=True)
    assert wrapped.scaling.y_scale > 9
    quiet(wrapped, plane(), epochs=1, standardize=False)
    assert wrapped.scaling is None
    labels = (plane()[0], torch.arange(80) % 3)
    wrapped = plain(outputs=3)
    quiet(wrapped, labels, epochs=1)
    assert wrapped.scaling.y_mean is None


# ---- validation ------------------------------------------------------------------------------------------------------


def test_validation_rows_are_never_trained_on() -> None:
    x, y = plane(40)
    y[7] = 1e4

    class Seen(nn.Module):
        def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
            parts[prediction.requires_grad].append(target.detach().clone())
            return F.mse_loss(prediction, target)

    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    quiet(plain(), (x, y), epochs=1, criterion=Seen(), standardize=False, validation=0.25)
    trained, held = (torch.cat(parts[kind]).flatten().tolist() for kind in (True, False))
    assert len(held) == 10
    assert sorted(trained + held) == sorted(y.flatten().tolist())


def test_the_cut_is_stratified_and_copes_with_a_class_of_one_row() -> None:
    y = torch.tensor([0] * 60 + [1] * 30 + [2] * 9 + [3])
    kept, held = hold_out(TensorRows(torch.arange(100.0)[:, None], y), 0.2, seed=0)
    assert isinstance(kept, TensorRows)
    assert isinstance(held, TensorRows)
    counts = torch.bincount(held.y, minlength=4)
    assert len(held) == 20
    assert (counts - 0.2 * torch.bincount(y)).abs().max() <= 1
    assert sorted([*kept.args[0].flatten().tolist(), *held.args[0].flatten().tolist()]) == list(range(100))
    others: list[Any] = [hold_out(kept, 0.2, seed)[1] for seed in (1, 2)]
    assert not torch.equal(others[0].x, others[1].x)


def test_no_batch_has_a_single_row_and_each_row_comes_once() -> None:
    for n, size in itertools.product((2, 3, 16, 17, 33, 40), (2, 8, 16, 64)):
        rows = TensorRows(torch.arange(float(n))[:, None], torch.zeros(n, 1))
        batches = Batches(rows, size, torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0))
        first, second = ([batch.x.flatten().tolist() for batch in batches] for _ in range(2))
        assert min(map(len, first)) >= 2
        assert len(first) == len(batches)
        assert max(map(len, first)) <= size + 1
        assert sorted(itertools.chain(*first)) == list(range(n)) == sorted(itertools.chain(*second))


# ---- forms of data ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_forms_of_the_same_rows_give_the_same_weights() -> None:
    x, y = plane(40)

    class Pairs(Dataset):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return x[i], y[i]

    class Holder:
        train = data.Split(x, y)

    forms = [(x, y), (x.numpy(), y.double().numpy()), TensorDataset(x, y), Holder(), data.Split(x, y), Pairs(), [x, y]]
    results = []
    for form in forms:
        wrapped = plain()
        quiet(wrapped, form, epochs=2, standardize=False, batch_size=8)
        results.append(weights(wrapped))
    assert all(same(result, results[0]) for result in results[1:])


def test_a_loader_is_used_as_it_is_and_repeats() -> None:
    rows, held = TensorDataset(*plane(40)), TensorDataset(*plane(20, seed=1))
    results = []
    for _ in range(2):
        wrapped = plain()
        loader = DataLoader(rows, batch_size=8, shuffle=True)
        history = quiet(wrapped, loader, epochs=2, validation=DataLoader(held, batch_size=8))
        assert history.frame.validation_loss.notna().all()
        results.append(weights(wrapped))
        torch.rand(3)
    assert same(*results)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    assert len(quiet(plain(), DataLoader(Stream(), batch_size=4), epochs=2, validation=0, optimizer=sgd).frame) == 2


@pytest.mark.slow
def test_classes_of_a_data_set_are_learned() -> None:
    moons = data.load("moons", n_train=200)
    wrapped = vote.Wrapper(2, output="logits")(net(outputs=2))
    quiet(wrapped, moons, epochs=60, lr=0.03)
    right = (wrapped(moons.test.x).argmax(1) == moons.test.y).float().mean()
    assert right > 0.8
    probs = compose(sample.Wrapper(2, output="probs"))(nn.Sequential(*net(outputs=2), nn.Softmax(1)))
    history = quiet(probs, moons, epochs=20, lr=0.03)
    assert history.frame.loss.iloc[-1] < 0.5 < history.frame.loss.iloc[0]


class Two(nn.Module):
    """Two inputs, one of them of whole numbers, and names that are also those of a wrapped model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(4, 1)
        self.scale = 1.0

    def loss(self) -> str:
        return "mine"

    def forward(self, number: Tensor, kind: Tensor) -> Tensor:
        return self.out(torch.cat([number, self.embed(kind)], 1))


@pytest.mark.parametrize("name", ["plain", "vote", "neo"])
def test_several_inputs_whole_numbers_and_clashing_names(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    number, kind = torch.rand(60, 1, generator=generator), torch.randint(5, (60,), generator=generator)
    wrapped = WRAPPERS[name]()(Two())
    history = quiet(wrapped, ((number, kind), number + kind[:, None]), epochs=30, lr=0.05)
    assert history.frame.loss.iloc[-1] < 0.3 * history.frame.loss.iloc[0]
    assert wrapped.loss() == "mine"


def test_dtype_and_device() -> None:
    wrapped = plain()
    quiet(wrapped, plane(), epochs=1, dtype=torch.float64, device="cpu")
    assert {p.dtype for p in wrapped.parameters()} == {torch.float64}
    assert wrapped(plane()[0].double()).dtype == torch.float64
    with pytest.raises(ValueError, match="torch knows no device 'nowhere'"):
        quiet(wrapped, plane(), epochs=1, device="nowhere")


def test_numbers_of_numpy_are_those_of_python() -> None:
    trained = []
    for whole, share in ((int, float), (np.int32, np.float32)):
        wrapped = vote.Wrapper(2)(net())
        settings = {"epochs": whole(2), "batch_size": whole(16), "seed": whole(3), "patience": whole(5)}
        quiet(wrapped, plane(), **settings, validation=share(0.25))
        folded = vote.Wrapper(2)(net())
        quiet(folded, plane(), epochs=whole(2), batch_size=whole(16), folds=whole(2))
        trained.append(torch.cat([p.detach().flatten() for m in (wrapped, folded) for p in m.parameters()]))
    assert torch.equal(*trained)
