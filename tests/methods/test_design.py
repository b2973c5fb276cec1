"""`vote.Wrapper(evidence="design")`: recomputed by hand from plain copies; independent of labels, and falling with more rows."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import digamma
from torch import Tensor, nn

from workbench import compose, fit, laplace, load, neo, sample, save, sculpt, vote
from workbench.errors import NotFittedError
from workbench.outputs import Logits

ROWS, CLASSES = 60, 3


def _net(bias: bool = True) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES, bias=bias))


def _inputs(rows: int = ROWS, seed: int = 1) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def _wrapped(net: nn.Module | None = None, **settings: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return vote.Wrapper(3, evidence="design", output="logits", **settings)(net or _net()).eval()


def _leverages(wrapped: Any, net: nn.Sequential, train: Tensor, x: Tensor) -> np.ndarray:
    """phi' (A + tr(A) / (d n) I)^-1 phi on plain copies with the registered weights, mean over the copies."""
    state = {key: value for key, value in wrapped.state_dict().items() if key.endswith("@design_copies")}
    every = []
    for i in range(len(state["0.weight@design_copies"])):
        plain = copy.deepcopy(net)
        plain.load_state_dict({key.partition("@")[0]: value[i] for key, value in state.items()})
        trunk = plain.eval()[:-1]
        with torch.no_grad():
            seen, new = (trunk(rows).double().numpy() for rows in (train, x))
        scale = np.sqrt((seen**2).sum(1).mean())
        seen, new = (rows / scale for rows in (seen, new))
        if net[-1].bias is not None:
            seen, new = (np.hstack([rows, np.ones((len(rows), 1))]) for rows in (seen, new))
        a = seen.T @ seen
        ridge = np.trace(a) / (len(a) * len(seen))
        every.append(np.einsum("nd,de,ne->n", new, np.linalg.inv(a + ridge * np.eye(len(a))), new))
    return np.mean(every, axis=0)


def _ignorance(leverage: np.ndarray) -> np.ndarray:
    rows = 1 / leverage
    return math.log(CLASSES) - digamma(rows + 1) + digamma(rows / CLASSES + 1)


def _entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.log()).sum(-1)


@pytest.mark.parametrize("bias", [True, False])
def test_risks_are_those_of_plain_copies(bias: bool) -> None:
    net = _net(bias)
    wrapped = _wrapped(net)
    wrapped.fit(_inputs())
    x = 3 * _inputs(7, seed=3)
    with torch.no_grad():
        y, risk = wrapped(x, return_risk=True)
        probs = torch.stack([voter(x).softmax(1) for voter in wrapped.voters()])
    np.testing.assert_allclose(risk.epistemic, _ignorance(_leverages(wrapped, net, _inputs(), x)), rtol=1e-4)
    torch.testing.assert_close(y.softmax(1), probs.mean(0))
    with torch.no_grad():
        frequencies = torch.stack([voter(_inputs()).softmax(1) for voter in wrapped.voters()]).mean((0, 1)).numpy()
    entropy, prior = _entropy(y.softmax(1)).numpy(), -(frequencies * np.log(frequencies)).sum()
    unknown = risk.epistemic.numpy() / math.log(CLASSES)
    expected = np.minimum(prior * (entropy / prior) ** (1 / (1 - unknown)), entropy)
    np.testing.assert_allclose(risk.aleatoric, expected, rtol=1e-4)
    torch.testing.assert_close(risk.total, risk.aleatoric + risk.epistemic)


@pytest.mark.parametrize("settings", [{"share": 1}, {"share": "rank1"}], ids=str)
def test_copies_stand_where_layers_do_not_vote_as_a_whole(settings: dict[str, Any]) -> None:
    net = _net()
    wrapped, x = _wrapped(net, **settings).fit(_inputs()), 3 * _inputs(7, seed=3)
    risk = wrapped(x, return_risk=True)[1].epistemic.detach()
    np.testing.assert_allclose(risk, _ignorance(_leverages(wrapped, net, _inputs(), x)), rtol=1e-4)


