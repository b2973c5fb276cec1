"""Optimizers that do not train what they seem to are refused or give a warning; intended uses stay silent."""

from __future__ import annotations

import copy
import gc
import timeit
import warnings
from typing import Any

import pytest
import torch
from helpers.models import mlp
from helpers.training_loops import ALL, SHARING, TAKING, adam, data, sgd, steps
from torch import Tensor, nn

from workbench import OptimizerMismatchError, WorkbenchWarning, compose, fit, sample, sculpt, vote

# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TAKING)
def test_an_optimizer_made_before_wrapping_is_refused_at_its_first_step(name: str) -> None:
    model = mlp()
    opt = adam(model.parameters())
    wrapped: Any = TAKING[name]()(model)
    before = {key: p.detach().clone() for key, p in wrapped.named_parameters()}
    with pytest.raises(OptimizerMismatchError, match=r"before it was wrapped.*\.bias.*Adam\(wrapped\.parameters\(\)\)"):
        steps(wrapped, opt, n=1)
    assert all(torch.equal(p, before[key]) for key, p in wrapped.named_parameters())
    steps(wrapped, adam(wrapped.parameters()))


def test_it_is_refused_again_and_again() -> None:
    model = mlp()
    opt = adam(model.parameters())
    wrapped: Any = vote.Wrapper(3)(model)
    refused = 0
    for _ in range(4):
        try:
            steps(wrapped, opt, n=1)
        except OptimizerMismatchError:
            refused += 1
    assert refused == 4


def test_an_optimizer_that_has_stepped_before_the_wrapping_is_refused() -> None:
    model = mlp()
    opt = adam(model.parameters())
    for _ in range(10):
        x, y = data()
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
    opt.zero_grad()
    wrapped: Any = vote.Wrapper(3, finetune=True)(model)
    with pytest.raises(OptimizerMismatchError):
        steps(wrapped, opt, n=1)


@pytest.mark.parametrize("how", ["argument", "keyword"])
@pytest.mark.parametrize("make", [lambda p: torch.optim.LBFGS(p, max_iter=2), lambda p: torch.optim.Adam(p, lr=0.01)])
def test_gradients_that_a_closure_computes_are_looked_at(make: Any, how: str) -> None:
    model = mlp()
    opt = make(model.parameters())
    wrapped: Any = vote.Wrapper(3, finetune=True)(model)
    x, y = data()

    def closure() -> Any:
        opt.zero_grad()
        loss = wrapped.loss(nn.MSELoss(), x, y)
        loss.backward()
        return loss

    with pytest.raises(OptimizerMismatchError):
        opt.step(closure) if how == "argument" else opt.step(closure=closure)


def test_the_training_of_a_deep_copy_is_looked_at() -> None:
    model = mlp()
    opt = adam(model.parameters())
    for name in ("vote", "sculpt"):
        wrapped = copy.deepcopy(ALL[name]()(model))
        with pytest.raises(OptimizerMismatchError):
            steps(wrapped, opt, n=1)


def test_a_wrapped_part_of_a_larger_model_is_looked_at() -> None:
    for wrap in (
        lambda model: vote.Wrapper(3)(model, at="1"),
        lambda model: nn.Sequential(model[0], vote.Wrapper(3)(model[1])),
    ):
        model = nn.Sequential(nn.Linear(3, 3), mlp())
        opt = adam(model.parameters())
        whole: Any = wrap(model)
        x, y = data()
        nn.functional.mse_loss(whole(x), y).backward()
        with pytest.raises(OptimizerMismatchError, match=r"2\.bias@vote|0\.weight@vote"):
            opt.step()


def test_an_optimizer_of_a_decorated_function_is_looked_at() -> None:
    net = mlp()
    opt = adam(net.parameters())

    @vote.Wrapper(3)
    def model(x: Tensor) -> Tensor:
        return 2 * net(x)

    with pytest.raises(OptimizerMismatchError):
        steps(model, opt, n=1)


def test_a_scheduler_and_an_optimizer_that_is_wrapped_itself_do_not_hide_it() -> None:
    model = mlp()
    inner = adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    wrapped: Any = vote.Wrapper(3)(model)
    with pytest.raises(OptimizerMismatchError):
        steps(wrapped, inner, n=1)
    assert scheduler.last_epoch == 0


# ---- reported --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_steps", [0, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_an_optimizer_made_before_parameters_were_replaced_is_refused(n_steps: int, whole: bool) -> None:
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper())(mlp())
    model: Any = nn.Sequential(nn.Linear(3, 3), wrapped) if whole else wrapped
    x, y = data()
    opt = adam(model.parameters())

    def step() -> None:
        opt.zero_grad()
        wrapped.loss(None, model[0](x) if whole else x, y).backward()
        opt.step()

    for _ in range(n_steps):
        step()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(OptimizerMismatchError, match=r"assign=True\) has replaced .*Adam\(wrapped\.parameters\(\)\)"):
        step()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    opt = adam(model.parameters())
    step()
    assert not all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_an_optimizer_keeps_training_what_was_loaded_in_place() -> None:
    wrapped = vote.Wrapper(2)(mlp())
    opt = adam(wrapped.parameters())
    wrapped.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    steps(wrapped, opt)


