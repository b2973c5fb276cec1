"""Training of wrapped models by the Trainer of transformers, which passes labels to the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import WorkbenchWarning, compose, neo, sculpt, vote
from workbench.outputs import Logits

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Rows(torch.utils.data.Dataset):
    def __init__(self, n: int = 16) -> None:
        self.ids, self.labels = torch.randint(3, 30, (n, 5)), torch.randint(2, (n,))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def bert(dropout: float) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForSequenceClassification(config)


@pytest.fixture(autouse=True)
def no_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder datasets/ of a checkout is taken for the package of that name."""
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)


def train(wrapped: Any, folder: Path, cls: Any) -> None:
    options = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=3, report_to=[], disable_tqdm=True, use_cpu=True
    )
    cls(model=wrapped, args=options, train_dataset=Rows()).train()


class NamedRows(Rows):
    """With what a Dataset of the package datasets says of itself."""

    column_names = ("input_ids", "labels")
    info = SimpleNamespace(dataset_name="letters")
    _fingerprint = "1f2e"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:vote. the model gives a number")
def test_the_card_of_a_model_that_a_trainer_saves_says_what_its_dataset_says(tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(2, output="logits")(bert(0.0))
    options = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True
    )
    trainer = transformers.Trainer(model=wrapped, args=options, train_dataset=NamedRows())
    trainer.save_model(str(tmp_path / "untrained"))
    assert "Trainer" not in (tmp_path / "untrained" / "README.md").read_text()
    trainer.train()
    wrapped.save_pretrained(tmp_path / "after")
    for folder in (tmp_path / "checkpoint-1", tmp_path / "after"):
        row = "| letters | 16 | input_ids, labels | fingerprint 1f2e | a Trainer of transformers, "
        assert (folder / "README.md").read_text().count(row) == 1


def spread(wrapped: Any) -> float:
    ids = Rows().ids
    with torch.no_grad():
        logits = torch.stack([voter.eval()(ids).logits for voter in wrapped.voters()])
    return float(logits.std(0).min())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:vote. the model gives a number")
def test_voters_that_stay_alike_are_told_and_the_remedy_works(tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True, output="logits")(bert(0.0))
    with pytest.warns(WorkbenchWarning, match=r"stay alike.*wrapped\.loss.*compute_loss"):
        train(wrapped, tmp_path, transformers.Trainer)
    assert spread(wrapped) == 0

    train(wrapped, tmp_path, VotersTrainer)
    assert spread(wrapped) > 1e-5


def one_step_of_eight(folder: Path, batch: int, **options: Any) -> Any:
    """One step on eight rows, in batches of so many, without clipping."""
    return transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=8 // batch,
        max_steps=1,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        **options,
    )


