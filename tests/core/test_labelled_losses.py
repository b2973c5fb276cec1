"""User-written losses over dicts with `labels`: recognized by their values, or refused with what was compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from workbench import calibrate, fit, selective, top_uncertain, vote
from workbench.core.batches.own_loss import pairing_of
from workbench.outputs import Binary, Logits, Values

transformers = pytest.importorskip("transformers")
from helpers.labelled_models import LABELLED, SIZE, STILL, Batch  # noqa: E402  # it needs transformers

pytestmark = pytest.mark.filterwarnings("ignore:.*loss_type=None")


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


def overwriting(logits: Tensor, labels: Tensor, mask: Any) -> Tensor:
    labels[labels == -100] = 0
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_labels_that_a_loss_overwrites_stay_as_they_were() -> None:
    wrapped = vote.Wrapper(2, output={"logits": Logits(dim=-1)})(Scored(overwriting))
    batch = tokens()
    batch["labels"][:, 1] = -100
    before = copy.deepcopy(batch)
    with pytest.raises(ValueError, match="is none of"):
        pairing_of(wrapped, batch)
    assert all(torch.equal(value, before[key]) for key, value in batch.items())


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
        outputs = super().forward(input_ids, attention_mask, labels)
        return (
            {**outputs, "loss": outputs["loss"] + 0.1 * outputs["logits"].square().mean()}
            if "loss" in outputs and self.training
            else outputs
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
        "is none of|needs exactly one",
    ),
    "connectionist": (
        _wav2vec,
        {"logits": Logits(dim=-1)},
        lambda: {"input_values": torch.randn(3, 60), "labels": torch.randint(1, 9, (3, 4))},
        "match none of the known losses",
    ),
    "no labels": (
        lambda: Unasked(entropy),
        "values",
        lambda: _text(labels=torch.rand(6, 7)),
        "does not accept input_ids, labels by name",
    ),
    "values, not classes": (
        lambda: _bert("BertForSequenceClassification", num_labels=3),
        {"logits": Values()},
        lambda: _text(labels=torch.randint(3, (6,))),
        r"declared as Values when wrapping: write output={'logits': Logits\(dim=-1\)}",
    ),
    "classes, not labels": (
        lambda: _bert("BertForSequenceClassification", num_labels=3),
        {"logits": Logits()},
        lambda: _text(labels=torch.randint(2, (6, 3)).float()),
        r"declared as Logits when wrapping: write output={'logits': Binary\(\)}",
    ),
    "nothing said": (
        lambda: _bert("BertForSequenceClassification", num_labels=3),
        None,
        lambda: _text(labels=torch.randint(3, (6,))),
        r"write output={'logits': Logits\(dim=-1\)}",
    ),
    "several outputs": (
        lambda: _bert("BertForQuestionAnswering"),
        None,
        lambda: _text(labels=torch.randint(3, (6,))),
        "does not accept input_ids, labels by name|the outputs that they may be targets of are",
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
        "remove it",
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


@pytest.mark.parametrize("seed", [3, 6, 7, 11])
def test_a_mask_is_seen_where_all_scores_are_near_zero(seed: int) -> None:
    """Where all losses of labels from 0 to 1 are about log 2, whatever is left out."""
    build, output, batch, words = REFUSED["a loss that the mask cuts"]
    torch.manual_seed(seed)
    wrapped = vote.Wrapper(2, output=output, finetune=True)(build())
    with pytest.raises(ValueError, match=words):
        fit(wrapped, batch(), progress=False)


def test_labels_are_not_looked_at_where_no_targets_are_needed() -> None:
    wrapped = vote.Wrapper(2, output={"logits": Logits(dim=-1)})(Scored(OWN["smoothed"]))
    batch = tokens()
    uncertain = top_uncertain(wrapped, batch, 3)
    x = (batch["input_ids"], batch["attention_mask"])
    assert torch.equal(uncertain.indices, top_uncertain(wrapped, (x, batch["labels"]), 3).indices)
