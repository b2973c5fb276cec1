"""Tiny models of transformers with random weights that compute a loss of `labels`, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from workbench.outputs import Binary, Logits, Values

SIZE: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2: dict[str, Any] = {"vocab_size": 30, "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, **IDS}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
BART: dict[str, Any] = {"vocab_size": 30, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0, **IDS}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
BART |= {"max_position_embeddings": 16, "decoder_start_token_id": 2, "forced_eos_token_id": None}
T5: dict[str, Any] = {
    "vocab_size": 30,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 8,
    "num_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
}
T5 |= {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
VIT: dict[str, Any] = {**SIZE, **STILL, "image_size": 8, "patch_size": 4, "num_channels": 3}
DISTIL: dict[str, Any] = {"vocab_size": 30, "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8}
DISTIL |= dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
DECODER: dict[str, Any] = {**SIZE, **IDS, "num_key_value_heads": 2, "max_position_embeddings": 16}

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Labelled:
    """A model that computes its own loss.

    Args:
        cls: name of the model class.
        config: name of the configuration class, and its arguments.
        labels: `labels(generator, rows)` draws labels.
        output: meaning of the scores.
        place: position of a score's label: "same", or "next" for the following position.
    """

    cls: str
    config: tuple[str, dict[str, Any]]
    labels: Callable[[torch.Generator, int], Tensor]
    output: Any
    place: str = "same"
    choices: int = 0

    def build(self, seed: int = 0) -> nn.Module:
        """Return a new model with weights drawn from the seed."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = getattr(transformers, self.cls)(getattr(transformers, self.config[0])(**self.config[1]))
            with torch.no_grad():  # larger weights, since the scores of an untrained model are nearly equal
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.mul_(5)
            return model.eval()

    def batch(self, rows: int = 6, seed: int = 0, length: int = 7) -> Batch:
        """Return inputs and labels, with padded rows as from a tokenizer and a collator."""
        generator = torch.Generator().manual_seed(seed)
        labels = self.labels(generator, rows)
        if "image_size" in self.config[1]:
            return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator), "labels": labels}
        shape = (rows, self.choices, length) if self.choices else (rows, length)
        ids, mask = torch.randint(3, 30, shape, generator=generator), torch.ones(shape, dtype=torch.int64)
        ids[1::2, ..., -2:], mask[1::2, ..., -2:] = 0, 0
        if labels.shape == ids.shape and not labels.is_floating_point():
            labels = labels.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def numbers(classes: int, *shape: int) -> Callable[[torch.Generator, int], Tensor]:
    """Return a function that draws class numbers [rows, *shape]; for tokens, one position is ignored (-100)."""

    def draw(generator: torch.Generator, rows: int) -> Tensor:
        labels = torch.randint(classes, (rows, *shape), generator=generator)
        if shape:
            labels[:, 3] = -100
        return labels

    return draw


def values(*shape: int) -> Callable[[torch.Generator, int], Tensor]:
    """Return a function that draws real values [rows, *shape]."""
    return lambda generator, rows: torch.randn(rows, *shape, generator=generator)


def yes_or_no(*shape: int) -> Callable[[torch.Generator, int], Tensor]:
    """Return a function that draws 0. or 1., [rows, *shape]."""
    return lambda generator, rows: torch.randint(2, (rows, *shape), generator=generator).float()


ROWS, TOKENS = {"logits": Logits()}, {"logits": Logits(dim=-1)}
THREE = {"num_labels": 3}
# encoders by the prefix of their class names; heads by the suffix, with their labels
ENCODERS: dict[str, tuple[str, tuple[str, dict[str, Any]]]] = {
    "bert": ("Bert", ("BertConfig", {**SIZE, **STILL, **THREE})),
    "roberta": ("Roberta", ("RobertaConfig", {**SIZE, **STILL, **IDS, **THREE, "max_position_embeddings": 20})),
    "distilbert": ("DistilBert", ("DistilBertConfig", {**DISTIL, **THREE})),
    "electra": ("Electra", ("ElectraConfig", {**SIZE, **STILL, **THREE, "summary_last_dropout": 0.0})),
    "deberta": ("DebertaV2", ("DebertaV2Config", {**SIZE, **STILL, **THREE})),
}
HEADS: dict[str, tuple[Any, ...]] = {
    "tokens": ("TokenClassification", numbers(3, 7), TOKENS),
    "masked": ("MaskedLM", numbers(30, 7), TOKENS),
    "choices": ("MultipleChoice", numbers(2), ROWS, "same", 2),
}


def _bert(**more: Any) -> tuple[str, dict[str, Any]]:
    return "BertConfig", {**SIZE, **STILL, **more}


LABELLED = {
    "bert classes": Labelled("BertForSequenceClassification", _bert(num_labels=3), numbers(3), ROWS),
    "bert labels": Labelled("BertForSequenceClassification", _bert(num_labels=3), yes_or_no(3), {"logits": Binary()}),
    "bert value": Labelled("BertForSequenceClassification", _bert(num_labels=1), values(), {"logits": Values()}),
    "bert values": Labelled(
        "BertForSequenceClassification", _bert(num_labels=2, problem_type="regression"), values(2), {"logits": Values()}
    ),
    "bert decoder": Labelled("BertLMHeadModel", _bert(is_decoder=True), numbers(30, 7), TOKENS, "next"),
    "distilbert classes": Labelled(
        "DistilBertForSequenceClassification", ("DistilBertConfig", {**DISTIL, **THREE}), numbers(3), ROWS
    ),
    "electra classes": Labelled(
        "ElectraForSequenceClassification", ("ElectraConfig", {**SIZE, **STILL, **THREE}), numbers(3), ROWS
    ),
    **{
        f"{encoder} {head}": Labelled(f"{prefix}For{task}", config, *more)
        for encoder, (prefix, config) in ENCODERS.items()
        for head, (task, *more) in HEADS.items()
    },
    "albert masked": Labelled(
        "AlbertForMaskedLM", ("AlbertConfig", {**SIZE, **STILL, "embedding_size": 8}), numbers(30, 7), TOKENS
    ),
    "gpt2": Labelled("GPT2LMHeadModel", ("GPT2Config", GPT2), numbers(30, 7), TOKENS, "next"),
    "gpt2 classes": Labelled("GPT2ForSequenceClassification", ("GPT2Config", {**GPT2, **THREE}), numbers(3), ROWS),
    "gpt2 tokens": Labelled(
        "GPT2ForTokenClassification",
        ("GPT2Config", {**GPT2, **THREE, "classifier_dropout": 0.0}),
        numbers(3, 7),
        TOKENS,
    ),
    "llama": Labelled("LlamaForCausalLM", ("LlamaConfig", DECODER), numbers(30, 7), TOKENS, "next"),
    "qwen2": Labelled("Qwen2ForCausalLM", ("Qwen2Config", DECODER), numbers(30, 7), TOKENS, "next"),
    "mistral classes": Labelled(
        "MistralForSequenceClassification", ("MistralConfig", {**DECODER, **THREE}), numbers(3), ROWS
    ),
    "vit": Labelled("ViTForImageClassification", ("ViTConfig", {**VIT, **THREE}), numbers(3), ROWS),
    "deit": Labelled("DeiTForImageClassification", ("DeiTConfig", {**VIT, **THREE}), numbers(3), ROWS),
    "bart": Labelled("BartForConditionalGeneration", ("BartConfig", BART), numbers(30, 5), TOKENS),
    "t5": Labelled("T5ForConditionalGeneration", ("T5Config", T5), numbers(30, 5), TOKENS),
}
