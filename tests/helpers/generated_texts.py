"""Language models with voters, and what they write according to plain copies of the voters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from workbench import vote
from workbench.outputs import Logits

TOKENS = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1}
SCORES = {"logits": Logits(dim=-1)}
ENDS = [2, 5, 9, 13, 14]
PROMPTS = [[3, 4, 5, 6], [7, 8]]


def gpt(eos: Any = None) -> Any:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=32, eos_token_id=eos, **TOKENS)
    return transformers.GPT2LMHeadModel(config).double().eval()


def llama(eos: Any = None) -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=32, eos_token_id=eos, **TOKENS)
    return transformers.LlamaForCausalLM(config).double().eval()


def wrapped_as(build: Any, eos: Any = None, **settings: Any) -> Any:
    """Voters whose scores differ, so that tokens are not chosen by rounding."""
    wrapped = vote.Wrapper(3, output=SCORES, **settings)(build(eos)).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return wrapped


def plain_steps(wrapped: Any, prompt: Any, tokens: list[int]) -> torch.Tensor:
    """The probabilities [voters, steps, vocabulary] from which each token was chosen, without padding and without a cache.

    Of a prompt of tokens, or of a function that gives a voter's scores after the tokens that are written.
    """
    voters = [copy.deepcopy(voter).eval() for voter in wrapped.voters()]
    steps = []
    with torch.no_grad():
        for t in range(len(tokens)):
            if callable(prompt):
                scores = [prompt(voter, tokens[:t]) for voter in voters]
            else:
                scores = [voter(torch.tensor([[*prompt, *tokens[:t]]]), use_cache=False).logits for voter in voters]
            steps.append(torch.stack([logits[0, -1].softmax(-1) for logits in scores]))
    return torch.stack(steps, 1)


def entropy(probs: torch.Tensor) -> torch.Tensor:
    return -(probs * probs.log()).sum(-1)


def assert_those_of_plain_voters(written: Any, wrapped: Any, prompts: Any) -> None:
    for row in range(len(written.tokens)):
        n = int(written.lengths[row])
        tokens = written.tokens[row, :n].tolist()
        each = plain_steps(wrapped, prompts[row // written.n_return], tokens)
        mean, at = each.mean(0), torch.tensor(tokens)[:, None]
        expected = {
            "log_probs": mean.gather(-1, at)[:, 0].log(),
            "total": entropy(mean),
            "aleatoric": entropy(each).mean(0),
            "epistemic": entropy(mean) - entropy(each).mean(0),
            "alternatives": mean.sort(-1, descending=True).values[:, :5],
        }
        measured = {
            "log_probs": written.log_probs,
            **{name: written.risk[name] for name in ("total", "aleatoric", "epistemic")},
            "alternatives": written.alternative_probs,
        }
        for name, values in expected.items():
            torch.testing.assert_close(measured[name][row, :n], values, rtol=1e-5, atol=1e-6, msg=name)
        assert written.member_alternative_probs is not None
        of_members = each.gather(-1, written.alternatives[row, :n].expand(3, -1, -1))
        torch.testing.assert_close(written.member_alternative_probs[:, row, :n], of_members, rtol=1e-5, atol=1e-6)
        members = each.gather(-1, at.expand(3, -1, -1))[..., 0].log()
        torch.testing.assert_close(written.member_log_probs[:, row, :n], members, rtol=1e-5, atol=1e-6)
        assert written.log_probs[row, n:].isnan().all()
        assert written.risk.total[row, n:].isnan().all()
        # scores of the sequence, by hand
        logs = expected["log_probs"]
        assert written.mean_log_prob[row].item() == pytest.approx(sum(logs.tolist()) / n, rel=1e-5)
        assert written.perplexity[row].item() == pytest.approx(2.718281828459045 ** (-sum(logs.tolist()) / n), rel=1e-5)
        assert written.max_entropy[row].item() == pytest.approx(max(expected["total"].tolist()), rel=1e-5)
        assert written.mean_entropy[row].item() == pytest.approx(sum(expected["total"].tolist()) / n, rel=1e-5)
        perplexities = [(-voter.sum() / n).exp().item() for voter in members]
        middle = sum(perplexities) / 3
        by_hand = (sum((value - middle) ** 2 for value in perplexities) / 3) ** 0.5
        assert written.perplexity_spread[row].item() == pytest.approx(by_hand, rel=1e-4)