class VotersTrainer(transformers.Trainer):
    """As docs/how_to/train.md has it."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        loss = model.loss(lambda output, y: F.cross_entropy(output.logits, y, reduction="sum"), inputs, labels)
        return loss / (num_items_in_batch or len(labels))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_accumulated_batches_are_one_batch(tmp_path: Path) -> None:
    rows, start, trained = Rows(8), bert(0.0), []
    for batch in (8, 4):
        torch.manual_seed(1)
        wrapped: Any = vote.Wrapper(3, finetune=True, output="logits")(copy.deepcopy(start))
        options = one_step_of_eight(tmp_path, batch, learning_rate=0.1, optim="sgd")
        trainer = VotersTrainer(model=wrapped, args=options, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        assert trainer.evaluate()["eval_loss"] > 0
        trained.append(dict(wrapped.named_parameters()))
    for name, parameter in trained[0].items():
        torch.testing.assert_close(parameter, trained[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dropout_lets_voters_differ(tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True)(bert(0.2))
    with pytest.warns(WorkbenchWarning, match=r"mean of the voters.*wrapped\.loss"):
        train(wrapped, tmp_path, transformers.Trainer)
    assert spread(wrapped) > 1e-6


def gpt() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=30, n_layer=1, n_head=2, n_embd=8, n_positions=16, **dropout)
    )


def scores(predictions: Any) -> dict[str, float]:
    assert len(predictions.predictions) == len(predictions.label_ids) == 16
    return {"count": float(len(predictions.predictions))}


MODES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "classes": (lambda: bert(0.0), "logits", lambda ids, labels: labels),
    "tokens": (gpt, {"logits": Logits(dim=-1)}, lambda ids, labels: torch.where(ids > 20, -100, ids)),
    "values": (lambda: bert(0.0), "values", lambda ids, labels: ids[:, :2].float() / 30),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:vote. the model gives a number")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options"),
    [*((mode, {}) for mode in MODES), ("tokens", {"bf16": True}), ("tokens", {"gradient_checkpointing": True})],
    ids=str,
)
def test_a_stock_trainer_gives_each_voter_its_own_gradient(mode: str, options: dict[str, bool], tmp_path: Path) -> None:
    make, output, labels = MODES[mode]
    rows: Any = Rows()
    rows.labels = labels(rows.ids, rows.labels)
    model: Any = make()
    if mode == "values":
        model.config.problem_type = "regression"
    wrapped: Any = vote.Wrapper(3, output=output)(model)

    def first_gradients(trained: Any, steps: int) -> tuple[Any, dict[str, Tensor]]:
        gradients: dict[str, Tensor] = {}

        class FirstStep(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                for name, parameter in trained.named_parameters() if not gradients else ():
                    if parameter.grad is not None:
                        gradients[name.removesuffix("@vote")] = parameter.grad.clone()

        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=16,
            max_grad_norm=0.0,
            max_steps=steps,
            save_steps=steps,
            save_strategy="steps" if steps > 1 else "no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **options,
        )
        trainer = transformers.Trainer(
            model=trained,
            args=arguments,
            train_dataset=rows,
            eval_dataset=rows,
            compute_metrics=scores,
            callbacks=[FirstStep()],
        )
        trainer.train()
        return trainer, gradients

    expected = [first_gradients(voter.train(), 1)[1] for voter in wrapped.voters()]
    trainer, gradients = first_gradients(wrapped, 2)
    assert gradients.keys() >= expected[0].keys()
    tolerance = {"rtol": 0.05, "atol": 5e-3} if "bf16" in options else {"rtol": 1e-4, "atol": 1e-6}
    for name in expected[0]:
        plain = torch.stack([each[name] for each in expected]) / 3
        torch.testing.assert_close(gradients[name].reshape(plain.shape), plain, **tolerance)
    assert trainer.evaluate()["eval_count"] == 16
    if not options:
        trainer.args.max_steps = 3
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert trainer.state.global_step == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_smoothed_labels_are_shifted_for_a_wrapped_decoder(tmp_path: Path) -> None:
    rows: Any = Rows()
    rows.labels = rows.ids

    def loss(trained: Any) -> float:
        arguments = transformers.TrainingArguments(
            str(tmp_path), label_smoothing_factor=0.1, max_steps=1, save_strategy="no", report_to=[], use_cpu=True
        )
        return transformers.Trainer(model=trained, args=arguments, train_dataset=rows).train().training_loss

    torch.manual_seed(0)
    plain = gpt()
    with torch.no_grad():
        plain.transformer.wte.weight.mul_(50)
    wrapped: Any = neo.Wrapper(output={"logits": Logits(dim=-1)})(copy.deepcopy(plain))
    assert wrapped._get_name() == "GPT2LMHeadModel"
    assert repr(wrapped).startswith("GPT2LMHeadModel[neo")
    assert loss(wrapped) == pytest.approx(loss(plain), rel=1e-4)


TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "classes": lambda labels: labels,
    "tokens": lambda labels: F.pad(labels[:, 1:], (0, 1), value=-100),
    "values": lambda labels: labels,
}
CRITERIA: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "classes": lambda output, y: F.cross_entropy(output.logits, y),
    "tokens": lambda output, y: F.cross_entropy(output.logits.flatten(0, 1), y.flatten()),
    "values": lambda output, y: F.mse_loss(output.logits, y),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("voters", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_stock_trainer_trains_risk_heads_by_their_likelihood(mode: str, voters: int, tmp_path: Path) -> None:
    make, output, labels = MODES[mode]
    rows: Any = Rows(8)
    rows.labels = labels(rows.ids, rows.labels)
    if mode == "tokens":
        rows.labels[:, 0] = -100  # which some versions of the Trainer count
    model: Any = make()
    if mode == "values":
        model.config.problem_type = "regression"
    head = sculpt.Wrapper(n_layers=1, output=output)
    wrapped: Any = (head if voters == 1 else compose(vote.Wrapper(voters, output=output), head))(model)
    by_hand = copy.deepcopy(wrapped).train()
    by_hand.loss(CRITERIA[mode], {"input_ids": rows.ids}, TARGETS[mode](rows.labels)).backward()
    gradients: dict[str, Tensor] = {}

    class Look(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            gradients.update({name: p.grad.clone() for name, p in wrapped.named_parameters() if p.grad is not None})

    # tokens are counted over all batches between two steps, so that these may be accumulated
    size = 4 if mode == "tokens" else 8
    options = one_step_of_eight(tmp_path, size)
    transformers.Trainer(model=wrapped, args=options, train_dataset=rows, callbacks=[Look()]).train()
    expected = {name: p.grad for name, p in by_hand.named_parameters() if p.grad is not None}
    assert any("@sculpt" in name for name in expected)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


class Penalized(nn.Module):
    """Its loss is none of those that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.head(self.embedding(input_ids).mean(1))
        return (
            {"logits": y} if labels is None else {"loss": F.cross_entropy(y, labels) + y.square().mean(), "logits": y}
        )


