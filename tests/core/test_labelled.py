"""Dicts with `labels`, the convention of transformers: how they belong to the scores is what the model's own loss says, or they are refused."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from workbench import calibrate, fit, neo, selective, top_uncertain, vote
from workbench.core.batches.own_loss import pairing_of
from workbench.outputs import Binary, Logits, Values

transformers = pytest.importorskip("transformers")
from helpers.labelled_models import LABELLED, SIZE, STILL, Batch, Labelled  # noqa: E402  # it needs transformers

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:.*loss_type=None"),
]
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
    ours, wanted = (calibrate(wrapped, given, "temperature").state_dict() for given in (data, pair))
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


def losses(history: Any) -> list[Any]:
    return [record[1:3] for record in history.records]


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("loader", "batches")])
def test_training_is_that_on_pairs(form: str) -> None:
    histories = []
    for labelled in (True, False):
        case, model, wrapped = make("gpt2")
        batch = case.batch(20)
        data: Any = FORMS[form](batch) if labelled else by_hand(case, model, batch)
        histories.append(fit(wrapped, data, epochs=2, batch_size=8, progress=False))
    assert losses(histories[0]) == losses(histories[1])


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
        found = (selective(wrapped, given) for given in (held, by_hand(case, model, held)))
        assert torch.equal(next(found).error, next(found).error)


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


def overwriting(logits: Tensor, labels: Tensor, mask: Any) -> Tensor:
    labels[labels == -100] = 0
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_what_is_given_stays_as_it_was() -> None:
    _, _, wrapped = make("bert classes")
    random = torch.get_rng_state()
    calibrate(wrapped, Drawing(LABELLED["bert classes"].batch(20)), "temperature")
    assert torch.equal(torch.get_rng_state(), random)
    own = vote.Wrapper(2, output={"logits": Logits(dim=-1)})(Scored(overwriting))
    batch = tokens()
    batch["labels"][:, 1] = -100
    before = copy.deepcopy(batch)
    with pytest.raises(ValueError, match="is none of"):
        pairing_of(own, batch)
    assert all(torch.equal(value, before[key]) for key, value in batch.items())


# ---- what is refused
class Scored(nn.Module):
    """Scores of three classes for each token, and a loss of one's own."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Any], Tensor], start: float = 3.0) -> None:
        super().__init__()
        self.embedding, self.loss = nn.Embedding(30, 3), loss
        nn.init.normal_(self.embedding.weight, std=start) if start else nn.init.zeros_(self.embedding.weight)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = self.embedding(input_ids)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": self.loss(logits, labels, attention_mask), "logits": logits}
        )


def entropy(logits: Tensor, labels: Tensor, mask: Any = None, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def masked(logits: Tensor, labels: Tensor, mask: Any) -> Tensor:
    return entropy(logits, labels.masked_fill(mask == 0, -100))


def of_rows(logits: Tensor, labels: Tensor, mask: Any) -> Tensor:
    return torch.stack([F.cross_entropy(a, b) for a, b in zip(logits, labels, strict=True)]).mean()


OWN: dict[str, Callable[..., Tensor]] = {
    "smoothed": lambda y, t, m: entropy(y, t, label_smoothing=0.1),
    "weighed": lambda y, t, m: entropy(y, t, weight=torch.tensor([1.0, 2.0, 1.0])),
    "class 0 left out": lambda y, t, m: entropy(y, t.masked_fill(t == 0, -100)),
    "sum": lambda y, t, m: entropy(y, t, reduction="sum"),
    "mean of rows": of_rows,
    "masked": masked,
    "two further on": lambda y, t, m: entropy(y[:, :-2], t[:, 2:]),
    "with a penalty": lambda y, t, m: entropy(y, t) + 0.01 * y.square().mean(),
    "one before": lambda y, t, m: entropy(y[:, 1:], t[:, :-1]),
}


def tokens(rows: int = 6) -> Batch:
    ids = torch.randint(3, 30, (rows, 5))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(3, (rows, 5))}


