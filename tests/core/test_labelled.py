"""Dicts with `labels`, as in transformers: their relation to the scores is taken from the model's own loss, or they are refused."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.default_suite import one_in
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from workbench import calibrate, fit, laplace, neo, selective, top_uncertain, vote
from workbench.core.batches.own_loss import pairing_of
from workbench.core.ownership import table_of
from workbench.outputs import Binary, Logits, Values

transformers = pytest.importorskip("transformers")
from helpers.labelled_models import LABELLED, Batch, Labelled  # noqa: E402  # it needs transformers

pytestmark = pytest.mark.filterwarnings("ignore:.*loss_type=None")
FAST = {"bert classes", "bert labels", "bert value", "bert tokens", "gpt2", "t5", "bart", "vit"}
every_model = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in LABELLED]
)


class Rows(Dataset):
    """Rows as users have them for a Trainer."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def __getitem__(self, i: int) -> Batch:
        return {name: value[i] for name, value in self.batch.items()}


class Columns:
    """What an object of the package datasets looks like: rows are dicts of numbers and lists."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.column_names = batch, list(batch)

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: value[i].tolist() for name, value in self.batch.items()}


FORMS: dict[str, Callable[[Batch], Any]] = {
    "dict": lambda batch: batch,
    "lists": lambda batch: {name: value.tolist() for name, value in batch.items()},
    "arrays": lambda batch: {name: value.numpy() for name, value in batch.items()},
    "encoding": lambda batch: transformers.BatchEncoding(dict(batch)),
    "rows": lambda batch: [Rows(batch)[i] for i in range(len(batch["labels"]))],
    "rows of lists": lambda batch: [Columns(batch)[i] for i in range(len(batch["labels"]))],
    "batches": lambda batch: list(DataLoader(Rows(batch), batch_size=7)),
    "dataset": Rows,
    "columns": Columns,
    "loader": lambda batch: DataLoader(Rows(batch), batch_size=7),
}


def make(name: str, n: int = 2, **options: Any) -> tuple[Labelled, nn.Module, Any]:
    case = LABELLED[name]
    model = case.build()
    return case, model, vote.Wrapper(n, output=case.output, **options)(model)


def by_hand(case: Labelled, model: Any, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs and targets, written down."""
    x = {name: value for name, value in batch.items() if name != "labels"}
    labels = batch["labels"]
    if model.config.is_encoder_decoder:
        start = torch.full_like(labels[:, :1], model.config.decoder_start_token_id)
        x["decoder_input_ids"] = torch.cat([start, labels[:, :-1]], 1).masked_fill(
            torch.cat([start, labels[:, :-1]], 1) == -100, 0
        )
    if case.place == "next":
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    return x, labels[:, None] if labels.is_floating_point() and labels.ndim == 1 else labels


def loss_of(case: Labelled, scores: Tensor, target: Tensor) -> Tensor:
    meaning = case.output["logits"]
    if isinstance(meaning, Values):
        return F.mse_loss(scores, target)
    if isinstance(meaning, Binary):
        return F.binary_cross_entropy_with_logits(scores, target)
    return F.cross_entropy(scores.flatten(0, -2), target.flatten())


@every_model
def test_targets_are_those_of_the_loss_of_the_model(name: str) -> None:
    case, model, wrapped = make(name, finetune=True)
    pairing = pairing_of(wrapped, case.batch())
    for seed in (1, 2):  # batches that were not looked at
        batch = case.batch(seed=seed)
        x, y = pairing.pair(batch)
        wanted, target = by_hand(case, model, batch)
        assert x.keys() == wanted.keys()
        assert all(torch.equal(x[key], wanted[key]) for key in x)
        assert torch.equal(y, target)
        with torch.no_grad():
            torch.testing.assert_close(loss_of(case, model(**x).logits, y), model(**batch).loss)


@every_model
def test_each_voter_is_trained_by_its_own_loss(name: str) -> None:
    case, _, wrapped = make(name)
    loader = DataLoader(Rows(case.batch(15)), batch_size=5)
    voters = [copy.deepcopy(voter).train() for voter in wrapped.voters()]
    options: dict[str, Any] = {"epochs": 2, "validation": 0, "standardize": False, "progress": False}
    fit(wrapped, loader, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options)
    for trained, voter in zip(wrapped.voters(), voters, strict=True):
        optimizer = torch.optim.SGD(voter.parameters(), lr=0.05)  # of half of the mean over two voters
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                voter(**batch).loss.backward()
                optimizer.step()
        torch.testing.assert_close(dict(trained.state_dict()), dict(voter.state_dict()), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["bert classes", "gpt2"])
