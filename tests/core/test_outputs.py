"""Declared meanings of outputs: read, written, refused with the lines to write, and asked for where missing."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import WorkbenchWarning, calibrate, compose, fit, laplace, neo, sculpt, vote
from workbench.core.outputs.options import from_json, read, to_json
from workbench.outputs import Binary, Logits, Mean, Probs, State, Values
from workbench.training.default_losses import LossByMeaning

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Gives(nn.Module):
    """A linear layer, and what a function makes of its four outputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def asked(output: Any, function: Any = lambda h: h) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return vote.Wrapper(3, output=output)(Gives(function)).eval()(X, return_risk=True)


# ---- the option
@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (None, None),
        ("binary", "binary"),
        (Logits, "logits"),
        (Logits(), "logits"),
        (Logits(dim=1), Logits(1)),
        (Binary(logits=False), Binary(False)),
        ({0: Values, "a.b": "probs"}, {"0": "values", "a.b": "probs"}),
    ],
)
def test_short_forms_classes_and_instances_are_one(said: Any, kept: Any) -> None:
    assert read(said) == kept
    assert from_json(to_json(read(said))) == kept


@pytest.mark.parametrize("said", ["logit", {}, {"a": None}, {"a": {"b": "logits"}}, 3, nn.Linear, {"a": "logit"}])
def test_anything_else_is_refused_when_the_wrapper_is_made(said: Any) -> None:
    with pytest.raises(ValueError, match=r"output must be .*a dict from the name"):
        vote.Wrapper(output=said)


def test_options_of_meanings_are_checked() -> None:
    with pytest.raises(ValueError, match="dim must be the dimension of the classes"):
        Logits(dim="channels")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="True or False"):
        Binary(logits=1)  # type: ignore[arg-type]


def test_wrappers_of_one_model_say_the_same() -> None:
    model = nn.Linear(4, 3)
    both = compose(vote.Wrapper(2, output={"": "logits"}), sculpt.Wrapper(output={"": "logits"}))
    assert both.output == {"": "logits"}
    with pytest.raises(ValueError, match="different output"):
        compose(vote.Wrapper(output="logits"), sculpt.Wrapper(output="probs"))
    with pytest.raises(ValueError, match="was wrapped with output='logits'"):
        sculpt.Wrapper(output="values")(vote.Wrapper(output="logits")(model))


