"""Voters of models that initialize weights by `_init_weights`, as in transformers, start like newly built models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import vote
from workbench.outputs import Logits


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first, self.last = nn.Parameter(torch.ones(24)), nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.last(self.first(x).relu())


class Own(nn.Module):
    """Draws its weights as many published models do: `apply(self._init_weights)`, with a block that scales what leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.token = nn.Embedding(60, 24), nn.Parameter(torch.zeros(24, 24))
        self.block, self.head = Block(), nn.Linear(24, 3)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.03)
        if isinstance(module, Block):
            nn.init.normal_(module.scale, mean=2.0, std=0.5)
            nn.init.normal_(module.last.weight, std=0.004)
        if isinstance(module, Own):
            nn.init.trunc_normal_(module.token, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.words(x) @ self.token).mean(1))


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 90, "n_layer": 2, "n_head": 2, "n_embd": 48, "n_positions": 40}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    )


def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 90, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=64, max_position_embeddings=40, num_labels=3)
    return transformers.BertForSequenceClassification(config)


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "own": (Own, "logits"),
    "gpt2": (gpt2, {"logits": Logits(dim=-1)}),
    "bert": (bert, {"logits": Logits()}),
}


@pytest.mark.parametrize("name", MODELS)
def test_voters_start_as_newly_built_models_do(name: str) -> None:
    make, output = MODELS[name]
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    voters = [dict(voter.named_parameters()) for voter in vote.Wrapper(3, output=output)(model).voters()]
    drawn = 0
    for key, built in make().named_parameters():
        if built.std() == 0 or built.numel() < 100:
            continue  # constants; a few numbers tell no spread
        drawn += 1
        for i, voter in enumerate(voters):
            assert voter[key].std().item() == pytest.approx(built.std().item(), rel=0.3), key
            pair = torch.stack([voter[key].flatten(), voters[i - 1][key].flatten()])
            assert abs(torch.corrcoef(pair)[0, 1]) < 0.45, key
    assert drawn >= 4
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_few_numbers_of_a_block_of_its_own_are_drawn() -> None:
    voters = vote.Wrapper(3, output="logits")(Own()).voters()
    scales = torch.stack([voter.block.scale for voter in voters])
    assert abs(torch.corrcoef(scales)).triu(1).max() < 0.7  # not noise around the first
    assert scales.mean().item() == pytest.approx(2.0, abs=0.3)


class Taking(Own):
    def _init_weights(self, module: nn.Module, depth: int) -> None:  # type: ignore[override]
        raise AssertionError("it takes a depth, which nobody knows")

    def apply(self, function: Any) -> Any:
        return self


class Failing(Own):
    def _init_weights(self, module: nn.Module) -> None:
        raise RuntimeError("not now")

    def apply(self, function: Any) -> Any:
        return self


@pytest.mark.parametrize("cls", [Taking, Failing])
def test_an_initialization_that_cannot_be_called_is_left_alone(cls: type[Own]) -> None:
    voters = vote.Wrapper(3, output="logits")(cls()).voters()
    assert not torch.equal(voters[0].head.weight, voters[1].head.weight)
