"""Options of the Trainer of transformers: a wrapped model is trained as plain copies of its voters are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench import vote
from workbench.outputs import Logits

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:vote. the model gives a number")
N = 2
IDS = torch.randint(3, 30, (10, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder datasets/ of a checkout is taken for the package of that name."""
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)


class Rows(torch.utils.data.Dataset):
    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[i], "labels": self.labels[i]}


def bert() -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=30, **sizes, **dropout))


def gpt() -> Any:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=30, n_layer=1, n_head=2, n_embd=8, n_positions=16, **dropout)
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=30, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], Any], Any, Tensor]] = {
    "classes": (bert, "logits", IDS[:, 0] % 2),
    "tokens": (gpt, {"logits": Logits(dim=-1)}, torch.where(IDS > 20, -100, IDS)),
    "translation": (t5, {"logits": Logits(dim=-1)}, torch.where(IDS > 25, -100, IDS)[:, :4]),
}


def trained(
    model: Any, labels: Tensor, folder: Path, rate: float, more: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A Trainer after plain gradient descent on all rows."""
    seq2seq = "predict_with_generate" in options
    arguments = transformers.Seq2SeqTrainingArguments if seq2seq else transformers.TrainingArguments
    fixed = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "save_strategy": "no"}
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 3}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    args = arguments(str(folder), learning_rate=rate, **{**fixed, **sizes, **quiet, **options})
    cls = transformers.Seq2SeqTrainer if seq2seq else transformers.Trainer
    rows = Rows(labels)
    trainer = cls(model=model, args=args, train_dataset=rows, eval_dataset=rows, **(more or {}))
    trainer.train()
    return trainer


BEST = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "load_best_model_at_end": True}
OPTIONS: dict[str, dict[str, Any]] = {
    # an epoch ends with a batch of two, after two of four
    "accumulated": {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
    "best": {**BEST, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1},
    "apart": {"eval_do_concat_batches": False, "train_sampling_strategy": "group_by_length"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["classes", "tokens"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_whole_training_is_that_of_plain_copies(option: str, mode: str, tmp_path: Path) -> None:
    make, output, labels = MODELS[mode]
    wrapped = vote.Wrapper(N, output=output)(make())
    voters = wrapped.voters()

    def run(model: Any, rate: float) -> Any:
        # the loss falls and is said to be best where it is largest: training stops after the second step, and goes back to the first
        early = [transformers.EarlyStoppingCallback(1)] if option == "best" else []
        return trained(model, labels, tmp_path, rate, {"callbacks": early}, **OPTIONS[option])

    # the loss is the mean over voters, so that a step N times as long is theirs
    plain, trainer = [run(voter.train(), 0.1) for voter in voters], run(wrapped, 0.1 * N)
    assert trainer.state.global_step == plain[0].state.global_step == (2 if option == "best" else 3)
    for name, parameter in wrapped.named_parameters():
        expected = torch.stack([voter.get_parameter(name.removesuffix("@vote")) for voter in voters])
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
    logged = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (trainer, *plain)]
    torch.testing.assert_close(torch.tensor(logged[0]), torch.tensor(logged[1:]).mean(0), rtol=1e-5, atol=1e-5)
    losses = [each.evaluate()["eval_loss"] for each in plain]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(losses) / N, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["classes", "tokens"])
@pytest.mark.parametrize("smoothed", [True, False])
def test_a_loss_that_the_trainer_computes_trains_each_voter_on_the_rows_dealt_to_it(
    smoothed: bool, mode: str, tmp_path: Path
) -> None:
    make, output, labels = MODELS[mode]
    wrapped = vote.Wrapper(N, output=output)(make())
    voters = wrapped.voters()

    def loss_of(logits: Tensor, y: Tensor, items: Any) -> Tensor:
        if mode == "tokens":
            logits, y = logits[:, :-1].flatten(0, 1), y[:, 1:].flatten()
        each = F.cross_entropy(logits, y, reduction="sum", label_smoothing=0.1 if smoothed else 0.0)
        return each / (len(y) if items is None else items)

    def loss_of_output(output: Any, y: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return loss_of(output["logits"], y, num_items_in_batch)

    gradients: dict[str, Tensor] = {}
    plain: list[Tensor] = []

    class ByHand(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            gradients.update({name: parameter.grad.clone() for name, parameter in wrapped.named_parameters()})

    class Dealt(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
            y = inputs["labels"]
            loss, output = super().compute_loss(model, inputs, True, num_items_in_batch)
            each = torch.stack([voter(input_ids=inputs["input_ids"]).logits for voter in voters])
            distances = (each - output["logits"]).detach().abs().flatten(2).amax(-1)
            voter = distances.argmin(0)
            assert float(distances.min(0).values.max()) < 1e-6
            assert voter.bincount().tolist() == [2, 2]
            by_hand = loss_of(each[voter, torch.arange(len(voter))], y, num_items_in_batch)
            by_hand.backward()
            plain.extend([loss.detach(), by_hand.detach()])
            return loss

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=1,
        max_grad_norm=0.0,
        label_smoothing_factor=0.1 if smoothed else 0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    options = {} if smoothed else {"compute_loss_func": loss_of_output}
    Dealt(model=wrapped, args=arguments, train_dataset=Rows(labels), callbacks=[ByHand()], **options).train()
    torch.testing.assert_close(plain[0], plain[1])
    for name, gradient in gradients.items():
        each = [voter.get_parameter(name.removesuffix("@vote")).grad for voter in voters]
        torch.testing.assert_close(gradient, torch.stack(each), rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_generated_predictions_are_those_of_the_mean_of_plain_copies(tmp_path: Path) -> None:
    make, output, labels = MODELS["translation"]
    wrapped = vote.Wrapper(N, output=output)(make())
    voters = wrapped.voters()
    options = {"predict_with_generate": True, "generation_max_length": 5}
    plain = [trained(voter.train(), labels, tmp_path, 0.1, **options) for voter in copy.deepcopy(voters)]
    trainer = trained(wrapped, labels, tmp_path, 0.1 * N, **options)
    prediction = trainer.predict(Rows(labels))
    losses = [each.predict(Rows(labels)).metrics["test_loss"] for each in plain]
    assert prediction.metrics["test_loss"] == pytest.approx(sum(losses) / N, rel=1e-5)
    written = torch.zeros(len(IDS), 1, dtype=torch.long)
    ended = torch.zeros(len(IDS), dtype=torch.bool)
    for _ in range(4):
        with torch.no_grad():
            answers = [each.model.eval()(input_ids=IDS, decoder_input_ids=written).logits[:, -1] for each in plain]
        token = torch.stack(answers).softmax(-1).mean(0).argmax(-1).masked_fill(ended, 0)
        ended |= token == plain[0].model.config.eos_token_id
        written = torch.cat([written, token[:, None]], 1)
    assert torch.equal(torch.as_tensor(prediction.predictions)[:, :5], written)
