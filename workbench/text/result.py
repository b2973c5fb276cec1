"""Generated tokens, their risks, and scores of whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.risk import Risk
from workbench.text import markup, samples


@dataclass(frozen=True, eq=False)
class Generation:
    """What a wrapped language model wrote, and how far to trust it.

    With n rows (prompts x returned sequences), t steps and m members (voters or samples). A sequence ends with its token of end, which counts;
    after it the numbers are NaN and tokens are padding. Probabilities are the model's own, before temperature, penalties and `top_k`.

    Args:
        sequences: prompts (of an encoder with a decoder, what the decoder starts with) and new tokens [n, prompt + t], as transformers'
            `generate` returns them.
        tokens: new tokens [n, t].
        mask: whether a token belongs to the sequence [n, t].
        log_probs: logarithm of the members' mean probability of each token [n, t].
        member_log_probs: that of each member [m, n, t].
        risk: of each token: total, the entropy of the mean; aleatoric, the members' mean entropy; epistemic, the mutual information, each
            [n, t] in nats, of the choice among all tokens at that place.
        alternatives: the most probable tokens at each place [n, t, k], the most probable first.
        alternative_probs: their mean probabilities [n, t, k].
        texts: the new tokens as text, if there is a tokenizer.
        words: each new token as text, if there is a tokenizer.
        n_return: sequences of one prompt; rows i * n_return to (i + 1) * n_return are those of prompt i.
        sampled: whether sequences of one prompt are independent samples.
        member_alternative_probs: the alternatives' probabilities by each member [m, n, t, k], if they were kept.
    """

    sequences: Tensor
    tokens: Tensor
    mask: Tensor
    log_probs: Tensor
    member_log_probs: Tensor
    risk: Risk
    alternatives: Tensor
    alternative_probs: Tensor
    texts: list[str] | None = None
    words: Callable[[Any], list[str]] | None = None
    n_return: int = 1
    sampled: bool = False
    member_alternative_probs: Tensor | None = None

    # ---- of each sequence
    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence [n]."""
        return self.mask.sum(1)

    @property
    def log_prob(self) -> Tensor:
        """Logarithm of the probability of each sequence [n], by the mean at each step (Malinin & Gales 2021, product of expectations).

        The sum over the tokens, not normalised; its negative is `MaximumSequenceProbability` of lm-polygraph.
        """
        return self._sum(self.log_probs)

    @property
    def mean_log_prob(self) -> Tensor:
        """Length-normalised log-probability [n], its mean over the tokens (Malinin & Gales 2021); higher is to be trusted more."""
        return self.log_prob / self.lengths

    @property
    def perplexity(self) -> Tensor:
        """exp(-mean_log_prob) [n], at least 1 (Jelinek et al. 1977); lower is to be trusted more.

        `Perplexity` of lm-polygraph is its logarithm; the sequence probability of uqlm is 1 / perplexity.
        """
        return (-self.mean_log_prob).exp()

    @property
    def perplexity_spread(self) -> Tensor:
        """Standard deviation over the members (divided by m) of their own perplexities of the sequence [n]; of one member it is 0.

        A score of this library: how far the members disagree about the whole sequence.
        """
        each = (-self._sum(self.member_log_probs) / self.lengths).exp()
        return each.std(0, correction=0)

    @property
    def mean_entropy(self) -> Tensor:
        """Mean total risk of the tokens in nats [n] (Fomicheva et al. 2020, "Unsupervised quality estimation", softmax entropy)."""
        return self._sum(self.risk.total) / self.lengths

    @property
    def max_entropy(self) -> Tensor:
        """Highest total risk of the tokens in nats [n] (Manakul et al. 2023, "SelfCheckGPT", Max(H))."""
        return self.risk.total.masked_fill(~self.mask, -torch.inf).amax(1)

    def _sum(self, values: Tensor) -> Tensor:
        """Over the tokens of each sequence; NaN of a model that gives NaN stays."""
        return values.masked_fill(~self.mask, 0).sum(-1)

    # ---- of the samples of each prompt
    def self_consistency(self, answer: Callable[[str], Any] = str.strip) -> list[float]:
        """Share of the most frequent answer among the samples of each prompt; see `workbench.text.self_consistency`.

        Args:
            answer: the final answer in a text, such as `lambda text: text.split("=")[-1].strip()`.
        """
        return [samples.self_consistency([answer(text) for text in texts]) for texts, _ in self._samples()]

    def lexical_similarity(self) -> list[float]:
        """Mean ROUGE-L between the samples of each prompt; see `workbench.text.lexical_similarity`."""
        return [samples.lexical_similarity(texts) for texts, _ in self._samples()]

    def semantic_entropy(self, equivalent: samples.Equivalence, *, discrete: bool = False) -> list[float]:
        """Entropy over the meanings of the samples of each prompt, in nats; see `workbench.text.semantic_entropy`.

        Args:
            equivalent: `equivalent(a, b)`, whether two answers to the same prompt mean the same.
            discrete: weigh each sample alike, and not by its length-normalised probability.
        """
        return [
            samples.semantic_entropy(texts, equivalent, None if discrete else self.mean_log_prob[rows])
            for texts, rows in self._samples()
        ]

    def _samples(self) -> list[tuple[list[str], slice]]:
        if self.texts is None:
            raise ValueError("there are no texts to compare: generate with tokenizer=")
        if not self.sampled or self.n_return < 2:
            how = "the best beams or a single sequence" if not self.sampled else "one sample of each prompt"
            raise ValueError(
                f"this is a score of several independent samples, and these are {how}: generate with do_sample=True, num_beams=1, "
                "num_return_sequences=5"
            )
        starts = range(0, len(self.texts), self.n_return)
        return [(self.texts[i : i + self.n_return], slice(i, i + self.n_return)) for i in starts]

    # ---- to look at
    def html(self, kind: Literal["total", "aleatoric", "epistemic", "-log probability"] = "total") -> str:
        """The texts as HTML, the ground of each token by its risk; its probability, risks and alternatives show on hover.

        A report makes of it what `workbench.widgets.TokenRisks` shows in a notebook: other risks, touch, keys, and what each voter says.

        Args:
            kind: the risk of the ground, or "-log probability" of the token; the darkest one is the highest in all sequences.
        """
        if kind not in (known := markup.kinds(self)):
            raise ValueError(f"kind: expected one of {', '.join(known)}, found {kind!r}")
        return markup.page(self, kind)

    def _repr_html_(self) -> str:
        return self.html()

    def __repr__(self) -> str:
        n, t = self.tokens.shape
        return f"Generation({n} sequences, up to {t} tokens, {len(self.member_log_probs)} members)"