def test_every_form_gives_the_pairs_that_one_writes(name: str, form: str) -> None:
    case, model, wrapped = make(name)
    batch = case.batch(21)
    pair, data = by_hand(case, model, batch), FORMS[form](batch)
    ours, wanted = (calibrate(wrapped, labelled, "temperature").state_dict() for labelled in (data, pair))
    assert all(torch.equal(ours[key], wanted[key]) for key in wanted)
    assert torch.equal(selective(wrapped, data).error, selective(wrapped, pair).error)
    assert torch.equal(top_uncertain(wrapped, data, 5).indices, top_uncertain(wrapped, pair, 5).indices)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_fitted_in_closed_form_takes_the_same_forms(form: str) -> None:
    case = LABELLED["bert classes"]
    batch = case.batch(21)
    x = {name: value for name, value in batch.items() if name != "labels"}
    wrapped, wanted = (neo.Wrapper(output=case.output)(case.build()) for _ in range(2))
    wrapped.fit(FORMS[form](batch))
    wanted.fit((x, batch["labels"]))
    torch.testing.assert_close(dict(wrapped.state_dict()), dict(wanted.state_dict()))


class Batches:
    """An iterable of batches."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Batch]:
        return iter(FORMS["batches"](self.batch))


LAPLACE: list[tuple[str, dict[str, Any]]] = [
    ("bert tokens", {}),  # some of them without a class
    ("bert tokens", {"evidence": "design", "output": Logits(dim=-1)}),
    ("bert value", {}),  # the noise is that of the targets
    ("gpt2", {"layer": "lm_head"}),
]


@pytest.mark.parametrize("form", one_in(5, ["dict", "batches", "loader", "columns", "iterable"]))
@pytest.mark.parametrize(("name", "options"), LAPLACE, ids=["tokens", "tokens, design", "value", "gpt2"])
def test_laplace_is_fitted_to_the_labels(name: str, options: dict[str, Any], form: str) -> None:
    case = LABELLED[name]
    model, batch = case.build(), case.batch(21)
    wrapped = laplace.Wrapper(**{"output": case.output, **options})(model).eval()
    wanted = copy.deepcopy(wrapped)
    wrapped.fit(Batches(batch) if form == "iterable" else FORMS[form](batch))
    wanted.fit(by_hand(case, model, batch))
    x, _ = by_hand(case, model, case.batch(5, seed=1))
    risk, wanted_risk = (
        getattr(r := each(**x, return_risk=True)[1], "epistemic", r).logits for each in (wrapped, wanted)
    )
    torch.testing.assert_close(risk, wanted_risk, rtol=1e-4, atol=1e-5)


class Scores(nn.Module):
    """Class scores of tokens, without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(30, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.layer(self.embedding(input_ids))


def test_labels_of_unknown_places_are_refused_where_one_is_missing() -> None:
    batch = {"input_ids": torch.randint(30, (6, 5)), "labels": torch.randint(3, (6, 5))}
    model = Scores()
    wrapped, wanted = (laplace.Wrapper(output=Logits(dim=-1))(model).eval() for _ in range(2))
    wrapped.fit([batch])
    wanted.fit((batch["input_ids"], batch["labels"]))
    torch.testing.assert_close(dict(wrapped.state_dict()), dict(wanted.state_dict()))
    batch["labels"][0, 1] = -100
    with pytest.raises(ValueError, match="Give pairs"):
        wrapped.fit([batch])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert classes", "bert labels", "bert tokens", "gpt2"])
def test_the_prior_of_laplace_is_tuned_by_the_labels(name: str) -> None:
    case = LABELLED[name]
    model = case.build()
    batch, held = case.batch(20), case.batch(10, seed=1)
    x, target = by_hand(case, model, held)
    options = {"output": case.output, "layer": "lm_head" if name == "gpt2" else None}
    wrapped = laplace.Wrapper(**options)(model)
    fit(wrapped, batch, validation=held, epochs=1, progress=False)
    prior = table_of(wrapped).get(next(key for key in wrapped.state_dict() if key.endswith("@laplace_prior")))
    losses = {}
    trained = copy.deepcopy(wrapped.unwrap())
    start = laplace.Wrapper(**options)(trained).eval()
    start.fit(by_hand(case, model, batch))
    key = next(key for key in start.state_dict() if key.endswith("@laplace_prior"))
    for factor in 10.0 ** torch.arange(-1, 4.5, 0.5):
        fixed = laplace.Wrapper(prior_precision=float(factor * table_of(start).get(key)), **options)(trained)
        fixed.eval().fit(by_hand(case, model, batch))
        losses[float(factor)] = loss_of(case, fixed(**x).logits, target).item()
    best = min(losses, key=lambda factor: losses[factor])
    assert float(prior) == pytest.approx(best * float(table_of(start).get(key)), rel=1e-4)
    if name == "bert classes":
        with pytest.raises(ValueError, match="there is no class number"):
            laplace.tune(start, [x])
        expected = laplace.mean_field(start, **x)
        torch.testing.assert_close(expected.sum(-1), torch.ones(10))


def losses(history: Any) -> list[Any]:
    return [record[1:3] for record in history.records]


@pytest.mark.parametrize("form", one_in(4, [form for form in FORMS if form not in ("loader", "batches")]))
def test_training_is_that_on_pairs(form: str) -> None:
    histories = []
    for labelled in (True, False):
        case, model, wrapped = make("gpt2")
        batch = case.batch(20)
        data: Any = FORMS[form](batch) if labelled else by_hand(case, model, batch)
        histories.append(fit(wrapped, data, epochs=2, batch_size=8, progress=False))
    assert losses(histories[0]) == losses(histories[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert value", "bert labels", "bart"])
def test_validation_rows_and_whole_trainings(name: str) -> None:
    case, model, wrapped = make(name)
    batch, held = case.batch(20), case.batch(10, seed=1)
    history = fit(wrapped, batch, validation=held, epochs=3, progress=False)
    _, _, again = make(name)
    pairs = fit(again, by_hand(case, model, batch), validation=by_hand(case, model, held), epochs=3, progress=False)
    assert losses(history) == losses(pairs)
    if name == "bert value":  # in units of its own now, which the model's loss does not know
        assert wrapped.scaling is not None
        curves = (selective(wrapped, labelled) for labelled in (held, by_hand(case, model, held)))
        assert torch.equal(next(curves).error, next(curves).error)


def test_model_and_random_state_stay_as_they_were() -> None:
    case, _, wrapped = make("bert classes")
    wrapped.train()
    wrapped.register_buffer("calls", torch.zeros(()))
    state, random, config = copy.deepcopy(wrapped.state_dict()), torch.get_rng_state(), wrapped.config.to_dict()
    pairing_of(wrapped, case.batch())
    assert wrapped.training
    assert torch.equal(torch.get_rng_state(), random)
    assert wrapped.config.to_dict() == config  # transformers writes problem_type into it
    assert all(torch.equal(value, state[key]) for key, value in wrapped.state_dict().items())


class Drawing(Rows):
    def __getitem__(self, i: int) -> Batch:
        torch.rand(())  # as an augmentation does
        return super().__getitem__(i)


def test_rows_that_draw_leave_the_random_state_alone() -> None:
    _, _, wrapped = make("bert classes")
    random = torch.get_rng_state()
    calibrate(wrapped, Drawing(LABELLED["bert classes"].batch(20)), "temperature")
    assert torch.equal(torch.get_rng_state(), random)


def test_rows_of_several_lengths_are_refused_with_what_pads_them() -> None:
    case, _, wrapped = make("bert tokens")
    short, long = Rows(case.batch(6)), Rows(case.batch(6))
    short.batch = {name: value[:, :4] for name, value in short.batch.items()}
    rows = [*(short[i] for i in range(6)), *(long[i] for i in range(6))]
    for use in (fit, calibrate):
        with pytest.raises(ValueError, match=r"several lengths.*DataCollatorForTokenClassification"):
            use(wrapped, rows)
    loader = DataLoader([short.batch, long.batch], batch_size=None)
    with pytest.raises(ValueError, match=r"one length"):
        calibrate(wrapped, loader, "temperature")
    assert fit(wrapped, loader, validation=0, epochs=1, progress=False).records


def test_a_list_that_may_be_rows_or_batches_is_refused() -> None:
    _, _, wrapped = make("bert tokens")
    row = {"tokens": torch.zeros(5), "labels": torch.zeros(5).long()}
    with pytest.raises(ValueError, match="rows or batches"):
        calibrate(wrapped, [row, row])


def test_inputs_of_a_decoder_that_are_given_stay() -> None:
    case, model, wrapped = make("t5")
    batch = case.batch(12)
    inputs = {**batch, "decoder_input_ids": torch.randint(3, 30, batch["labels"].shape)}
    pairing = pairing_of(wrapped, inputs)
    assert pairing.decoder is None
    assert torch.equal(pairing.pair(inputs)[0]["decoder_input_ids"], inputs["decoder_input_ids"])
    plain: Any = model
    x, y = pairing.pair(inputs)
    torch.testing.assert_close(F.cross_entropy(plain(**x).logits.flatten(0, 1), y.flatten()), plain(**inputs).loss)


def test_arrays_are_those_of_numpy() -> None:
    case, model, wrapped = make("vit")
    batch = collections.UserDict({name: np.asarray(value) for name, value in case.batch(12).items()})
    ours, wanted = (
        calibrate(wrapped, labelled, "temperature") for labelled in (batch, by_hand(case, model, case.batch(12)))
    )
    assert torch.equal(ours.temperature, wanted.temperature)
