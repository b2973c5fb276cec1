"""Methods fitted in closed form whose model is trained afterwards, and all that is no training."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import WorkbenchWarning, compose, fit, laplace, load, neo, save, sculpt, vote

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
WRAPPERS: dict[str, Any] = {
    "laplace": laplace.Wrapper(output="logits"),
    "neo": neo.Wrapper(output="logits"),
    "design": vote.Wrapper(2, evidence="design", output="logits"),
    "both": compose(vote.Wrapper(2, output="logits"), laplace.Wrapper(), neo.Wrapper()),
}


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture(params=WRAPPERS)
def fitted(request: pytest.FixtureRequest) -> Any:
    return WRAPPERS[request.param](net()).fit([(X, Y)]).eval()


def train(model: Any, *, with_risk: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    loss = nn.functional.cross_entropy(model(X), Y)
    if with_risk:
        loss = loss + model(X, return_risk=True)[1].mean()
    loss.backward()
    optimizer.step()
    model.eval()


def ask(model: Any) -> Tensor:
    with torch.no_grad():
        return model(X, return_risk=True)[0]


def test_training_after_the_fit_warns_once(fitted: Any) -> None:
    ask(fitted)
    train(fitted)
    with pytest.warns(WorkbenchWarning, match=r"weights.*have changed.*saw the training rows.*wrapped\.fit") as told:
        ask(fitted)
    assert len(told) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(fitted)
        train(fitted)
        fitted(X)  # predictions alone are those of the present weights
        fitted.fit([(X, Y)])
        ask(fitted)


@pytest.mark.parametrize("frozen", [False, True])
def test_calls_that_a_graph_would_answer_warn_too(frozen: bool) -> None:
    model = WRAPPERS["laplace"](net()).fit([(X, Y)]).eval()
    for _ in range(40):
        ask(model)
    train(model)
    with model.frozen() if frozen else nullcontext(), pytest.warns(WorkbenchWarning, match="have changed"):
        ask(model)


def test_fitting_before_training_warns() -> None:
    model = neo.Wrapper()(net()).fit(X)
    train(model)
    with pytest.warns(WorkbenchWarning, match=r"such as 0\.weight, since neo saw the training rows"):
        ask(model)


def test_a_signature_trained_with_the_model_is_fitted_to_it() -> None:
    model = neo.Wrapper()(net()).fit(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, with_risk=True)
        ask(model)


def test_no_warning_where_nothing_was_trained(fitted: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", WorkbenchWarning)
        for model in (copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted)), fitted.double().float()):
            ask(model)
        save(fitted, tmp_path / "model.pt")
        ask(load(tmp_path / "model.pt", net()))
        other = copy.deepcopy(fitted)
        train(other)
        other.fit([(X, Y)])
        fitted.load_state_dict(other.state_dict())  # with what was fitted to these weights
        ask(fitted)


def test_copies_of_a_model_trained_since_warn(fitted: Any) -> None:
    train(fitted)
    for model in (copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))):
        with pytest.warns(WorkbenchWarning, match="have changed"):
            ask(model)


def test_fit_fits_again_after_each_training(fitted: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", WorkbenchWarning)
        for _ in range(2):
            fit(fitted, (X, Y), epochs=1, progress=False)
            ask(fitted)


def test_heads_that_are_trained_count() -> None:
    model = compose(sculpt.Wrapper(), neo.Wrapper())(nn.Linear(3, 1).requires_grad_(False)).fit(X).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train().loss(nn.MSELoss(), X, X[:, :1]).backward()
    optimizer.step()
    with pytest.warns(WorkbenchWarning, match="sculpt"):
        ask(model.eval())
