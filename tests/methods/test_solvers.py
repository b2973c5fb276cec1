"""Models that run a solver, and solvers that run a model: one noise sample for a pass, and its release."""

import copy

import pytest
import torch
from torch import nn

from workbench import compose, sample, sculpt, vote
from workbench.methods import sample as sample_module


def solve(field, x, tolerance=1e-3, end=1.0):
    """Heun's method with adaptive steps: from time 0 to `end`."""
    t, step, calls = 0.0, 0.2, 0
    while t < end - 1e-9:
        step = min(step, end - t)
        first = field(x)
        second = field(x + step * first)
        error = (step * (second - first) / 2).abs().max().item()
        calls += 1
        if error <= tolerance:
            x, t = x + step * (first + second) / 2, t + step
        step *= min(2.0, max(0.2, 0.9 * (tolerance / max(error, 1e-12)) ** 0.5))
        if calls > 20_000:
            raise AssertionError("no end")
    return x


def solve_by_torchdiffeq(method, **options):
    """A solver that writes each point of the path into a new tensor, and each stage past autograd; with scipy's, both are arrays."""

    def solve(field, x):
        torchdiffeq = pytest.importorskip("torchdiffeq")
        times = torch.tensor([0.0, 1.0])
        return torchdiffeq.odeint(
            lambda t, y: field(y), x, times, rtol=1e-5, atol=1e-6, method=method, options=options
        )[-1]

    return solve


class NeuralODE(nn.Module):
    def __init__(self, solve=solve):
        super().__init__()
        self.start, self.field, self.head, self.solve = nn.Linear(2, 4), net(), nn.Linear(4, 1), solve

    def forward(self, x):
        return self.head(self.solve(self.field, self.start(x)))


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def ode(solve=solve):
    torch.manual_seed(0)
    return NeuralODE(solve), torch.randn(5, 2)


class Masks(nn.Module):
    """A layer under given noise on what enters it."""

    def __init__(self, layer, mask):
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, x):
        return self.layer(x * self.mask)


@pytest.mark.filterwarnings("ignore:The following arguments have no effect:UserWarning")
@pytest.mark.parametrize(
    "solve", [solve, *map(solve_by_torchdiffeq, ("dopri5", "rk4")), solve_by_torchdiffeq("scipy_solver", solver="RK45")]
)
@torch.no_grad()
def test_one_noise_for_all_calls_of_a_layer_within_a_pass(solve):
    """Plain copies under the masks that are drawn one after another give the samples."""
    model, x = ode(solve)
    torch.manual_seed(1)
    wrapped = sample.Wrapper(3, randomness="pass", strategy="loop")(model).eval()
    y, risk = wrapped(x, return_risk=True)
    assert risk.min() > 0
    torch.manual_seed(1)
    answers = []
    for _ in range(3):
        masks = [nn.functional.dropout(torch.ones(5, width), 0.1) for width in (4, 8, 4)]
        plain = copy.deepcopy(model)
        plain.field[0], plain.field[2] = Masks(plain.field[0], masks[0]), Masks(plain.field[2], masks[1])
        plain.head = Masks(plain.head, masks[2])
        answers.append(plain(x))
    torch.testing.assert_close(y, torch.stack(answers).mean(0))
    torch.testing.assert_close(risk, torch.stack(answers).std(0, correction=0))


@pytest.mark.parametrize("distribution", [sample.Bernoulli(0.2), sample.Normal(0.1)])
@pytest.mark.parametrize("trainable", [False, True])
def test_training_through_a_solver_ends(distribution, trainable):
    model, x = ode()
    wrapped = sample.Wrapper(3, distribution, randomness="pass", trainable=trainable)(model)
    wrapped(x).square().mean().backward()
    assert wrapped.field[2].weight.grad.abs().sum() > 0
    assert not trainable or wrapped.get_parameter("field.2.weight@sample").grad.abs() > 0


def test_without_it_the_loop_is_stopped_and_the_remedy_told(monkeypatch):
    monkeypatch.setattr(sample_module, "MAX_DECISIONS", 100)
    model, x = ode()
    for randomness in ("different", "same"):
        with pytest.raises(RuntimeError, match='randomness="pass"'):
            sample.Wrapper(2, randomness=randomness)(model).eval()(x)
    assert sample.Wrapper(2, where="weights")(model).eval()(x, return_risk=True)[1].min() > 0