# ---- what can't be told
@pytest.mark.parametrize(
    ("output", "function", "words"),
    [
        (
            "logits",
            lambda h: h.reshape(8, 2, 2),
            [r"output=Logits\(dim=1\)   # maps", "2 classes", r"output=Logits\(dim=-1\)"],
        ),
        ("logits", lambda h: h[:, 0], [r"scores \[n, classes\]", r"output=Binary\(\)"]),
        ("logits", lambda h: h[:, :1], ["a single class always has probability 1", r"output=Binary\(\)"]),
        ("probs", lambda h: h[:, :1].sigmoid(), [r"output=Binary\(logits=False\)"]),
        ("probs", lambda h: h.sigmoid(), ["sum to", r"output=Binary\(logits=False\)"]),
        ("probs", lambda h: h + 3, [r"outside \[0, 1\]", 'output="logits"']),
        (Binary(logits=False), lambda h: h + 3, [r"outside \[0, 1\]", 'output="binary"']),
        ("logits", lambda h: h.softmax(-1), ["the model gives probabilities", 'output="probs"']),
        (
            "logits",
            lambda h: (h, 2 * h),
            ["any of them could hold the scores", r'output=\{0: "logits"\}', r"1: \.\.\.,  # \[8, 4\]"],
        ),
        (
            {"logit": "logits"},
            lambda h: {"logits": h},
            ["names 'logit', which the model does not return", r"'logits': \[8, 4\]"],
        ),
        ({"logits": "logits"}, lambda h: h, ["meaning is given without a name"]),
        ({"a": "logits"}, lambda h: {"a": h.reshape(8, 2, 2)}, [r"output=\{'a': Logits\(dim=1\)\}"]),
        (Logits(dim=3), lambda h: h, [r"dim=3.*2 dimensions"]),
        ("logits", lambda h: torch.view_as_complex(h.reshape(8, 2, 2)), ["complex"]),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_line_to_write(output: Any, function: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0]) as refusal:
        asked(output, function)
    for word in words[1:]:
        refusal.match(word)


def test_an_output_of_training_only_may_be_missing() -> None:
    named = {"logits": "logits", "loss": Mean()}
    _, risk = asked(named, lambda h: {"logits": h})
    assert risk.total["logits"].shape == (8,)


def test_a_name_covers_what_lies_below_and_a_star_the_rest() -> None:
    def nested(h: Tensor) -> Any:
        return {"heads": [h, 2 * h], "rest": (h, h.sum())}

    _, risk = asked({"heads": "logits", "*": "values"}, nested)
    assert [leaf.shape for leaf in risk.total["heads"]] == [(8,), (8,)]
    assert risk.total["rest"][0].shape == (8, 4)


def test_a_sole_number_is_a_value_and_one_beside_others_a_mean() -> None:
    _, risk = asked(None, lambda h: h.sum())
    assert risk.shape == ()
    _, risk = asked(None, lambda h: (h, h.sum()))
    assert risk[0].shape == (8, 4)
    assert risk[1] is None


def test_saturated_scores_have_finite_predictions_and_no_risk() -> None:
    for output in ("logits", "binary"):
        y, risk = asked(output, lambda h: 1e4 * h.sign().detach() + 0 * h)
        assert y.isfinite().all()
        assert all(risk[name].isfinite().all() and (risk[name] >= 0).all() for name in risk)


# ---- training
def test_class_numbers_that_nobody_announced_are_noticed() -> None:
    labels = torch.arange(8) % 4
    for train in (
        lambda model: fit(model, (X, labels), epochs=1, validation=0, progress=False),
        lambda model: model.loss(nn.CrossEntropyLoss(), X, labels),
        lambda model: model.loss(F.binary_cross_entropy_with_logits, X, torch.ones(8, 4)),
        lambda model: calibrate(model.eval(), (X.repeat(10, 1), labels.repeat(10)), "temperature"),
    ):
        with pytest.warns(WorkbenchWarning, match=r'Wrap with output="(logits|binary)"'):
            train(vote.Wrapper(2)(nn.Linear(4, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", WorkbenchWarning)
        for said in (
            vote.Wrapper(2, output="values"),
            vote.Wrapper(2, output="logits"),
            compose(),
            neo.Wrapper(),
        ):
            said(nn.Linear(4, 4)).loss(nn.CrossEntropyLoss(), X, labels)
        vote.Wrapper(2)(nn.Linear(4, 4)).loss(nn.MSELoss(), X, X)


def test_losses_by_meaning_are_torchs() -> None:
    scores, maps = torch.randn(8, 4), torch.randn(2, 3, 5, 5)
    labels = torch.randint(3, (2, 5, 5))
    labels[0, :2] = -100
    assert torch.allclose(LossByMeaning(Logits(dim=1))(maps, labels), F.cross_entropy(maps, labels))
    soft = torch.rand(2, 3, 5, 5).softmax(1)
    assert torch.allclose(LossByMeaning(Logits(dim=1))(maps, soft), F.cross_entropy(maps, soft))
    assert torch.allclose(
        LossByMeaning("logits")(scores, scores.softmax(-1)), F.cross_entropy(scores, scores.softmax(-1))
    )
    yes = torch.rand(8, 4).round()
    assert torch.allclose(LossByMeaning("binary")(scores, yes.bool()), F.binary_cross_entropy_with_logits(scores, yes))
    assert torch.allclose(
        LossByMeaning("binary")(scores[:, :1], yes[:, 0]), F.binary_cross_entropy_with_logits(scores[:, 0], yes[:, 0])
    )


@pytest.mark.parametrize(("scores", "target"), [((1, 1), (1,)), ((1,), (1, 1)), ((1, 1), (1, 1)), ((1,), (1,))])
def test_a_yes_or_no_of_a_single_row_is_one_of_several(scores: Any, target: Any) -> None:
    loss = LossByMeaning("binary")(torch.full(scores, 0.7), torch.ones(target, dtype=torch.int64))
    assert torch.allclose(loss, F.binary_cross_entropy_with_logits(torch.tensor(0.7), torch.tensor(1.0)))


def test_rows_may_leave_a_single_one_for_validation() -> None:
    wrapped = vote.Wrapper(2, output="binary")(nn.Linear(4, 1))
    history = fit(wrapped, (X[:6], torch.arange(6) % 2), epochs=1, progress=False)
    assert history.frame["validation_loss"].notna().all()


@pytest.mark.parametrize(
    ("output", "y", "words"),
    [
        ("logits", torch.zeros(8, 4), "the output is class scores"),
        ("logits", torch.full((8, 2), 1), "class numbers are"),
        (Logits(dim=-1), torch.full((8,), 7), "class numbers go from 7 to 7"),
        ("binary", torch.full((8, 4), 2), r"binary targets must lie in \[0, 1\]"),
        ("binary", torch.ones(8, 3), "binary targets have shape"),
        ({"a": "values", "b": "logits"}, torch.zeros(8, 4), "give a dict of targets"),
        ({"a": "values", "b": "logits"}, {"a": X, "c": X}, "there are targets for 'c'"),
    ],
)
def test_targets_that_do_not_fit_are_refused_before_anything_is_trained(output: Any, y: Any, words: str) -> None:
    several = isinstance(output, dict)
    wrapped = vote.Wrapper(2, output=output)(Gives((lambda h: {"a": h, "b": h}) if several else lambda h: h))
    before = [p.clone() for p in wrapped.parameters()]
    with pytest.raises(ValueError, match=words):
        fit(wrapped, (X, y), epochs=1, validation=0, progress=False)
    assert all(torch.equal(p, q) for p, q in zip(before, wrapped.parameters(), strict=True))


@pytest.mark.parametrize("output", ["binary", Logits(dim=-1), Binary(logits=False)])
def test_cross_fitting_knows_yes_or_no(output: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(160, 4)
    y = (x[:, 0] > 0).long()
    n_out = 2 if output == Logits(dim=-1) else 1
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, n_out), *([nn.Sigmoid()] if output == Binary(False) else [])]
    wrapped = vote.Wrapper(4, output=output)(nn.Sequential(*layers))
    history = fit(wrapped, (x, y if n_out == 2 else y[:, None].float()), folds=2, epochs=25, lr=0.05, progress=False)
    probs = history.out_of_fold.prediction
    assert torch.allclose(probs.sum(1), torch.ones(()), atol=1e-4)
    assert ((probs[:, 1].squeeze(-1) > 0.5).long() == y).float().mean() > 0.8


# ---- methods with knowledge of their own
def test_laplace_of_labels_is_that_of_each_label_alone() -> None:
    """The Gauss-Newton matrix of independent labels has no entries between them: the mean field of each is that of a model of its own."""
    model = nn.Linear(4, 3).double()
    x, y = X.double(), torch.zeros(8, 3, dtype=torch.float64)
    wrapped = laplace.Wrapper(output="binary", prior_precision=2.0)(model).eval().fit([(x, y)])
    mean = laplace.mean_field(wrapped, x)
    phi = torch.cat([x, torch.ones(8, 1, dtype=torch.float64)], 1)
    p = model(x).sigmoid().detach()
    for k in range(3):
        # Kronecker form: sum phi phi^T times the mean curvature of the label
        curvature = (phi.T @ phi) * (p[:, k] * (1 - p[:, k])).mean() + 2.0 * torch.eye(5, dtype=torch.float64)
        variance = (phi @ torch.linalg.inv(curvature) * phi).sum(1)
        wanted = (model(x)[:, k].detach() / (1 + torch.pi * variance / 8).sqrt()).sigmoid()
        torch.testing.assert_close(mean[:, k], wanted, rtol=1e-6, atol=1e-8)


def test_sculpt_of_yes_or_no_is_that_of_two_classes() -> None:
    """A score z with noise is the two classes (0, z) of which one has noise: one expected probability by Monte Carlo and in the mean field."""
    wrapped = sculpt.Wrapper(output="binary")(nn.Linear(4, 1)).eval()
    _, risk = wrapped(X, return_risk=True)
    head = next(p for name, p in wrapped.named_parameters() if name.endswith("weight@sculpt"))
    bias = next(p for name, p in wrapped.named_parameters() if name.endswith("bias@sculpt"))
    noise = F.softplus(X @ head.T + bias)
    draws = (
        (wrapped(X) + noise * torch.randn(20000, 8, 1, generator=torch.Generator().manual_seed(0))).sigmoid().mean(0)
    )
    entropy = torch.distributions.Bernoulli(probs=draws).entropy()
    torch.testing.assert_close(risk.aleatoric, entropy, rtol=0.03, atol=0.02)


def test_state_and_detections_have_names_of_their_own() -> None:
    assert Values.short == "values"
    assert State.short == "state"
    assert Probs(dim=1).dim == 1


MEANT_OTHERWISE: dict[str, tuple[Any, Any]] = {
    "unsaid": ("logits", None),
    "values": ("logits", "values"),
    "said for scores": ("values", "logits"),
    "another dimension": (Logits(dim=1), Logits(dim=-1)),
    "probabilities": ("binary", Binary(logits=False)),
    "several": ({"a": "logits", "b": "values"}, {"a": "values", "b": "logits"}),
}


@pytest.mark.parametrize("name", MEANT_OTHERWISE)
def test_a_state_of_another_meaning_is_refused_before_anything_is_loaded(name: str) -> None:
    saved, here = MEANT_OTHERWISE[name]
    state = vote.Wrapper(2, output=saved)(nn.Linear(3, 4)).state_dict()
    wrapped = vote.Wrapper(2, output=here)(nn.Linear(3, 4))
    before = {key: value.clone() for key, value in wrapped.state_dict().items()}
    with pytest.raises(ValueError, match=re.escape(f"saved with output={saved!r}, and this object has")):
        wrapped.load_state_dict(state)
    assert all(torch.equal(value, before[key]) for key, value in wrapped.state_dict().items())
    with pytest.raises(ValueError, match="saved with output="):  # also as a part of a larger model
        nn.ModuleDict({"part": wrapped}).load_state_dict({f"part.{key}": value for key, value in state.items()})
    wrapped.load_state_dict(state, strict=False)  # the way out
    assert torch.equal(wrapped.state_dict()["weight@vote"], state["weight@vote"])


@pytest.mark.parametrize("output", [None, "values", "logits", Logits(dim=1), {"0": "logits", "1": "mean"}])
def test_a_state_of_the_same_meaning_loads_and_one_that_says_none_fits_all(output: Any) -> None:
    wrapped = vote.Wrapper(2, output=output)(nn.Linear(3, 4))
    twin = vote.Wrapper(2, output=output)(nn.Linear(3, 4))
    twin.load_state_dict(wrapped.state_dict())
    assert torch.equal(twin.state_dict()["weight@vote"], wrapped.state_dict()["weight@vote"])
    twin.load_state_dict(vote.Wrapper(2)(nn.Linear(3, 4)).state_dict())  # as those of earlier versions
    twin.load_state_dict(nn.Linear(3, 4).state_dict())
    assert wrapped.state_dict().keys() == vote.Wrapper(2)(nn.Linear(3, 4)).state_dict().keys()


@pytest.mark.parametrize("void", [255, -100])
def test_a_yes_or_no_without_a_label_is_refused_with_what_to_write(void: int) -> None:
    target = torch.tensor([[0, 1, void, 1]])
    with pytest.raises(
        ValueError, match=rf"If {void} marks missing labels(?s:.*)scores\[y != {void}\](?s:.*)Logits\(dim=1\)"
    ):
        Binary().labels(target, torch.zeros(1, 4))
