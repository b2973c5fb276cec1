"""Models of peft around wrapped models, and what equals them: plain models with the adapters of each voter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from workbench import vote
from workbench.outputs import Logits

IDS = torch.arange(32).reshape(4, 8)
LABELS = torch.tensor([0, 1, 2, 0])
N = 3
ATTENTION = {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}
KINDS: dict[str, Callable[[], Any]] = {  # adapters that may be put into a model before it is wrapped, or after
    "DoRA": lambda: peft.LoraConfig(r=2, use_dora=True, **ATTENTION),
    "IA3": lambda: peft.IA3Config(feedforward_modules=["value"], **ATTENTION),
    "LoHa": lambda: peft.LoHaConfig(r=2, **ATTENTION),
    "LoKr": lambda: peft.LoKrConfig(r=2, **ATTENTION),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=4, **ATTENTION),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, **ATTENTION),
    "HRA": lambda: peft.HRAConfig(r=2, **ATTENTION),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=10, init_weights=True, **ATTENTION),
}


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    return transformers.BertForSequenceClassification(config).eval()


def classes(**options: Any) -> Any:
    return peft.LoraConfig(r=2, **ATTENTION, **options)


def voting(**options: Any) -> Any:
    return vote.Wrapper(N, output={"logits": Logits()}, **options)(bert()).eval()


def learned(model: Any) -> None:
    """Let all that is trained be something that a training could have made of it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def references(plain: list[Any], adapted: Any, config: Callable[..., Any] = classes) -> list[Any]:
    """Models of peft around each of these, which have never seen a wrapper, with the adapters of that voter."""
    models = [peft.get_peft_model(copy.deepcopy(model), config()).eval() for model in plain]
    trained = dict(adapted.named_parameters())
    with torch.no_grad():
        for i, model in enumerate(models):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(trained[f"{name}@vote"][i])
    return models


def logits(models: list[Any]) -> Tensor:
    return torch.stack([model(input_ids=IDS).logits for model in models])


@torch.no_grad()
def assert_answers(adapted: Any, expected: Tensor) -> None:
    """Prediction and risk of all, and each voter by itself, against [voters, rows, classes]."""
    output, risk = adapted(input_ids=IDS, return_risk=True)
    probs = expected.softmax(-1).mean(0)
    torch.testing.assert_close(output.logits.softmax(-1), probs)
    torch.testing.assert_close(risk.total.logits, torch.special.entr(probs).sum(-1))
    torch.testing.assert_close(adapted(input_ids=IDS).logits.softmax(-1), probs)
    inner = adapted.get_base_model() if hasattr(adapted, "get_base_model") else adapted
    torch.testing.assert_close(logits(inner.voters()), expected)


def decoder() -> Any:
    config = transformers.GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).eval()
