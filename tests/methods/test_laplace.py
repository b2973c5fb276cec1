"""Last-layer Laplace: compared with dense closed forms, and composed with the other methods."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.laplace_models import FEATURES, ROWS, net, normal
from torch import Tensor, nn

from workbench import NotFittedError, compose, fit, laplace, load, neo, sample, save, sculpt, vote
from workbench.core.ownership import table_of
from workbench.outputs import Logits

X, NEW = normal(ROWS, FEATURES), 3 * normal(7, FEATURES, seed=1)


def test_the_layer_is_named_once_it_is_known() -> None:
    (before,) = laplace.Wrapper().make()
    assert repr(before) == "laplace(n_samples=32)"
    assert repr(laplace.Wrapper()(net())).startswith("Sequential[laplace(layer=2, n_samples=32)]")


def features(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = model[:-1](x)
    return torch.cat([h, torch.ones(len(h), 1, dtype=h.dtype)], 1)


def linear_regression() -> tuple[nn.Linear, Tensor]:
    """A linear model at the mean of its posterior under prior precision 2 and noise 0.5."""
    target = X @ normal(FEATURES, 1, seed=2) + 0.5 * normal(ROWS, 1, seed=3)
    model = nn.Linear(FEATURES, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(X.T @ X / 0.25 + 2 * torch.eye(FEATURES), X.T @ target / 0.25).T)
    return model, target


# ---- rows without a class
@pytest.mark.parametrize("evidence", [None, "design"])
def test_rows_without_a_class_are_no_training_data(evidence: Any) -> None:
    labels, model = torch.arange(ROWS) % 3, net(3)
    some = torch.where(torch.arange(ROWS) < 20, labels, -100)

    def risk_after(*batches: Any) -> Tensor:
        wrapped = laplace.Wrapper(prior_precision=1.0, evidence=evidence, output="logits")(copy.deepcopy(model))
        return wrapped.eval().fit(list(batches))(NEW, return_risk=True)[1].epistemic

    expected = risk_after((X[:20], labels[:20]))
    torch.testing.assert_close(risk_after((X, some)), expected)
    torch.testing.assert_close(risk_after((X[:30], some[:30]), (X[30:], some[30:])), expected)
    assert (risk_after((X, labels)) < expected).all()


def test_padded_tokens_are_no_training_data() -> None:
    x, labels = normal(10, 6, FEATURES), torch.arange(60).reshape(10, 6) % 3
    mask = torch.arange(6) < 4

    def risk_after(inputs: Tensor, target: Tensor) -> Tensor:
        wrapped = laplace.Wrapper(prior_precision=1.0, output=Logits(dim=-1))(net(3)).eval()
        return wrapped.fit([(inputs, target)])(x, return_risk=True)[1].epistemic

    torch.testing.assert_close(risk_after(x, labels.where(mask, -100)), risk_after(x[:, mask], labels[:, mask]))


# ---- values
def test_a_linear_model_has_the_predictive_of_bayesian_linear_regression() -> None:
    model, target = linear_regression()
    wrapped = laplace.Wrapper(prior_precision=2.0, noise=0.5)(model).eval().fit([(X, target)])
    y, risk = wrapped(NEW, return_risk=True)
    covariance = torch.linalg.inv(X.T @ X / 0.25 + 2 * torch.eye(FEATURES))
    torch.testing.assert_close(risk, (NEW @ covariance * NEW).sum(1, keepdim=True).sqrt())
    torch.testing.assert_close(y, model(NEW))


def test_prior_and_noise_are_those_of_sklearn_at_its_own_optimum() -> None:
    from sklearn.linear_model import BayesianRidge

    target = X @ normal(FEATURES, 1, seed=2) + 0.5 * normal(ROWS, 1, seed=3)
    tiny = {"alpha_1": 1e-12, "alpha_2": 1e-12, "lambda_1": 1e-12, "lambda_2": 1e-12}
    ridge = BayesianRidge(max_iter=2000, tol=1e-12, fit_intercept=False, **tiny).fit(X.numpy(), target[:, 0].numpy())
    model = nn.Linear(FEATURES, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor(ridge.coef_)[None])
    _, risk = laplace.Wrapper()(model).eval().fit([(X, target)])(NEW, return_risk=True)
    expected = torch.tensor(ridge.predict(NEW.numpy(), return_std=True)[1] ** 2 - 1 / ridge.alpha_).sqrt()
    torch.testing.assert_close(risk[:, 0], expected, rtol=1e-5, atol=0)


def test_batches_add_up_to_the_whole() -> None:
    target = normal(ROWS, 2, seed=3)
    whole, parts = (laplace.Wrapper()(net()).eval() for _ in range(2))
    whole.fit([(X, target)])
    parts.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, target), batch_size=17, shuffle=True))
    torch.testing.assert_close(parts(NEW, return_risk=True)[1], whole(NEW, return_risk=True)[1])


def test_noise_of_sculpt_weighs_every_row_and_output() -> None:
    wrapped = compose(sculpt.Wrapper(), laplace.Wrapper(prior_precision=0.7))(net()).eval().fit([(X, None)])
    alone = sculpt.Wrapper()(net()).eval()
    alone.set_risk_parameters(dict(wrapped.named_risk_parameters()))
    _, noise = alone(X, return_risk=True)
    phi, new = features(net(), X), features(net(), NEW)
    expected = []
    for output in range(2):
        precision = (phi / noise[:, output, None].detach() ** 2).T @ phi + 0.7 * torch.eye(phi.shape[1])
        expected.append((new @ torch.linalg.inv(precision) * new).sum(1).sqrt())
    z, risk = wrapped(NEW, return_risk=True)
    torch.testing.assert_close(risk.epistemic, torch.stack(expected, 1))
    torch.testing.assert_close(risk.aleatoric, alone(NEW, return_risk=True)[1])
    torch.testing.assert_close(z, alone(NEW))


def test_each_voter_has_a_posterior_of_its_own() -> None:
    wrapped = compose(vote.Wrapper(3), laplace.Wrapper(prior_precision=0.7, noise=0.3))(net()).eval().fit([(X, None)])
    variances, means = [], []
    for voter in wrapped.voters():
        phi, new = features(voter, X), features(voter, NEW)
        inverse = torch.linalg.inv(phi.T @ phi / 0.09 + 0.7 * torch.eye(phi.shape[1]))
        variances.append((new @ inverse * new).sum(1, keepdim=True).expand(-1, 2))
        means.append(voter(NEW))
    y, risk = wrapped(NEW, return_risk=True)
    expected = torch.stack(variances).mean(0) + torch.stack(means).var(0, correction=0)
    torch.testing.assert_close(risk.epistemic, expected.sqrt())
    torch.testing.assert_close(y, torch.stack(means).mean(0))


def test_a_scale_and_a_shift_behind_the_last_layer_are_seen_through() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2] + self.net(x) * torch.tensor([2.0, -0.5])

    wrapped = laplace.Wrapper(prior_precision=0.7, noise=0.3)(Shifted()).eval().fit([(X, None)])
    phi, new = features(net(), X), features(net(), NEW)
    for output, slope in enumerate((2.0, -0.5)):
        inverse = torch.linalg.inv(phi.T @ phi * slope**2 / 0.09 + 0.7 * torch.eye(phi.shape[1]))
        expected = abs(slope) * (new @ inverse * new).sum(1).sqrt()
        torch.testing.assert_close(wrapped(NEW, return_risk=True)[1][:, output], expected)


def test_risk_is_in_original_units() -> None:
    target = normal(ROWS, 1, seed=3)
    small, large = (laplace.Wrapper(noise=0.5 * unit)(net(1)) for unit in (1, 1000))
    for wrapped, unit in ((small, 1), (large, 1000)):
        wrapped.scale(y_mean=torch.zeros(1).double(), y_scale=unit * torch.ones(1).double())
        wrapped.eval().fit([(X, unit * target)])
    torch.testing.assert_close(1000 * small(NEW, return_risk=True)[1], large(NEW, return_risk=True)[1])


# ---- classes
def dense_posterior(model: Any, prior_precision: float) -> Tensor:
    """(A (x) B + prior I)^-1 of the last layer's weights, class by class, as one matrix."""
    phi, p = features(model, X), model(X).softmax(-1).detach()
    b = torch.stack([torch.diag(row) - row[:, None] * row for row in p]).mean(0)
    return torch.linalg.inv(torch.kron(b, phi.T @ phi) + prior_precision * torch.eye(b.shape[0] * phi.shape[1]))