def test_rows_to_validate_on_let_the_voters_say_where() -> None:
    net = _net()
    wrapped = _wrapped(net)
    wrapped.fit(_inputs())
    held = _inputs(40, seed=4)
    wrapped._workbench.methods[0].tune(wrapped, held)

    def parts(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            probs = torch.stack([voter(x).softmax(1) for voter in wrapped.voters()]).double()
        information = _entropy(probs.mean(0)) - _entropy(probs).mean(0)
        return _ignorance(_leverages(wrapped, net, _inputs(), x)), information.numpy()

    designed, information = parts(held)
    level = wrapped.state_dict()["3.weight@design_level"].item()
    assert _ignorance(level * information).mean() == pytest.approx(designed.mean(), rel=1e-4)
    x = _inputs(7, seed=5)
    designed, information = parts(x)
    risk = wrapped(x, return_risk=True)[1].epistemic.detach()
    np.testing.assert_allclose(risk, (designed + _ignorance(level * information)) / 2, rtol=1e-3)


def test_a_model_in_training_mode_is_left_as_it_is_and_counts_as_evaluated() -> None:
    x, net = _inputs(), nn.Sequential(*_net()[:-1], nn.Dropout(0.5), _net()[-1])
    evaluated, training = _wrapped(net), _wrapped(net).train()
    before, drawn = copy.deepcopy(training.state_dict()), torch.get_rng_state()
    evaluated.fit(x)
    training.fit(x)
    after = training.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items() if "@design" not in name)
    assert all(torch.equal(after[name], value) for name, value in evaluated.state_dict().items())
    assert training.training
    assert torch.equal(torch.get_rng_state(), drawn)


class _Named(nn.Module):
    def __init__(self, net: nn.Module, form: Any) -> None:
        super().__init__()
        self.net, self.form = net, form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.net(x))


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("form", [lambda y: {"logits": y}, lambda y: (y,)], ids=["dict", "tuple"])
def test_an_output_inside_of_a_container_has_the_same_evidence(form: Any, values: bool) -> None:
    x = _inputs()

    def risks(net: nn.Module) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            voters = vote.Wrapper(3, evidence="design", finetune=True)
            wrapped: Any = compose(voters, sculpt.Wrapper())(net) if values else compose(voters, output="logits")(net)
        wrapped.eval().fit(x)
        wrapped._workbench.methods[0].tune(wrapped, x)
        return wrapped(x, return_risk=True)[1]

    bare, inside = risks(_net()), risks(_Named(_net(), form))
    for kind in ("aleatoric", "epistemic", "total"):
        [risk] = inside[kind].values() if isinstance(inside[kind], dict) else inside[kind]
        assert torch.equal(risk, bare[kind])


def test_it_is_deaf_to_labels_and_falls_with_every_row() -> None:
    net, x, train = _net(), _inputs(20, seed=3), _inputs(200)
    risks = []
    for rows, labels in ((100, 0), (100, 1), (200, 0)):
        wrapped = _wrapped(net)
        y = torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(labels))
        fit(wrapped, (train[:rows], y), epochs=2, validation=0, standardize=False, progress=False)
        risks.append(wrapped(x, return_risk=True)[1].epistemic.detach())
    assert torch.equal(risks[0], risks[1])
    assert bool((risks[2] < risks[0]).all())


def test_fit_of_workbench_fits_and_tunes_in_units_of_the_training() -> None:
    wrapped, train = _wrapped(), _inputs() * 100 + 7
    y = (train[:, 0] > 7).long()
    fit(wrapped, (train, y), epochs=2, progress=False)
    state = wrapped.state_dict()
    assert state["3.weight@design_rows"] == 54  # a tenth validates
    assert state["3.weight@design_level"] > 0
    inside, far = (wrapped(x, return_risk=True)[1].epistemic.mean() for x in (train, 10 * train))
    assert 0 < inside < far < math.log(CLASSES)