def test_an_optimizer_that_misses_the_risk_head_is_reported_once_by_name() -> None:
    model = mlp()
    opt = sgd(model.parameters())
    wrapped: Any = sculpt.Wrapper(n_layers=1)(model)
    with pytest.warns(
        WorkbenchWarning, match=r"2\.weight@sculpt, 2\.bias@sculpt.*SGD\(wrapped\.parameters\(\)\)"
    ) as caught:
        steps(wrapped, opt, n=9)
    assert len(caught) == 1
    assert caught[0].filename == steps.__code__.co_filename


def test_a_risk_head_that_enters_the_loss_late_is_reported() -> None:
    model = mlp()
    opt = sgd(model.parameters())
    wrapped: Any = sculpt.Wrapper(n_layers=1)(model)
    told = []
    for i in range(40):
        x, y = data()
        opt.zero_grad()
        (nn.functional.mse_loss(wrapped(x), y) if i < 20 else wrapped.loss(nn.MSELoss(), x, y)).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step()
        told += [i] * len(caught)
    assert told == [31]  # steps 1, 2, 4, 8, 16 and 32 are looked at


def test_an_optimizer_of_a_model_wrapped_before_another_method_was_added_is_reported() -> None:
    voted: Any = vote.Wrapper(3)(mlp())
    opt = sgd(voted.parameters())
    both: Any = sculpt.Wrapper(n_layers=1)(voted)
    with pytest.warns(WorkbenchWarning, match=r"@sculpt"):
        steps(both, opt)


@pytest.mark.slow
def test_a_part_that_another_optimizer_would_have_to_train_is_reported_when_that_is_gone() -> None:
    wrapped: Any = sculpt.Wrapper(n_layers=1)(mlp())
    trunk = sgd(wrapped.base_parameters())
    steps(wrapped, trunk, sgd(wrapped.risk_parameters()))
    gc.collect()
    with pytest.warns(WorkbenchWarning, match="@sculpt"):
        steps(wrapped, trunk, n=40)


# ---- silent ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_an_optimizer_of_all_parameters_is_silent(name: str) -> None:
    wrapped = ALL[name]()(mlp())
    steps(wrapped, adam(wrapped.parameters()))
    twin = copy.deepcopy(wrapped)
    steps(twin, adam(twin.parameters()))


