"""Class risk heads in Keras' `fit`: their likelihood is added to the compiled loss, as in the same loss by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import keras_models
from helpers.keras_models import X, k
from torch import Tensor
from torch.nn import functional as F

from workbench import compose, sculpt, vote
from workbench.errors import WorkbenchWarning
from workbench.outputs import Binary, Logits

seeded_keras = keras_models.seeded_keras
LABELS = np.arange(12) % 3
XS, INTS = torch.as_tensor(X), torch.as_tensor(LABELS)


def classifier(outputs: int = 3, activation: str | None = None) -> Any:
    return k.Sequential(
        [k.Input((4,)), k.layers.Dense(8, activation="tanh"), k.layers.Dense(outputs, activation=activation)]
    )


def by_hand(wrapped: Any) -> tuple[dict[str, Tensor], Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Copies of the weights that wrapping a `classifier` gave, and what they make of inputs: scores and their noise (before activations)."""
    state = {name: value.detach().clone() for name, value in wrapped.as_torch().state_dict().items()}
    weights = {}
    for name, value in state.items():
        if value.is_floating_point() and "workbench" not in name:
            weights[name] = value.requires_grad_()

    def answers(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(x @ weights["dense.kernel"] + weights["dense.bias"])
        scores = hidden @ weights["dense_1.kernel"] + weights["dense_1.bias"]
        raw = hidden @ weights["dense_1.kernel@sculpt"] + weights["dense_1.bias@sculpt"]
        return scores, F.softplus(raw) + 1e-9

    return weights, answers


def expected_probs(scores: Tensor, noise: Tensor) -> Tensor:
    """MacKay 1992."""
    return torch.softmax(scores / torch.sqrt(1 + torch.pi / 8 * noise**2), -1)


CASES: dict[str, tuple[dict[str, Any], Any, Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "class numbers": (
        {"output": "logits"},
        lambda: k.losses.SparseCategoricalCrossentropy(from_logits=True),
        LABELS,
        lambda s, n: F.cross_entropy(s, INTS) + F.nll_loss(expected_probs(s, n).log(), INTS),
    ),
    "a column of floats": (
        {"output": Logits()},
        lambda: k.losses.SparseCategoricalCrossentropy(from_logits=True),
        LABELS[:, None].astype("float32"),
        lambda s, n: F.cross_entropy(s, INTS) + F.nll_loss(expected_probs(s, n).log(), INTS),
    ),
    "one-hot": (
        {"output": "logits"},
        lambda: k.losses.CategoricalCrossentropy(from_logits=True),
        np.eye(3)[LABELS],
        lambda s, n: F.cross_entropy(s, INTS) + F.nll_loss(expected_probs(s, n).log(), INTS),
    ),
    "a class left out": (
        {"output": "logits"},
        lambda: k.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
        LABELS,
        lambda s, n: (
            F.cross_entropy(s, INTS, ignore_index=0) + F.nll_loss(expected_probs(s, n).log(), INTS, ignore_index=0)
        ),
    ),
    "the distribution said": (
        {"output": "logits", "distribution": sculpt.LogitNormal},
        lambda: k.losses.SparseCategoricalCrossentropy(from_logits=True),
        LABELS,
        lambda s, n: F.cross_entropy(s, INTS) + F.nll_loss(expected_probs(s, n).log(), INTS),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_fit_trains_by_the_compiled_loss_and_the_likelihood(case: str) -> None:
    options, loss, labels, expected = CASES[case]
    plain = classifier()
    plain.compile(k.optimizers.SGD(0.5), loss(), metrics=["accuracy"] if case == "class numbers" else None)
    wrapped = sculpt.Wrapper(n_layers=1, **options)(plain)
    weights, answers = by_hand(wrapped)
    history = wrapped.fit(X, labels, epochs=3, batch_size=12, verbose=0).history["loss"]
    optimizer = torch.optim.SGD(weights.values(), 0.5)
    for epoch_loss in history:
        total = expected(*answers(XS))
        assert epoch_loss == pytest.approx(total.item(), rel=1e-4)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    trained = wrapped.as_torch().state_dict()
    for name, value in weights.items():
        torch.testing.assert_close(trained[name], value.detach(), rtol=1e-4, atol=1e-5)
    judged = wrapped.evaluate(X, labels, verbose=0)
    assert np.atleast_1d(judged)[0] == pytest.approx(expected(*answers(XS)).item(), rel=1e-4)
    if case == "class numbers":
        assert judged[1] == pytest.approx(float((answers(XS)[0].argmax(-1) == INTS).float().mean()))
    prediction, risks = wrapped.predict(X, verbose=0)
    scores, noise = answers(XS)
    torch.testing.assert_close(torch.as_tensor(prediction), scores.detach(), rtol=1e-4, atol=1e-5)
    probs = expected_probs(scores, noise).detach()
    torch.testing.assert_close(torch.as_tensor(risks["total"]), -(probs * probs.log()).sum(-1), rtol=1e-4, atol=1e-5)


def test_weights_of_rows_count_in_both() -> None:
    plain = classifier()
    plain.compile("sgd", k.losses.SparseCategoricalCrossentropy(from_logits=True))
    wrapped = sculpt.Wrapper(n_layers=1, output="logits")(plain)
    scores, noise = by_hand(wrapped)[1](XS)
    weights = np.arange(12, dtype="float32")
    each = F.cross_entropy(scores, INTS, reduction="none") + F.nll_loss(
        expected_probs(scores, noise).log(), INTS, reduction="none"
    )
    expected = (each * torch.as_tensor(weights)).mean().item()
    assert wrapped.test_on_batch(X, LABELS, sample_weight=weights) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("targets", [LABELS % 2, (LABELS % 2)[:, None].astype("float32")], ids=["numbers", "column"])
def test_a_yes_or_no(targets: Any) -> None:
    plain = classifier(1)
    plain.compile("sgd", k.losses.BinaryCrossentropy(from_logits=True))
    wrapped = sculpt.Wrapper(n_layers=1, output=Binary())(plain)
    scores, noise = (part[:, 0] for part in by_hand(wrapped)[1](XS))
    yes = torch.as_tensor(targets).reshape(12).float()
    probs = torch.sigmoid(scores / torch.sqrt(1 + torch.pi / 8 * noise**2))  # only the score of yes is uncertain
    likelihood = -(yes * probs.log() + (1 - yes) * (1 - probs).log()).mean()
    expected = F.binary_cross_entropy_with_logits(scores, yes) + likelihood
    assert wrapped.test_on_batch(X, targets) == pytest.approx(expected.item(), rel=1e-4)


def test_probabilities_that_a_softmax_gives() -> None:
    plain = classifier(activation="softmax")
    plain.compile("sgd", "sparse_categorical_crossentropy")
    wrapped = sculpt.Wrapper(n_layers=1, output="probs")(plain)
    scores = torch.softmax(by_hand(wrapped)[1](XS)[0], -1)
    state = wrapped.as_torch().state_dict()
    hidden = torch.tanh(XS @ state["dense.kernel"] + state["dense.bias"])
    noise = F.softplus(torch.softmax(hidden @ state["dense_1.kernel@sculpt"] + state["dense_1.bias@sculpt"], -1))
    expected = F.nll_loss(scores.log(), INTS) + F.nll_loss(expected_probs(scores.log(), noise).log(), INTS)
    assert wrapped.test_on_batch(X, LABELS) == pytest.approx(expected.item(), rel=1e-4)


def test_places_that_a_mask_leaves_out_count_in_neither() -> None:
    tokens = np.array([[1, 2, 0, 0], [3, 1, 2, 0]])
    labels = np.array([[0, 1, 2, 2], [1, 1, 0, 2]])
    plain = k.Sequential([k.Input((4,)), k.layers.Embedding(5, 6, mask_zero=True), k.layers.Dense(3)])
    plain.compile("sgd", k.losses.SparseCategoricalCrossentropy(from_logits=True))
    wrapped = sculpt.Wrapper(n_layers=1, output=Logits(dim=-1))(plain)
    state = {name.partition(".")[2]: value for name, value in wrapped.as_torch().state_dict().items()}
    hidden = state["embeddings"][torch.as_tensor(tokens)]
    scores = hidden @ state["kernel"] + state["bias"]
    noise = F.softplus(hidden @ state["kernel@sculpt"] + state["bias@sculpt"])
    kept, targets = torch.as_tensor(tokens) != 0, torch.as_tensor(labels)
    expected = F.cross_entropy(scores[kept], targets[kept])
    expected = expected + F.nll_loss(expected_probs(scores, noise)[kept].log(), targets[kept])
    assert wrapped.test_on_batch(tokens, labels) == pytest.approx(expected.item(), rel=1e-4)


def test_voters_and_their_heads_train_on_their_rows() -> None:
    plain = classifier()
    plain.compile(k.optimizers.SGD(0.5), k.losses.SparseCategoricalCrossentropy(from_logits=True))
    wrapped = compose(vote.Wrapper(2, output="logits"), sculpt.Wrapper(n_layers=1, output="logits"))(plain)
    state = {name: value.detach().clone() for name, value in wrapped.as_torch().state_dict().items()}

    def answers(voter: int) -> tuple[Tensor, Tensor]:
        def of(name: str) -> Tensor:
            return state[f"{name}@vote"][voter]

        hidden = torch.tanh(XS @ of("dense.kernel") + of("dense.bias"))
        noise = F.softplus(hidden @ of("dense_1.kernel@sculpt") + of("dense_1.bias@sculpt"))
        return hidden @ of("dense_1.kernel") + of("dense_1.bias"), noise

    each = [answers(voter) for voter in range(2)]
    of_row = torch.stack(
        [
            F.cross_entropy(s, INTS, reduction="none") + F.nll_loss(expected_probs(s, n).log(), INTS, reduction="none")
            for s, n in each
        ]
    )
    probs = torch.stack([expected_probs(s, n) for s, n in each]).mean(0)
    # the compiled loss of the mean prediction, and the likelihood of its probabilities, are the same number
    assert wrapped.evaluate(X, LABELS, verbose=0) == pytest.approx(2 * F.nll_loss(probs.log(), INTS).item(), rel=1e-4)
    torch.manual_seed(5)
    dealt = wrapped(X, training=True).detach()
    voter_of_row = torch.stack([(s - dealt).abs().sum(-1) for s, _ in each]).argmin(0)
    assert sorted(torch.bincount(voter_of_row).tolist()) == [6, 6]
    torch.manual_seed(5)
    expected = of_row.gather(0, voter_of_row[None]).mean().item()
    assert wrapped.train_on_batch(X, LABELS) == pytest.approx(expected, rel=1e-4)
    moved = [name for name, value in wrapped.as_torch().state_dict().items() if not torch.equal(value, state[name])]
    assert any("kernel@sculpt" in name for name in moved)


def test_a_loss_by_hand_gets_scores_and_their_noise() -> None:
    plain = classifier()
    plain.compile(optimizer=k.optimizers.SGD(0.5))
    with pytest.warns(WorkbenchWarning, match=r"(?s)\.compile\(loss=your_loss\).*LogitNormal\.loss_function"):
        wrapped = sculpt.Wrapper(n_layers=1, output="logits")(plain)
    with pytest.raises(ValueError, match=r"model\.compute_loss"):
        wrapped.train_on_batch(X, LABELS)

    def compute_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: Any = None
    ) -> Any:
        y_hat, risk = y_pred
        cross_entropy = k.ops.mean(k.losses.sparse_categorical_crossentropy(y, y_hat, from_logits=True))
        return cross_entropy + sculpt.LogitNormal.loss_function(y, y_hat, risk)

    wrapped.compute_loss = compute_loss
    scores, noise = by_hand(wrapped)[1](XS)
    expected = F.cross_entropy(scores, INTS) + F.nll_loss(expected_probs(scores, noise).log(), INTS)
    assert wrapped.train_on_batch(X, LABELS) == pytest.approx(expected.item(), rel=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    plain = classifier()
    plain.compile("sgd", k.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match=r"sculpt\.Wrapper\(LogitNormal\), not Laplace"):
        sculpt.Wrapper(sculpt.Laplace, output="logits")(plain).train_on_batch(X, LABELS)
    wrapped = sculpt.Wrapper(n_layers=1, output="logits")(plain)
    plain.compile("sgd", "mse")
    values = sculpt.Wrapper(n_layers=1, output="logits")(plain)
    with pytest.raises(ValueError, match="probabilities of the same shape"):
        values.train_on_batch(X, np.ones((12, 3), "float32"))
    with pytest.raises(ValueError, match="class numbers must be whole"):
        wrapped.train_on_batch(X, LABELS + 0.5)
