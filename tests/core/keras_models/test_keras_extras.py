"""Keras models with losses added by layers, masked outputs and regularizers, and wrapped models as parts of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import keras_models
from helpers.keras_models import X, Y, k, nll, sequential

import workbench
from workbench import compose, neo, sample, sculpt, vote
from workbench.errors import WorkbenchWarning

seeded_keras = keras_models.seeded_keras

TOKENS = np.where(np.arange(5) < 2 + np.arange(12)[:, None] % 4, 1 + np.arange(60).reshape(12, 5) % 6, 0)
SERIES = (TOKENS[..., None] / 6).astype("float32")


def adding() -> Any:
    """A layer adds a loss, another regularizes what it gives, and a weight has a regularizer as well."""

    class Pull(k.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * k.ops.mean(x**2))
            return x

    layers = [k.layers.Dense(6, activation="tanh", activity_regularizer=k.regularizers.L1(0.2)), Pull()]
    return k.Sequential([k.Input((4,)), *layers, k.layers.Dense(1, kernel_regularizer=k.regularizers.L2(0.3))])


def masking() -> Any:
    inputs = k.Input((5,), dtype="int32")
    hidden = k.layers.LSTM(4, return_sequences=True)(k.layers.Embedding(7, 3, mask_zero=True)(inputs))
    return k.Model(inputs, k.layers.Dense(1)(hidden))


def in_pair() -> Any:
    inputs = k.Input((5,), dtype="int32")
    hidden = k.layers.Embedding(7, 3, mask_zero=True)(inputs)
    pooled = k.layers.GlobalAveragePooling1D()(hidden)
    return k.Model(
        inputs, {"each": k.layers.Dense(1, name="each")(hidden), "all": k.layers.Dense(2, name="all")(pooled)}
    )


CASES: dict[str, tuple[Any, Any, Any]] = {
    "losses": (adding, X, Y),
    "masks": (masking, TOKENS, SERIES),
    "masks of one of two": (in_pair, TOKENS, {"each": SERIES, "all": np.repeat(Y, 2, 1)}),
}


def compiled(case: str) -> Any:
    plain = CASES[case][0]()
    plain.compile(k.optimizers.SGD(0.1), "mse")
    return plain


def total(models: list[Any], rows: list[Any], x: Any, y: Any, judge: Any, training: bool) -> torch.Tensor:
    """The loss of plain models, of which each answers rows of its own, by Keras' own losses: their share of the rows weighs what they add."""
    answers, masks, others = [], [], torch.zeros(())
    for model, mine in zip(models, rows, strict=True):
        out = model(torch.as_tensor(x)[mine], training=training)
        answers.append(out)
        masks.append(k.tree.map_structure(lambda leaf: getattr(leaf, "_keras_mask", None), out))
        added = [loss for layer in model._flatten_layers() for loss in layer._losses]
        weights = [v.regularizer(v) for v in model.trainable_variables if v.regularizer is not None]
        others = others + sum(added, torch.zeros(())) * len(mine) / len(x) + sum(weights, torch.zeros(())) / len(models)
    order = torch.argsort(torch.cat(rows))

    def joined(*leaves: Any) -> Any:
        return None if leaves[0] is None else torch.cat(leaves)[order]

    y_pred, mask = k.tree.map_structure(joined, *answers), k.tree.map_structure(joined, *masks)
    for leaf, its in zip(k.tree.flatten(y_pred), k.tree.flatten(mask), strict=True):
        leaf._keras_mask = its
    return judge._compile_loss(k.tree.map_structure(torch.as_tensor, y), y_pred) + others


@pytest.mark.parametrize("case", CASES)
def test_a_step_trains_by_the_whole_loss_of_plain_models(case: str) -> None:
    _, x, y = CASES[case]
    wrapped, judge = vote.Wrapper(3)(compiled(case)), compiled(case)
    wrapped(x, training=True)
    copies = wrapped.voters()
    torch.manual_seed(5)
    rows = [*torch.randperm(12).tensor_split(3)]
    torch.manual_seed(5)
    loss = wrapped.train_on_batch(x, y, return_dict=True)["loss"]
    expected = total(copies, rows, x, y, judge, training=True)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    for copied, trained in zip(copies, wrapped.voters(), strict=True):
        for mine, theirs in zip(copied.trainable_variables, trained.trainable_variables, strict=True):
            torch.testing.assert_close(theirs.value, mine.value - 0.1 * mine.value.grad)