@pytest.mark.parametrize("name", OWN)
def test_another_loss_is_refused_with_what_was_compared(name: str) -> None:
    wrapped = vote.Wrapper(2, output={"logits": Logits(dim=-1)})(Scored(OWN[name]))
    with pytest.raises(
        ValueError, match=r"is none of\n +\d.*same places\n.*one place further on\nGive pairs \(inputs, targets\)"
    ):
        pairing_of(wrapped, tokens())
    before = copy.deepcopy(wrapped.state_dict())
    with pytest.raises(ValueError, match="Give pairs"):
        fit(wrapped, tokens(), progress=False)
    assert all(torch.equal(value, before[key]) for key, value in wrapped.state_dict().items())


def test_a_loss_of_ones_own_that_is_known_is_taken() -> None:
    wrapped = vote.Wrapper(2, output={"logits": Logits(dim=-1)})(Scored(entropy))
    batch = tokens()
    assert torch.equal(pairing_of(wrapped, batch).pair(batch)[1], batch["labels"])


def test_equal_scores_say_nothing() -> None:
    wrapped = vote.Wrapper(2, output={"logits": Logits(dim=-1)}, finetune=True)(Scored(entropy, 0.0))
    with pytest.raises(ValueError, match="cannot be told from"):
        pairing_of(wrapped, tokens())