@pytest.mark.slow
def test_a_solver_of_numpy_is_stopped_as_well(monkeypatch):
    """The values of scipy's solvers leave torch as arrays (torchdiffeq's scipy_solver)."""
    torchdiffeq = pytest.importorskip("torchdiffeq")
    monkeypatch.setattr(sample_module, "MAX_DECISIONS", 1_000)

    class Scipy(NeuralODE):
        calls = 0

        def field_at(self, t, y):
            self.calls += 1
            assert self.calls < 5_000, "no end"
            return self.field(y)

        def forward(self, x):
            times, options = torch.tensor([0.0, 1.0]), {"solver": "RK45"}
            path = torchdiffeq.odeint(self.field_at, self.start(x), times, method="scipy_solver", options=options)
            return self.head(path[-1])

    torch.manual_seed(0)
    model, x = Scipy(), torch.randn(5, 2)
    with pytest.raises(RuntimeError, match='randomness="pass"'):
        sample.Wrapper(2)(model).eval()(x)
    assert sample.Wrapper(2, randomness="pass")(model).eval()(x, return_risk=True)[1].min() > 0


def test_many_calls_without_decisions_are_no_endless_loop(monkeypatch):
    monkeypatch.setattr(sample_module, "MAX_DECISIONS", 10)

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(2, 4)

        def forward(self, x):
            h = x.new_zeros(len(x), 4)
            for _ in range(50):
                h = self.cell(x, h)
            return h

    assert sample.Wrapper(2)(Cell()).eval()(torch.randn(3, 2)).shape == (3, 4)


def test_a_function_that_runs_the_solver_is_wrapped_as_a_whole():
    torch.manual_seed(0)
    field, x = net(), torch.randn(5, 4)

    @sample.Wrapper(4, randomness="pass")
    def flow(x):
        return solve(field, x)

    y, risk = flow.eval()(x, return_risk=True)
    assert y.shape == x.shape
    assert risk.min() > 0


@pytest.mark.parametrize("options", [{}, {"randomness": "pass"}, {"where": "weights"}])
@pytest.mark.parametrize("training", [True, False])
def test_noise_is_held_for_a_solver_that_calls_the_wrapped_model(options, training):
    torch.manual_seed(0)
    wrapped, x = sample.Wrapper(3, **options)(net()).train(training), torch.randn(5, 4)
    with sample.hold_noise(wrapped):
        assert torch.equal(solve(wrapped, x), solve(wrapped, x))
        first = wrapped(x, return_risk=True)[1]
        assert torch.equal(first, wrapped(x, return_risk=True)[1])
        assert first.max() > 0
    assert not torch.equal(wrapped(x), wrapped(x))
    with pytest.raises(TypeError, match=r"sample\.Wrapper"):
        sample.hold_noise(vote.Wrapper(2)(net())).__enter__()


@pytest.mark.parametrize("n_layers", [1, 2, 4])
def test_a_risk_head_may_begin_inside_the_solver(n_layers):
    model, x = ode()
    wrapped = sculpt.Wrapper(n_layers=n_layers)(model).eval()
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(y, model(x))
    head = copy.deepcopy(model)
    for name, p in wrapped.named_risk_parameters():
        head.get_parameter(name.partition("@")[0]).data.copy_(p.data)
    torch.testing.assert_close(risk, nn.functional.softplus(head(x)))


def test_voters_take_steps_of_their_own():
    model, x = ode()
    wrapped = vote.Wrapper(3)(model).eval()
    y, risk = wrapped(x, return_risk=True)
    answers = torch.stack([voter(x) for voter in wrapped.voters()])
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0))


@pytest.mark.parametrize("randomness", ["pass", "same", "different"])
def test_heads_of_one_trunk_meet_the_same_noise(randomness):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    both = compose(sample.Wrapper(4, sample.Bernoulli(0.5), randomness=randomness), sculpt.Wrapper(n_layers=1))(model)
    with torch.no_grad():
        for name, p in both.named_risk_parameters():
            p.copy_(both.get_parameter(name.partition("@")[0]))
    both.eval()
    x = torch.randn(6, 2)
    # the head says what the model says, so that in each sample its variance is that of softplus(y), under the noise of y
    torch.manual_seed(3)
    risk = both(x, return_risk=True)[1].aleatoric
    torch.manual_seed(3)
    _, again = both(x, return_risk=True)
    torch.testing.assert_close(risk, again.aleatoric)
    alone = sample.Wrapper(4, sample.Bernoulli(0.5), randomness=randomness)(nn.Sequential(model, nn.Softplus())).eval()
    torch.manual_seed(3)
    y, spread = alone(x, return_risk=True)
    torch.testing.assert_close(risk, (y.square() + spread.square()).sqrt())