def test_logits_have_the_moments_of_the_dense_kronecker_posterior() -> None:
    model = net(3)
    wrapped = laplace.Wrapper(prior_precision=0.7, n_samples=1000, output="logits")(model).eval().fit([(X, None)])
    table = table_of(wrapped)
    basis, variance, mixing = (table.get(f"2.weight@laplace_{part}") for part in ("basis", "variance", "mixing"))
    new, covariance = features(model, NEW), dense_posterior(model, 0.7)
    for phi in new:
        at = torch.kron(torch.eye(3), phi[None])
        exact = at @ covariance @ at.T
        h = ((phi @ basis[0]) ** 2) @ variance
        torch.testing.assert_close(mixing @ torch.diag(h) @ mixing.T, exact)
    y, risk = wrapped(NEW, return_risk=True)
    draws = model(NEW) + torch.stack(
        [
            torch.linalg.cholesky(
                torch.kron(torch.eye(3), phi[None]) @ covariance @ torch.kron(torch.eye(3), phi[None]).T
            )
            @ normal(3, 40_000, seed=5)
            for phi in new
        ]
    ).permute(2, 0, 1)
    probs = draws.softmax(-1)
    torch.testing.assert_close(y.exp(), probs.mean(0), rtol=0, atol=0.02)
    entropy = torch.special.entr(probs).sum(-1).mean(0)
    torch.testing.assert_close(risk.aleatoric, entropy, rtol=0, atol=0.03)
    torch.testing.assert_close(risk.total, risk.aleatoric + risk.epistemic)