@pytest.mark.parametrize("case", CASES)
def test_evaluation_and_metrics_see_the_same(case: str) -> None:
    _, x, y = CASES[case]
    wrapped, judge = vote.Wrapper(3)(compiled(case)), compiled(case)
    everyone = [torch.arange(12)]
    each = [total([model], everyone, x, y, judge, training=False).item() for model in wrapped.voters()]
    mean = wrapped(x)
    loss_of_mean = judge._compile_loss(k.tree.map_structure(torch.as_tensor, y), mean)
    parts = [
        judge._compile_loss(k.tree.map_structure(torch.as_tensor, y), copied(x)).item() for copied in wrapped.voters()
    ]
    expected = loss_of_mean.item() + np.mean(each) - np.mean(parts)
    assert wrapped.evaluate(x, y, batch_size=12, verbose=0, return_dict=True)["loss"] == pytest.approx(
        expected, rel=1e-5
    )


def test_what_is_masked_counts_in_no_loss_metric_or_likelihood() -> None:
    plain = masking()
    plain.compile("sgd", "mse", metrics=["mae"])
    wrapped = sculpt.Wrapper()(plain)
    y, risk = wrapped(TOKENS, return_risk=True)
    kept = torch.as_tensor(TOKENS > 0)
    off = (y - torch.as_tensor(SERIES))[kept]
    scores = wrapped.evaluate(TOKENS, SERIES, batch_size=12, verbose=0, return_dict=True)
    likelihood = nll(SERIES[kept.numpy()], y[kept], risk[kept])
    assert scores["loss"] == pytest.approx((off**2).mean().item() + likelihood, rel=1e-4)
    assert scores["mae"] == pytest.approx(off.abs().mean().item(), rel=1e-5)
    changed = np.where(kept.numpy()[..., None], SERIES, 99.0)
    again = wrapped.evaluate(TOKENS, changed, batch_size=12, verbose=0, return_dict=True)
    assert again["loss"] == pytest.approx(scores["loss"], rel=1e-6)


def test_a_risk_heads_own_weights_are_regularized_as_the_models() -> None:
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper())(compiled("losses"))
    state = wrapped.state_dict()
    kernels = [value for name, value in state.items() if name.startswith("dense_1.kernel")]
    assert len(kernels) == 2  # the model's, and its head's; each [voters, ...]
    wrapped(X)
    assert float(sum(wrapped.losses)) == pytest.approx(
        sum(0.3 * (w**2).sum().item() / 2 for w in kernels) + _added(wrapped), rel=1e-5
    )


def _added(wrapped: Any) -> float:
    losses = []
    for model in wrapped.voters():
        model(X)
        losses.append(sum(loss.item() for layer in model._flatten_layers() for loss in layer._losses))
    return float(np.mean(losses))


@pytest.mark.parametrize(
    "make",
    [lambda: sample.Wrapper(3), neo.Wrapper, lambda: compose(vote.Wrapper(2), sample.Wrapper(2, where="weights"))],
)
@pytest.mark.parametrize("case", CASES)
def test_all_wrappers_train_with_them(case: str, make: Callable[[], Any]) -> None:
    _, x, y = CASES[case]
    wrapped = make()(compiled(case))
    wrapped.fit(x, y, epochs=2, batch_size=6, verbose=0, validation_data=(x, y))
    answer, risk = wrapped(x, return_risk=True)
    assert k.tree.map_structure(lambda leaf: None, answer) == k.tree.map_structure(lambda leaf: None, compiled(case)(x))
    assert "keras_extras" not in str(risk)
    wrapped.predict(x, verbose=0)


def test_prior_functions_of_models_that_add_losses_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="leave prior out"):
        vote.Wrapper(2, prior=1.0)(compiled("losses")).train_on_batch(X, Y)


def test_the_fit_of_workbench_says_what_it_leaves_out() -> None:
    wrapped = vote.Wrapper(2)(masking())
    with pytest.warns(WorkbenchWarning, match="masks of the output, which only its own fit"):
        workbench.fit(wrapped.as_torch(), (torch.as_tensor(TOKENS), torch.as_tensor(SERIES)), epochs=1, progress=False)