@pytest.mark.parametrize("settings", [{}, {"share": 1}, {"share": "rank1"}, {"finetune": True}], ids=str)
def test_it_is_kept_in_files_and_copies(settings: dict[str, Any], tmp_path: Any) -> None:
    net, x = _net(), _inputs(5, seed=3)
    wrapped = _wrapped(net, **settings)
    wrapped.fit(_inputs())
    wrapped._workbench.methods[0].tune(wrapped, _inputs(30, seed=4))
    expected = wrapped(x, return_risk=True)[1].epistemic
    other = _wrapped(_net(), **settings)
    other.load_state_dict(wrapped.state_dict())
    save(wrapped, tmp_path / "model.safetensors")
    stored = io.BytesIO(pickle.dumps(wrapped))
    for again in (copy.deepcopy(wrapped), other, load(tmp_path / "model.safetensors", _net()), pickle.load(stored)):
        assert torch.equal(again.eval()(x, return_risk=True)[1].epistemic, expected)
    halved = copy.deepcopy(wrapped).bfloat16()
    assert halved.state_dict()["3.weight@design_whitening"].dtype == torch.float32
    torch.testing.assert_close(halved(x.bfloat16(), return_risk=True)[1].epistemic, expected, rtol=0.05, atol=0)
    wrapped.load_state_dict(_net().state_dict())  # other weights, of which nothing is known
    with pytest.raises(NotFittedError, match="seen no training data"):
        wrapped(x, return_risk=True)


def test_a_file_loads_whatever_is_frozen(tmp_path: Any) -> None:
    x, frozen = _inputs(5, seed=3), _net()
    frozen[0].requires_grad_(False)
    for saved, model in ((_wrapped(frozen), _net()), (_wrapped(), copy.deepcopy(frozen))):
        save(saved.fit(_inputs()), tmp_path / "model.safetensors")
        again = load(tmp_path / "model.safetensors", model).eval()
        assert torch.equal(again(x, return_risk=True)[1].epistemic, saved(x, return_risk=True)[1].epistemic)


def test_a_model_that_cannot_have_it_is_refused_before_it_is_trained() -> None:
    wrapped = vote.Wrapper(2, evidence="design", output="logits")(_TwiceAsMany())
    before = {key: value.clone() for key, value in wrapped.state_dict().items()}
    with pytest.raises(ValueError, match="ran 2 times"):
        fit(wrapped, (torch.randn(20, 4), torch.arange(20) % CLASSES), epochs=1, progress=False)
    assert all(torch.equal(value, before[key]) for key, value in wrapped.state_dict().items())


def test_without_it_nothing_changes() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        plain = vote.Wrapper(3, output="logits")(_net()).eval()
        after = torch.rand(1)
        torch.manual_seed(2)
        wrapped = vote.Wrapper(3, evidence="design", output="logits")(_net()).eval()
        assert torch.equal(torch.rand(1), after)
    assert not any("design" in key for key in plain.state_dict())
    assert "evidence" not in plain._workbench.methods[0].settings()
    state = wrapped.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in plain.state_dict().items() if "settings" not in key)
    with pytest.raises(ValueError, match="evidence"):
        plain.load_state_dict(state)
    with pytest.raises(RuntimeError, match="design_copies"):
        wrapped.load_state_dict(plain.state_dict())


def test_what_is_frozen_stays_as_it_is() -> None:
    net = _net()
    net[0].requires_grad_(False)
    wrapped = _wrapped(net)
    assert "0.weight@design_copies" not in wrapped.state_dict()
    assert wrapped.fit(_inputs())(_inputs(), return_risk=True)[1].epistemic.shape == (ROWS,)


@pytest.mark.parametrize("others", [(neo.Wrapper(),), (sculpt.Wrapper(),), (sample.Wrapper(2),)], ids=str)
def test_it_composes(others: tuple[Any, ...]) -> None:
    wrapped = compose(vote.Wrapper(3, evidence="design"), *others, output="logits")(_net()).eval()
    wrapped.fit(_inputs())
    alone = _wrapped()
    alone.fit(_inputs())
    x = _inputs(5, seed=3)
    risk = wrapped(x, return_risk=True)[1]
    torch.testing.assert_close(risk.epistemic, alone(x, return_risk=True)[1].epistemic)
    torch.testing.assert_close(risk.total, risk.aleatoric + risk.epistemic)


def test_a_state_of_before_takes_the_classes_for_equally_frequent() -> None:
    x, wrapped = _inputs(5, seed=3), _wrapped()
    state = wrapped.fit(_inputs()).state_dict()
    expected = wrapped(x, return_risk=True)[1]
    del state["3.weight@design_entropy"]
    for _ in range(2):
        wrapped.load_state_dict(state)
        y, risk = wrapped(x, return_risk=True)
        assert torch.equal(risk.epistemic, expected.epistemic)
        entropy, most = _entropy(y.softmax(1)), math.log(CLASSES)
        torch.testing.assert_close(
            risk.aleatoric.log(),
            most * ((entropy.log() - risk.epistemic / most * math.log(most)) / (most - risk.epistemic)),
        )
    assert torch.equal(wrapped.fit(_inputs())(x, return_risk=True)[1].aleatoric, expected.aleatoric)


