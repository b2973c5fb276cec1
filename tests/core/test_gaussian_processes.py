"""Deep kernels of gpytorch: voters predict and learn as plain Gaussian processes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import WorkbenchWarning, vote

gpytorch = pytest.importorskip("gpytorch")
pytestmark = [
    pytest.mark.filterwarnings("ignore::gpytorch.utils.warnings.GPInputWarning"),
    pytest.mark.filterwarnings("ignore:.*holds tensors .*which are neither parameters nor buffers"),
]
X = torch.linspace(0, 1, 12)[:, None]
Y = (6 * X[:, 0]).sin()


class DeepKernel(gpytorch.models.ExactGP):  # type: ignore[misc]
    def __init__(self, likelihood: Any) -> None:
        super().__init__(X, Y, likelihood)
        self.features = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> Any:
        z = self.features(x)
        return gpytorch.distributions.MultivariateNormal(self.mean_module(z), self.covar_module(z))


class Learner(nn.Module):
    """In training the loss, later what the process says."""

    def __init__(self, distribution: bool = False) -> None:
        super().__init__()
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.gp, self.distribution = DeepKernel(likelihood), distribution
        self.mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, self.gp)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            return -self.mll(self.gp(x), Y)
        said = self.gp.likelihood(self.gp(x))
        return said if self.distribution else {"mean": said.mean, "sd": said.stddev}


def plain(wrapped: Any) -> list[Any]:
    """The voters as processes of their own, which keep nothing of earlier data."""
    return [copy.deepcopy(voter) for voter in wrapped.voters()]


def test_each_voter_is_trained_by_its_own_marginal_likelihood() -> None:
    wrapped: Any = vote.Wrapper(3)(Learner()).train()
    voters = [voter.train() for voter in plain(wrapped)]
    with pytest.warns(WorkbenchWarning, match="a number for all rows"):
        loss = wrapped(X)
    losses = torch.stack([voter(X) for voter in voters])
    torch.testing.assert_close(loss, losses.mean())
    loss.backward()
    losses.mean().backward()
    gradient = wrapped.get_parameter("gp.features.0.weight@vote").grad
    torch.testing.assert_close(gradient, torch.stack([voter.gp.features[0].weight.grad for voter in voters]))


def test_a_process_is_wrapped_itself_and_trained_by_the_likelihood_outside() -> None:
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    wrapped: Any = vote.Wrapper(3)(DeepKernel(likelihood)).train()
    voters = [voter.train() for voter in plain(wrapped)]
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, wrapped)
    with pytest.raises(torch.linalg.LinAlgError):  # without noise, the covariance of close rows has no factors
        torch.linalg.cholesky(voters[0](X).covariance_matrix)
    loss = wrapped.loss(lambda process, y: -mll(process, y), X, Y)
    losses = torch.stack([-mll(voter(X), Y) for voter in voters])
    torch.testing.assert_close(loss, losses.mean())
    loss.backward()
    losses.mean().backward()
    gradient = wrapped.get_parameter("features.0.weight@vote").grad
    torch.testing.assert_close(gradient, torch.stack([voter.features[0].weight.grad for voter in voters]))


def test_a_model_that_takes_no_fewer_rows_after_all_is_told_as_it_is() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            if self.training and len(x) != 12:
                raise RuntimeError("twelve rows, please")
            return self.fc(x)

    wrapped: Any = vote.Wrapper(3)(Whole()).train()
    with pytest.warns(WorkbenchWarning, match="twelve rows, please"):
        y = wrapped(X)
    torch.testing.assert_close(y, torch.stack([voter(X) for voter in wrapped.voters()]).mean(0))
    with pytest.raises(RuntimeError, match="twelve rows, please"):
        wrapped(X[:9])


def test_prediction_and_risk_are_those_of_plain_processes() -> None:
    wrapped: Any = vote.Wrapper(3)(Learner()).eval()
    x = torch.rand(5, 1)
    y, risk = wrapped(x, return_risk=True)
    answers = [voter.eval()(x) for voter in plain(wrapped)]
    for name in ("mean", "sd"):
        each = torch.stack([answer[name] for answer in answers])
        torch.testing.assert_close(y[name], each.mean(0), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(risk[name], each.std(0, correction=0), atol=1e-4, rtol=1e-3)


def test_a_distribution_is_read_by_its_mean_and_variance() -> None:
    wrapped: Any = vote.Wrapper(3)(Learner(distribution=True)).eval()
    x = torch.rand(5, 1)
    y, risk = wrapped(x, return_risk=True)
    answers = [voter.eval()(x) for voter in plain(wrapped)]
    means, variances = (torch.stack([getattr(said, name) for said in answers]) for name in ("mean", "variance"))
    torch.testing.assert_close(y, means.mean(0), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(risk.aleatoric, variances.mean(0).sqrt(), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(risk.epistemic, means.std(0, correction=0), atol=1e-4, rtol=1e-3)