def test_the_curvature_is_the_gauss_newton_matrix_where_features_say_nothing_of_the_classes() -> None:
    """For equal probabilities in every row the Kronecker form is exact, and is the Hessian of the cross entropy."""
    model = net(3)
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.zero_()
    phi, labels = features(model, X), torch.arange(ROWS) % 3

    def loss(weights: Tensor) -> Tensor:
        return nn.functional.cross_entropy(phi @ weights.reshape(3, -1).T, labels, reduction="sum")

    hessian = torch.autograd.functional.hessian(loss, torch.zeros(3 * phi.shape[1], dtype=torch.float64))
    torch.testing.assert_close(torch.linalg.inv(hessian + 0.7 * torch.eye(len(hessian))), dense_posterior(model, 0.7))


def test_probabilities_and_log_probabilities_are_known_as_outputs() -> None:
    logits = laplace.Wrapper(prior_precision=0.7, output="logits")(net(3)).eval().fit([(X, None)])
    model = net(3)
    probs = laplace.Wrapper(layer="2", prior_precision=0.7, output="probs")(nn.Sequential(*model, nn.Softmax(-1)))
    logs = laplace.Wrapper(prior_precision=0.7, output="logits")(nn.Sequential(*net(3), nn.LogSoftmax(-1)))
    for other in (probs, logs):
        y, risk = other.eval().fit([(X, None)])(NEW, return_risk=True)
        torch.testing.assert_close(y if other is probs else y.exp(), logits(NEW).exp())
        torch.testing.assert_close(risk.epistemic, logits(NEW, return_risk=True)[1].epistemic)