def test_of_values_it_is_the_posterior_of_bayesian_linear_regression() -> None:
    """In the view of functions: a Gaussian process with the kernel of the features, whose variance the rows reduce."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    wrapped = compose(vote.Wrapper(3, evidence="design", finetune=True), sculpt.Wrapper())(net).eval()
    train, x = _inputs(), 3 * _inputs(7, seed=3)
    wrapped.fit(train)
    risk = wrapped(x, return_risk=True)[1]
    with torch.no_grad():
        seen, new = (net[:-1](rows).double() for rows in (train, x))
    scale = seen.square().sum(1).mean().sqrt()
    seen, new = (torch.cat([rows / scale, torch.ones(len(rows), 1)], 1) for rows in (seen, new))
    weights = seen.numel() / seen.square().sum()  # prior variance in units of the noise: the prior counts as one row
    inside = torch.linalg.inv(weights * seen @ seen.T + torch.eye(len(seen)))
    across = weights * new @ seen.T
    variance = weights * new.square().sum(1) - (across @ inside * across).sum(1)
    torch.testing.assert_close(risk.epistemic, risk.aleatoric * variance.sqrt()[:, None].float())
    torch.testing.assert_close(risk.total.square(), risk.aleatoric.square() + risk.epistemic.square())


def test_voters_shape_that_of_values_in_units_of_the_noise() -> None:
    def wrapped_by(evidence: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            return compose(vote.Wrapper(3, evidence=evidence), sculpt.Wrapper())(nn.Linear(4, 2)).eval()

    wrapped, plain, held = wrapped_by("design"), wrapped_by(None), _inputs(40, seed=4)
    wrapped.fit(_inputs())
    alone = wrapped(held, return_risk=True)[1]
    wrapped._workbench.methods[0].tune(wrapped, held)
    voters, shaped = (one(held, return_risk=True)[1] for one in (plain, wrapped))
    relative = (alone.epistemic / alone.aleatoric).square().mean() / (
        voters.epistemic / voters.aleatoric
    ).square().mean()
    expected = (alone.epistemic.square() + relative * voters.epistemic.square()) / 2
    torch.testing.assert_close(shaped.epistemic.square(), expected)


@pytest.mark.slow
def test_laplace_counts_the_same_evidence() -> None:
    x = _inputs(5, seed=3)
    expected = _wrapped().fit(_inputs())(x, return_risk=True)[1].epistemic
    plain, wrapped = (laplace.Wrapper(evidence=one, output="logits")(_net()).eval() for one in (None, "design"))
    with pytest.raises(NotFittedError):
        wrapped(x, return_risk=True)
    pairs = [(_inputs(), torch.arange(ROWS) % CLASSES)]
    y, risk = wrapped.fit(pairs)(x, return_risk=True)
    torch.testing.assert_close(risk.epistemic, expected)
    assert torch.equal(y, plain.fit(pairs)(x))
    torch.testing.assert_close(risk.total, risk.aleatoric + risk.epistemic)
    shared = compose(vote.Wrapper(2, share="rank1"), laplace.Wrapper(evidence="design"), output="logits")(_net()).eval()
    torch.testing.assert_close(shared.fit(pairs)(x, return_risk=True)[1].epistemic, expected)
    other = laplace.Wrapper(evidence="design", output="logits")(_net()).eval()
    other.load_state_dict(wrapped.state_dict())
    assert torch.equal(other(x, return_risk=True)[1].total, risk.total)
    assert not any("design" in key for key in plain.state_dict())
    with pytest.raises(ValueError, match="given to both vote and laplace"):
        laplace.Wrapper(evidence="design", output="logits")(_wrapped())


def test_training_mode_has_the_voters_own_risk() -> None:
    wrapped = _wrapped().train()
    y, risk = wrapped(_inputs(), return_risk=True)
    torch.testing.assert_close(risk.total, _entropy(y.softmax(1)))


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class _Pooled(_Tokens):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).mean(1)


class _TwiceAsMany(_Tokens):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.head(x * 2)


@pytest.mark.parametrize("dim", [-1, 1])
def test_every_token_is_a_row(dim: int) -> None:
    """As the same vectors would be as rows of a table, wherever the classes stand."""
    train, x = torch.randn(2, 20, 5, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[[[1.0]]], [[[3.0]]]]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        rows = vote.Wrapper(3, evidence="design", output="logits", finetune=True)(copy.deepcopy(trunk)).eval()
        turned = nn.Sequential(trunk, _Moved(dim))
        tokens = vote.Wrapper(3, evidence="design", output=Logits(dim=dim), finetune=True)(turned).eval()
    rows.fit(train.flatten(0, 1))
    tokens.fit(train)
    rows._workbench.methods[0].tune(rows, x.flatten(0, 1))
    tokens._workbench.methods[0].tune(tokens, x)
    expected, risk = rows(x.flatten(0, 1), return_risk=True)[1], tokens(x, return_risk=True)[1]
    for name in ("aleatoric", "epistemic", "total"):
        torch.testing.assert_close(getattr(risk, name), getattr(expected, name).reshape(20, 5), atol=1e-5, rtol=1e-4)


class _Moved(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, y: Tensor) -> Tensor:
        return y.movedim(-1, self.dim)


@pytest.mark.parametrize(
    ("net", "output", "words"),
    [
        (_net(), "binary", "several labels at once"),
        (_net(), {"a": "logits"}, "several outputs"),
        (nn.Sequential(nn.Flatten(), nn.Conv1d(1, 3, 1)), "logits", "'1' is taken as the last layer and is a Conv1d"),
    ],
    ids=["labels", "several", "convolution"],
)
def test_what_has_no_evidence_is_refused_when_wrapping(net: nn.Module, output: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        vote.Wrapper(2, evidence="design", output=output)(net)


@pytest.mark.parametrize(
    ("net", "output", "x", "words"),
    [
        (_Pooled(), "logits", torch.zeros(2, 5, 4), r"\[2, 5\] vectors, but this model returns \[2, 3\]"),
        (_TwiceAsMany(), "logits", torch.zeros(2, 4), "ran 2 times"),
        (_net(), "logits", torch.full((3, 4), math.nan), "NaN or infinite"),
        (_net(), None, torch.zeros(3, 4), "no aleatoric risk: compose with sculpt"),
    ],
    ids=["pooled", "twice", "nan", "values"],
)
def test_what_has_no_row_of_features_is_refused_by_fit(net: nn.Module, output: Any, x: Tensor, words: str) -> None:
    wrapped = vote.Wrapper(2, evidence="design", output=output)(net).eval()
    with pytest.raises(ValueError, match=words):
        wrapped.fit(x)
    with pytest.raises(NotFittedError):
        wrapped(x, return_risk=True)


class _HeadFirst(nn.Module):
    """Registers its last layer first, and has a scale of two dimensions after it, or at its end a product with its own parameter."""

    def __init__(self, own_weight: bool = False) -> None:
        super().__init__()
        self.head, self.trunk = nn.Linear(6, CLASSES), nn.Linear(4, 6)
        self.own, self.weight = own_weight, nn.Parameter(torch.randn(6 if own_weight else 1, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x).tanh()
        return torch.einsum("nd,dc->nc", h, self.weight) if self.own else self.head(h) * self.weight


@pytest.mark.parametrize(("own_weight", "last"), [(False, "head"), (True, "the model itself")])
def test_features_of_a_layer_that_does_not_run_last_are_refused(own_weight: bool, last: str) -> None:
    wrapped = vote.Wrapper(2, evidence="design", output="logits")(_HeadFirst(own_weight)).eval()
    rows, before = (_inputs(), torch.arange(ROWS) % CLASSES), copy.deepcopy(wrapped.state_dict())
    for attempt in (lambda: wrapped.fit(rows[0]), lambda: fit(wrapped, rows, epochs=1)):
        with pytest.raises(ValueError, match=f"took 'trunk' for the last layer.* weights of '{last}' run last"):
            attempt()
    assert all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items())


def test_a_parameter_that_only_scales_the_scores_may_follow() -> None:
    model = _HeadFirst()
    model.head = model._modules.pop("head")  # registered last
    wrapped = vote.Wrapper(2, evidence="design", output="logits")(model).eval().fit(_inputs())
    assert wrapped.state_dict()["head.weight@design_whitening"].shape == (3, 7, 7)