@pytest.mark.parametrize("name", SHARING)
def test_an_optimizer_of_the_given_model_is_silent_where_all_is_shared(name: str) -> None:
    model = mlp()
    opt = adam(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    steps(SHARING[name]()(model), opt)
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_optimizers_that_have_all_parameters_between_them_are_silent(name: str) -> None:
    wrapped = ALL[name]()(mlp())
    groups = [group for group in (list(wrapped.base_parameters()), list(wrapped.risk_parameters())) if group]
    steps(wrapped, *[sgd(group) for group in groups])


def test_the_second_of_two_optimizers_may_step_much_later() -> None:
    wrapped: Any = sculpt.Wrapper(n_layers=1)(mlp())
    first, second = sgd(wrapped.base_parameters()), sgd(wrapped.risk_parameters())
    for i in range(1, 21):  # as a critic that is trained ten times as often
        x, y = data()
        wrapped.loss(nn.MSELoss(), x, y).backward()
        first.step()
        first.zero_grad()
        if i % 10 == 0:
            second.step()
            second.zero_grad()


def test_frozen_parameters_are_meant() -> None:
    for frozen in ("0.", "2.weight", "2.bias@sculpt"):
        wrapped: Any = sculpt.Wrapper(n_layers=1)(mlp())
        for name, p in wrapped.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
        steps(wrapped, adam([p for p in wrapped.parameters() if p.requires_grad]))
        steps(wrapped, adam(wrapped.parameters()))
    model = mlp().requires_grad_(False)
    model[2].requires_grad_(True)
    opt = adam(model.parameters())
    steps(sample.Wrapper(3)(model), opt)


def test_the_given_model_can_be_trained_beside_the_wrapped_one() -> None:
    model = mlp()
    opt = sgd(model.parameters())
    wrapped: Any = vote.Wrapper(2)(model)
    other = sgd(wrapped.parameters())
    x, y = data()
    before = [p.detach().clone() for p in wrapped.parameters()]
    for _ in range(3):
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
    assert all(torch.equal(p, old) for p, old in zip(wrapped.parameters(), before, strict=True))
    steps(wrapped, other)
    nn.functional.mse_loss(model(x), y).backward()
    opt.step()


@pytest.mark.slow
def test_a_part_of_the_given_model_can_be_trained_after_the_wrapped_one() -> None:
    """What a finished training has left in the gradients of the wrapped object says nothing about the next."""
    model = mlp()
    wrapped: Any = vote.Wrapper(3, share=1)(model)
    steps(wrapped, adam(wrapped.parameters()))
    fitted: Any = vote.Wrapper(3, share=1)(model)
    fit(fitted, data(40), epochs=1, progress=False)
    gc.collect()
    assert any(p.grad is not None for p in wrapped.risk_parameters())
    head = nn.Linear(8, 2)
    opt = adam([*model.parameters(), *head.parameters()])
    for _ in range(5):
        opt.zero_grad()
        head(model[:2](data()[0])).square().mean().backward()  # the last layer of the model has no gradient
        opt.step()


def test_a_wrapped_model_that_is_gone_is_forgotten() -> None:
    model = mlp()
    opt = adam(model.parameters())
    wrapped: Any = vote.Wrapper(3)(model)
    wrapped.loss(nn.MSELoss(), *data()).backward()
    del wrapped
    gc.collect()
    opt.step()


def test_groups_may_be_added_later() -> None:
    model = mlp()
    opt = adam(model.parameters())
    wrapped: Any = sculpt.Wrapper(n_layers=1)(model)
    opt.add_param_group({"params": list(wrapped.risk_parameters())})
    steps(wrapped, opt)
    other = mlp()
    opt = adam(other.parameters())
    voted: Any = vote.Wrapper(3)(other)
    opt.add_param_group({"params": list(voted.parameters())})
    before = [p.detach().clone() for p in voted.parameters()]
    steps(voted, opt)
    assert all(not torch.equal(p, old) for p, old in zip(voted.parameters(), before, strict=True))


def test_a_group_added_later_is_looked_at() -> None:
    trained, model = nn.Linear(3, 1), mlp()
    opt = sgd(trained.parameters())
    wrapped: Any = vote.Wrapper(3)(model)
    x, y = data()
    for _ in range(5):
        nn.functional.mse_loss(trained(x), y).backward()
        opt.step()
    opt.add_param_group({"params": list(model.parameters())})
    wrapped.loss(nn.MSELoss(), x, y).backward()
    with pytest.raises(OptimizerMismatchError):
        opt.step()


class Sharded(torch.optim.Optimizer):
    """Holds all parameters and lets inner optimizers of parts of them do the work, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameters: Any) -> None:
        held = list(parameters)
        super().__init__(held, {})
        self.parts = [sgd(held[::2]), sgd(held[1::2])]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def test_optimizers_inside_an_optimizer_are_silent() -> None:
    wrapped: Any = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))(mlp())
    steps(wrapped, Sharded(wrapped.parameters()))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.Adam(p, foreach=False, differentiable=False),
        lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
        lambda p: torch.optim.LBFGS(p, max_iter=3),
    ],
    ids=["foreach", "fused", "single", "tensor lr", "lbfgs"],
)
def test_all_kinds_of_steps_work(make: Any) -> None:
    wrapped: Any = compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1))(mlp())
    opt = make(wrapped.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(opt)
    scaler = torch.amp.GradScaler("cpu")
    x, y = data()
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        opt.zero_grad()
        loss = wrapped.loss(nn.MSELoss(), x, y)
        loss.backward()
        return loss

    before = [p.detach().clone() for p in wrapped.parameters()]
    start = float(closure().detach())
    for _ in range(4):
        assert torch.is_tensor(opt.step(closure))
        scheduler.step()
        if not isinstance(opt, torch.optim.LBFGS):
            opt.zero_grad()
            scaler.scale(wrapped.loss(nn.MSELoss(), x, y)).backward()
            scaler.step(opt)
            scaler.update()
    assert calls >= 5
    assert float(closure().detach()) < start
    assert all(not torch.equal(p, old) for p, old in zip(wrapped.parameters(), before, strict=True))


@pytest.mark.slow
def test_a_step_can_be_compiled() -> None:
    wrapped: Any = vote.Wrapper(2)(mlp())
    opt = sgd(wrapped.parameters())
    step = torch.compile(opt.step, backend="eager")
    x, y = data()
    before = [p.detach().clone() for p in wrapped.parameters()]
    for _ in range(3):
        opt.zero_grad()
        wrapped.loss(nn.MSELoss(), x, y).backward()
        step()
    assert all(not torch.equal(p, old) for p, old in zip(wrapped.parameters(), before, strict=True))


def test_the_optimizer_itself_is_left_alone_and_a_look_costs_next_to_nothing() -> None:
    from workbench.core.optimizer_guard import _before_step

    wrapped: Any = vote.Wrapper(2)(mlp())
    opt = sgd(wrapped.parameters())
    held = sorted(opt.__dict__)
    steps(wrapped, opt, n=2)
    assert sorted(opt.__dict__) == held
    best = min(timeit.repeat(lambda: _before_step(opt, (opt,), {}), number=1000, repeat=7)) / 1000
    assert best < 2e-5  # ten times what it takes, for a busy machine


def test_unrelated_optimizers_are_forgotten_with_their_parameters() -> None:
    from workbench.core import optimizer_guard as guard

    wrapped: Any = vote.Wrapper(2)(mlp())
    gc.collect()
    sizes = len(guard._histories), len(guard._stepped), len(guard._wrapped)
    for _ in range(5):
        part: Any = vote.Wrapper(2)(mlp())
        steps(part, adam(part.parameters()))
    del part
    gc.collect()
    assert (len(guard._histories), len(guard._stepped), len(guard._wrapped)) == sizes
    assert wrapped is not None