def test_mean_field_is_the_probit_formula_on_the_dense_variances() -> None:
    model = net(3)
    wrapped = laplace.Wrapper(prior_precision=0.7, n_samples=500, output="logits")(model).eval().fit([(X, None)])
    covariance = dense_posterior(model, 0.7)
    at = [torch.kron(torch.eye(3), phi[None]) for phi in features(model, NEW)]
    variance = torch.stack([torch.diag(a @ covariance @ a.T) for a in at])
    expected = (model(NEW) / (1 + torch.pi / 8 * variance).sqrt()).softmax(-1)
    probs = laplace.mean_field(wrapped, NEW)
    torch.testing.assert_close(probs, expected)
    torch.testing.assert_close(probs, wrapped(NEW).exp(), rtol=0, atol=0.05)
    both = compose(vote.Wrapper(2), laplace.Wrapper(output="logits"))(net(3)).eval().fit([(X, None)])
    torch.testing.assert_close(laplace.mean_field(both, NEW).sum(1), torch.ones(7, dtype=torch.float64))


class Rescaled(nn.Module):
    """Scales the outputs of its last layer, and shifts them by a number for each class."""

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self.net, self.scale = net(3), scale
        self.register_buffer("shift", shift * torch.arange(3.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x) + self.shift


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (2.0, 0.0), (1.0, 1.0), (0.5, -2.0)])
@pytest.mark.parametrize("output", ["logits", "binary"])
def test_mean_field_is_that_of_the_models_own_scores(scale: float, shift: float, output: Any) -> None:
    model = Rescaled(scale, shift)
    wrapped = laplace.Wrapper(prior_precision=0.7, n_samples=2, output=output)(model).eval().fit([(X, None)])
    phi, new, p = features(model.net, X), features(model.net, NEW), model(X).detach()
    if output == "binary":
        curvatures = scale**2 * (p.sigmoid() * (1 - p.sigmoid())).mean(0)
        mixing = torch.eye(3, dtype=torch.float64)
    else:
        p = p.softmax(-1)
        curvatures, mixing = torch.linalg.eigh(scale**2 * (torch.diag(p.mean(0)) - p.T @ p / len(p)))
    gram = phi.T @ phi
    inverses = [torch.linalg.inv(c * gram + 0.7 * torch.eye(len(gram))) for c in curvatures.clamp_min(0)]
    rotated = torch.stack([((new @ inverse) * new).sum(1) for inverse in inverses], 1)
    variance = scale**2 * rotated @ mixing.square().T
    scores = model(NEW) / (1 + torch.pi / 8 * variance).sqrt()
    expected = scores.sigmoid() if output == "binary" else scores.softmax(-1)
    torch.testing.assert_close(laplace.mean_field(wrapped, NEW), expected)


def test_a_thousand_classes_never_meet_the_features_in_one_matrix() -> None:
    """512 features x 1000 classes: as weights of one matrix 2.6e11 numbers; nothing made here is larger than the weights themselves."""
    largest = 0

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for leaf in out if isinstance(out, tuple | list) else [out]:
                largest = max(largest, leaf.numel() if isinstance(leaf, Tensor) else 0)
            return out

    wrapped = laplace.Wrapper(prior_precision=1.0, n_samples=4, output="logits")(nn.Linear(512, 1000)).eval()
    with torch.no_grad():
        buffer = table_of(wrapped).get("weight@laplace_variance")
        buffer.fill_(1e-3)
        with Watching():
            _, risk = wrapped(torch.ones(2, 512), return_risk=True)
    assert risk.epistemic.shape == (2,)
    assert largest <= 1000 * 1000