class Conditional(Penalized):
    """Labels are an input."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": super().forward(input_ids)["logits"] + labels[:, None]}


def test_heads_that_a_models_own_loss_cannot_train_are_told_once() -> None:
    rows = Rows(6)
    wrapped: Any = sculpt.Wrapper(n_layers=1, output={"logits": Logits()})(Penalized())
    with pytest.warns(WorkbenchWarning, match=r"does not train the risk heads.*wrapped\.loss") as told:
        wrapped(input_ids=rows.ids, labels=rows.labels)
    assert len(told) == 1
    wrapped(input_ids=rows.ids, labels=rows.labels)
    sculpt.Wrapper(n_layers=1, output={"logits": Logits()})(Conditional())(rows.ids, rows.labels)

    places = {"start_positions": rows.labels, "end_positions": rows.labels}
    answering: Any = transformers.BertForQuestionAnswering(bert(0.0).config)
    wrapped = sculpt.Wrapper(n_layers=1, output={"start_logits": Logits(), "end_logits": Logits()})(answering)
    with pytest.warns(WorkbenchWarning, match=r"does not train the risk heads.*start_positions, end_positions"):
        wrapped(rows.ids, **places)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore:vote. the model gives a number"
)
def test_a_trainer_goes_on_with_the_adapters_of_all_voters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    rows: Any = Rows()
    rows.labels = rows.ids
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    plain = peft.get_peft_model(gpt(), adapters)

    def trained(**options: Any) -> dict[str, Tensor]:
        torch.manual_seed(1)
        wrapped: Any = vote.Wrapper(2, output={"logits": Logits(dim=-1)})(copy.deepcopy(plain))
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, save_steps=1, learning_rate=0.1, report_to=[], use_cpu=True
        )
        transformers.Trainer(model=wrapped, args=arguments, train_dataset=rows).train(**options)
        return dict(wrapped.state_dict())

    whole, resumed = trained(), trained(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