def test_files_keep_models_that_add_losses(tmp_path: Path) -> None:
    wrapped = vote.Wrapper(2)(compiled("masks"))
    wrapped.fit(TOKENS, SERIES, epochs=1, verbose=0)
    wrapped.save(tmp_path / "model.keras")
    restored = workbench.load(tmp_path / "model.keras")
    losses = []
    for model in (wrapped, restored):
        torch.manual_seed(3)
        losses.append(model.train_on_batch(TOKENS, SERIES))
    assert losses[0] == losses[1]


def nested(kind: str, inner: Any) -> Any:
    if kind == "functional":
        inputs = k.Input((4,))
        return k.Model(inputs, k.layers.Rescaling(2.0)(inner(inputs)))
    if kind == "sequential":
        return k.Sequential([k.Input((4,)), inner, k.layers.Rescaling(2.0)])

    class Outer(k.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def call(self, x: Any, training: Any = None) -> Any:
            return 2 * self.inner(x)  # which learns from Keras whether it trains

    return Outer()


@pytest.mark.parametrize("kind", ["functional", "sequential", "subclassed"])
def test_a_wrapped_part_votes_and_trains_in_a_model(kind: str) -> None:
    inner = vote.Wrapper(3)(sequential())
    outer = nested(kind, inner)
    copies = inner.voters()
    each = torch.stack([copied(X) for copied in copies])
    torch.testing.assert_close(outer(X), 2 * each.mean(0))
    outer.compile(k.optimizers.SGD(0.1), "mse")
    inner(X, training=True)
    torch.manual_seed(5)
    rows = torch.randperm(12).tensor_split(3)
    torch.manual_seed(5)
    loss = outer.train_on_batch(X, Y)
    parts = [
        ((2 * copied(X[mine]) - torch.as_tensor(Y)[mine]) ** 2).sum() for copied, mine in zip(copies, rows, strict=True)
    ]
    expected = torch.stack(parts).sum() / 12
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    for copied, trained in zip(copies, inner.voters(), strict=True):
        for mine, theirs in zip(copied.trainable_variables, trained.trainable_variables, strict=True):
            torch.testing.assert_close(theirs.value, mine.value - 0.1 * mine.value.grad)


def test_losses_of_a_wrapped_part_reach_the_model() -> None:
    inner = vote.Wrapper(2)(adding())
    outer = nested("functional", inner)
    outer(X)
    both = float(sum(outer.losses))
    inner(X)
    assert both == pytest.approx(float(sum(inner.losses)), rel=1e-6)
    assert both > 0


@pytest.mark.parametrize("shapes", [((12,), (12, 1)), ((12, 1), (12,)), ((12,), (12,))])
def test_targets_and_weights_are_compared_row_by_row(shapes: Any) -> None:
    outputs, targets = shapes
    inputs = k.Input((4,))
    hidden = k.layers.Dense(1)(inputs)
    plain = k.Model(inputs, k.ops.squeeze(hidden, -1) if outputs == (12,) else hidden)
    plain.compile("sgd", "mse")
    wrapped = sculpt.Wrapper()(plain)
    y, risk = (leaf.detach().reshape(12) for leaf in wrapped(X, return_risk=True))
    target, weights = torch.as_tensor(Y[:, 0]), np.arange(12, dtype="float32")
    likelihood = -(torch.distributions.Normal(y, risk).log_prob(target) * torch.as_tensor(weights)).mean().item()
    for sample_weight in (weights, weights[:, None]):
        plain_loss, both = (
            model.test_on_batch(X, Y.reshape(targets), sample_weight=sample_weight, return_dict=True)["loss"]
            for model in (plain, wrapped)
        )
        assert both == pytest.approx(plain_loss + likelihood, rel=1e-4)


def test_metrics_whose_config_leaves_something_out_judge_as_they_are() -> None:
    class Above(k.metrics.Metric):  # type: ignore[misc]
        def __init__(self, threshold: float = 0.5, name: str = "above", **kwargs: Any) -> None:
            super().__init__(name=name, **kwargs)
            self.threshold, self.share = threshold, self.add_weight(name="share", initializer="zeros")

        def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.share.assign(k.ops.mean(k.ops.cast(y_pred > self.threshold, "float32")))

        def result(self) -> Any:
            return self.share

    plain = sequential()
    plain.compile("sgd", "mse", metrics=[Above(threshold=-100.0)])
    wrapped = vote.Wrapper(2)(plain)
    assert wrapped.evaluate(X, Y, verbose=0, return_dict=True)["above"] == 1