# ---- the object
@pytest.mark.parametrize("output", ["values", "logits"])
def test_a_fitted_model_survives_copies_files_and_pickles(output: str, tmp_path: Path) -> None:
    wrapped = laplace.Wrapper(noise=0.5, output=output)(net()).eval().fit([(X, None)])
    save(wrapped, tmp_path / "model.safetensors")
    other = laplace.Wrapper(noise=0.5, output=output)(net(seed=4)).eval()
    other.load_state_dict(wrapped.state_dict())
    copies = [copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), other]
    copies.append(load(tmp_path / "model.safetensors", net(seed=4)).eval())
    y, risk = wrapped(NEW, return_risk=True)
    for copied in copies:
        z, same = copied(NEW, return_risk=True)
        assert torch.equal(z, y)
        assert torch.equal(same if output == "values" else same.total, risk if output == "values" else risk.total)


def test_a_vocabulary_is_refused_before_its_square_is_in_memory() -> None:
    model = nn.Linear(2, 50_000)
    with pytest.raises(
        ValueError,
        match="on a CPU of at most 32,766 classes, but 'the model itself' has 50,000, whose matrix takes up 19 GiB",
    ):
        laplace.Wrapper(output="logits")(model)
    assert type(model) is nn.Linear
    assert not dict(model.named_buffers())
    assert laplace.Wrapper(output="values")(model).needs_fit  # values have no such matrix


def test_predictions_do_not_depend_on_the_random_state_nor_move_it() -> None:
    wrapped = laplace.Wrapper(output="logits")(net(3)).eval().fit([(X, None)])
    state = torch.get_rng_state()
    first, again = wrapped(NEW), wrapped(NEW)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)


def test_training_mode_and_loss_are_the_models_own() -> None:
    wrapped, model = laplace.Wrapper(output="logits")(net(3)).train(), net(3)
    torch.testing.assert_close(wrapped(NEW), model(NEW))
    labels = torch.arange(7) % 3
    loss = wrapped.loss(nn.functional.cross_entropy, NEW, labels)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(model(NEW), labels))


def test_fit_learns_the_posterior_after_training() -> None:
    x = torch.linspace(-2, 2, 80)[:, None]
    wrapped = compose(laplace.Wrapper(), sculpt.Wrapper())(nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)))
    fit(wrapped, (x, torch.sin(2 * x)), epochs=30, progress=False)
    _, risk = wrapped(torch.tensor([[0.0], [8.0]]), return_risk=True)
    assert risk.epistemic[1] > 3 * risk.epistemic[0] > 0


def test_outside_the_data_the_risk_is_larger_under_every_composition() -> None:
    labels = torch.arange(ROWS) % 3
    for others in ([], [vote.Wrapper(2)], [sample.Wrapper(3)], [neo.Wrapper()], [sculpt.Wrapper(sculpt.LogitNormal)]):
        wrapped = compose(laplace.Wrapper(output="logits"), *others)(net(3)).eval().fit([(X, labels)])
        _, risk = wrapped(NEW, return_risk=True)
        assert (risk.epistemic > 0).all()


@pytest.mark.slow
def test_compiled_it_says_the_same() -> None:
    wrapped = compose(laplace.Wrapper(noise=0.5), sculpt.Wrapper())(net()).eval().fit([(X, None)])
    with torch.no_grad():
        y, risk = wrapped(NEW, return_risk=True)
        z, same = torch.compile(wrapped, backend="eager", fullgraph=True)(NEW, return_risk=True)
    torch.testing.assert_close(z, y)
    torch.testing.assert_close(same.epistemic, risk.epistemic)