class Pooled(Scored):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.embedding(input_ids).mean(1)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Balanced(Scored):
    """As experts are kept in balance: a term of the training alone."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = super().forward(input_ids, attention_mask, labels)
        return (
            {**found, "loss": found["loss"] + 0.1 * found["logits"].square().mean()}
            if "loss" in found and self.training
            else found
        )


def test_another_loss_in_training_is_refused() -> None:
    wrapped = vote.Wrapper(2, output={"logits": Logits(dim=-1)})(Balanced(entropy))
    with pytest.raises(ValueError, match="but another one in training mode"):
        pairing_of(wrapped, tokens())
    stochastic = LABELLED["bert tokens"].build()
    for module in stochastic.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    pairing_of(vote.Wrapper(2, output=LABELLED["bert tokens"].output)(stochastic), LABELLED["bert tokens"].batch())


class Unasked(Scored):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.embedding(input_ids)


def _bert(cls: str, **options: Any) -> Any:
    return getattr(transformers, cls)(transformers.BertConfig(**{**SIZE, **STILL, **options}))


def _text(**more: Tensor) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 30, (6, 7)), **more}


def _electra() -> nn.Module:
    return transformers.ElectraForPreTraining(transformers.ElectraConfig(**SIZE, **STILL))


def _wav2vec() -> nn.Module:
    sizes = {
        "conv_dim": (8, 8),
        "conv_kernel": (3, 3),
        "conv_stride": (2, 2),
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    }
    return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**SIZE, **sizes, pad_token_id=0))


POSITIONS = {"start_positions": torch.ones(6).long(), "end_positions": torch.ones(6).long()}
NEXT = {"next_sentence_label": torch.ones(6).long()}
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Mapping[str, Any]], str]] = {
    "answers to questions": (
        lambda: _bert("BertForQuestionAnswering"),
        {"start_logits": Logits()},
        lambda: _text(**POSITIONS),
        "targets in start_positions, end_positions",
    ),
    "two targets": (
        lambda: _bert("BertForPreTraining"),
        {"prediction_logits": Logits(dim=-1)},
        lambda: _text(labels=torch.randint(30, (6, 7)), **NEXT),
        "targets in next_sentence_label",
    ),
    "a loss that the mask cuts": (
        _electra,
        {"logits": Binary()},
        lambda: _text(attention_mask=torch.ones(6, 7).long(), labels=torch.randint(2, (6, 7)).float()),
        "is none of|works on one output|needs one tensor",
    ),
    "connectionist": (
        _wav2vec,
        {"logits": Logits(dim=-1)},
        lambda: {"input_values": torch.randn(3, 60), "labels": torch.randint(1, 9, (3, 4))},
        "fit in no way that is known",
    ),
    "no labels": (
        lambda: Unasked(entropy),
        "values",
        lambda: _text(labels=torch.rand(6, 7)),
        "does not take input_ids, labels by name",
    ),
    "values, not classes": (
        lambda: _bert("BertForSequenceClassification", num_labels=3),
        {"logits": Values()},
        lambda: _text(labels=torch.randint(3, (6,))),
        r"taken for Values when wrapping: say output={'logits': Logits\(dim=-1\)}",
    ),
    "classes, not labels": (
        lambda: _bert("BertForSequenceClassification", num_labels=3),
        {"logits": Logits()},
        lambda: _text(labels=torch.randint(2, (6, 3)).float()),
        r"taken for Logits when wrapping: say output={'logits': Binary\(\)}",
    ),
    "nothing said": (
        lambda: _bert("BertForSequenceClassification", num_labels=3),
        None,
        lambda: _text(labels=torch.randint(3, (6,))),
        r"say output={'logits': Logits\(dim=-1\)}",
    ),
    "several outputs": (
        lambda: _bert("BertForQuestionAnswering"),
        None,
        lambda: _text(labels=torch.randint(3, (6,))),
        "does not take input_ids, labels by name|the outputs that they may be targets of are",
    ),
    "equal scores": (
        lambda: Pooled(entropy, 0.0),
        "logits",
        lambda: _text(labels=torch.randint(3, (6,))),
        "all scores are equal",
    ),
    "text": (
        lambda: _bert("BertForSequenceClassification"),
        {"logits": Logits()},
        lambda: {**_text(labels=torch.randint(2, (6,))), "text": ["a"] * 6},
        "leave it out",
    ),
    "ragged": (
        lambda: _bert("BertForSequenceClassification"),
        {"logits": Logits()},
        lambda: {"input_ids": [[3], [4, 5]], "labels": [0, 1]},
        "several lengths",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str) -> None:
    build, output, batch, words = REFUSED[name]
    wrapped = vote.Wrapper(2, output=output, finetune=True)(build())
    for use in (
        lambda: fit(wrapped, batch(), progress=False),
        lambda: calibrate(wrapped, batch(), "conformal"),
        lambda: selective(wrapped, batch()),
        lambda: selective(wrapped, DataLoader([batch()], batch_size=None, collate_fn=lambda b: b)),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            use()


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


def test_labels_are_not_looked_at_where_no_targets_are_needed() -> None:
    wrapped = vote.Wrapper(2, output={"logits": Logits(dim=-1)})(Scored(OWN["smoothed"]))
    batch = tokens()
    found = top_uncertain(wrapped, batch, 3)
    x = (batch["input_ids"], batch["attention_mask"])
    assert torch.equal(found.indices, top_uncertain(wrapped, (x, batch["labels"]), 3).indices)


def test_inputs_of_a_decoder_that_are_given_stay() -> None:
    case, model, wrapped = make("t5")
    batch = case.batch(12)
    given = {**batch, "decoder_input_ids": torch.randint(3, 30, batch["labels"].shape)}
    pairing = pairing_of(wrapped, given)
    assert pairing.decoder is None
    assert torch.equal(pairing.pair(given)[0]["decoder_input_ids"], given["decoder_input_ids"])
    plain: Any = model
    x, y = pairing.pair(given)
    torch.testing.assert_close(F.cross_entropy(plain(**x).logits.flatten(0, 1), y.flatten()), plain(**given).loss)


def test_arrays_are_those_of_numpy() -> None:
    case, model, wrapped = make("vit")
    batch = collections.UserDict({name: np.asarray(value) for name, value in case.batch(12).items()})
    ours, wanted = (calibrate(wrapped, given, "temperature") for given in (batch, by_hand(case, model, case.batch(12))))
    assert torch.equal(ours.temperature, wanted.temperature)