def test_an_example_changes_nothing_where_the_last_layer_is_right() -> None:
    model, state = net(), torch.get_rng_state()
    wrapped = laplace.Wrapper(noise=0.5, example=X)(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not wrapped.state_dict()["2.weight@laplace_variance"].any()
    plain = laplace.Wrapper(noise=0.5)(model).fit([(X, None)]).eval()
    torch.testing.assert_close(wrapped.fit([(X, None)]).eval()(NEW, return_risk=True), plain(NEW, return_risk=True))


def test_without_data_there_is_no_risk() -> None:
    with pytest.raises(NotFittedError, match=r"call wrapped.fit\(loader\)"):
        laplace.Wrapper()(net()).eval()(NEW, return_risk=True)


def test_layers_that_are_called_linear_too_are_named_in_full() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T

    with pytest.raises(ValueError, match=r"an nn\.Linear .*, but '0', .* is a test_laplace\.Linear"):
        laplace.Wrapper()(nn.Sequential(Linear()))
    with pytest.raises(ValueError, match=r"'0', .* is a Linear of torch\.complex64"):
        laplace.Wrapper()(nn.Sequential(nn.Linear(FEATURES, 1, dtype=torch.complex64)))


def test_a_linear_layer_of_another_class_is_told_apart_by_its_module() -> None:
    """As of torch_geometric, which calls its own class Linear."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, FEATURES))
            self.register_parameter("bias", None)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight)

    words = rf"is a {re.escape(Linear.__module__)}\.Linear; put an nn\.Linear of the same weights in its place"
    for wrapper in (laplace.Wrapper(), vote.Wrapper(2, evidence="design", output="logits")):
        with pytest.raises(ValueError, match=words):
            wrapper(nn.Sequential(nn.ReLU(), Linear()))


def test_bad_input_is_told() -> None:
    with pytest.raises(ValueError, match="prior_precision must be a number above 0, not -1"):
        laplace.Wrapper(prior_precision=-1)
    with pytest.raises(ValueError, match="n_samples must be a whole number of at least 2"):
        laplace.Wrapper(n_samples=1)
    with pytest.raises(ValueError, match="no module 'head'; it has 0, 2"):
        laplace.Wrapper(layer="head")(net())
    with pytest.raises(ValueError, match=r"'1', taken as the last layer, is a Conv2d; .* name it, .* layer='0'"):
        laplace.Wrapper()(nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 1)))
    with pytest.raises(ValueError, match=r"the targets are NoneType for predictions \[60, 2\]"):
        laplace.Wrapper()(net()).fit([(X, None)])
    with pytest.raises(ValueError, match=r"the targets are \[60\] for predictions \[60, 2\]"):
        laplace.Wrapper()(net()).fit([(X, X[:, 0])])
    with pytest.raises(ValueError, match="mean_field is for class outputs"):
        laplace.mean_field(laplace.Wrapper()(net()), NEW)
    classes = laplace.Wrapper(output="logits")(net(3)).eval().fit([(X, None)])
    with pytest.raises(ValueError, match=r"a number for each row of scores \[60, 3\]; it got \[60, 4\]"):
        laplace.tune(classes, [(X, X)])
    with pytest.raises(ValueError, match=r"call wrapped.eval\(\) first"):
        laplace.tune(classes.train(), [(X, X)])
    with pytest.raises(TypeError, match=r"wrapped by laplace.Wrapper, not Sequential"):
        laplace.mean_field(net(), NEW)
    for batch in ((X * torch.nan, X[:, :2]), (X, X[:, :2] * torch.nan)):
        with pytest.raises(ValueError, match="features or residuals are NaN or infinite in batch 1; look for NaN"):
            laplace.Wrapper()(net()).fit([(X, X[:, :2]), batch, (X, X[:, :2])])
    with pytest.raises(ValueError, match="fit got no rows"):
        laplace.Wrapper(noise=1.0)(net()).fit([])
    with pytest.raises(ValueError, match="depends on it in another way"):
        laplace.Wrapper(noise=1.0)(nn.Sequential(net(), nn.Softplus())).fit([(X, None)])
    twice = nn.Linear(FEATURES, FEATURES).double()
    with pytest.raises(ValueError, match="ran 2 times"):
        laplace.Wrapper(noise=1.0)(nn.Sequential(twice, twice)).fit([(X, None)])
