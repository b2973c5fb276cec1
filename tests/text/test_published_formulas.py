"""Scores of text: compared with the definitions of lm-polygraph 0.7.0 and uqlm 0.6.7, rewritten here, and where these differ.

Each function names the package's file. What is the same score must be equal, whatever its sign and name; docstrings say which is another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from workbench.text import generate, lexical_similarity, self_consistency, semantic_entropy

ANSWERS = ["Paris", "paris", "Rome", "PARIS", "Oslo", "rome"]
# of each answer the log-probabilities of its tokens, which are not equally many
TOKENS = [[-0.1, -0.4], [-1.2], [-0.7, -0.1, -0.3], [-2.0, -0.2], [-0.9], [-0.3, -1.8, -0.2, -0.1]]


def alike(a: str, b: str) -> bool:
    return a.lower() == b.lower()


def classes() -> list[list[int]]:
    """The numbers of the answers of each meaning."""
    return [[i for i, answer in enumerate(ANSWERS) if answer.lower() == name] for name in ("paris", "rome", "oslo")]


# ---- lm-polygraph 0.7.0
def polygraph_semantic_entropy(class_log_probs: Sequence[float], members: Sequence[Sequence[int]], n: int) -> float:
    """estimators/semantic_entropy.py, entropy_estimation="mean": minus the mean over samples of their class's log-probability."""
    of_sample = {i: value for value, some in zip(class_log_probs, members, strict=True) for i in some}
    return -sum(of_sample[i] for i in range(n)) / n


def polygraph_rouge_l(a: str, b: str) -> float:
    """estimators/lexical_similarity.py by the package rouge_score: lower-case words of letters and digits; words of this test have no stems."""
    first, second = (re.findall("[a-z0-9]+", text.lower()) for text in (a, b))

    @cache
    def common(i: int, j: int) -> int:
        if i == len(first) or j == len(second):
            return 0
        return 1 + common(i + 1, j + 1) if first[i] == second[j] else max(common(i + 1, j), common(i, j + 1))

    precision, recall = common(0, 0) / len(second), common(0, 0) / len(first)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def polygraph_lexical_similarity(texts: Sequence[str]) -> float:
    """estimators/lexical_similarity.py: the mean over pairs with minus sign."""
    pairs = [(a, b) for i, a in enumerate(texts) for b in texts[i + 1 :]]
    return -sum(polygraph_rouge_l(a, b) for a, b in pairs) / len(pairs)


def test_semantic_entropy_by_frequency_is_that_of_polygraph() -> None:
    n = len(ANSWERS)
    shares = [math.log(len(some) / n) for some in classes()]
    expected = polygraph_semantic_entropy(shares, classes(), n)
    assert semantic_entropy(ANSWERS, alike) == pytest.approx(expected)


def test_polygraphs_sums_of_likelihoods_are_something_else() -> None:
    """class_probability_estimation="sum" adds likelihoods of whole answers, and normalizes neither by length nor over classes."""
    whole = [sum(tokens) for tokens in TOKENS]
    sums = [math.log(sum(math.exp(whole[i]) for i in some)) for some in classes()]
    theirs = polygraph_semantic_entropy(sums, classes(), len(ANSWERS))
    ours = semantic_entropy(ANSWERS, alike, [sum(tokens) / len(tokens) for tokens in TOKENS])
    assert abs(theirs - ours) > 0.1
    # certain as it can be: one meaning has no entropy, and minus its log-likelihood is what theirs is
    assert semantic_entropy(["yes"] * 2, alike, [-1.0, -1.0]) == 0
    assert polygraph_semantic_entropy([math.log(2 * math.exp(-1))], [[0, 1]], 2) == pytest.approx(1 - math.log(2))


def test_lexical_similarity_is_that_of_polygraph_with_another_sign() -> None:
    texts = ["the cat sat on a mat", "a cat sat", "no", "the mat", "a cat on the mat"]
    assert lexical_similarity(texts) == pytest.approx(-polygraph_lexical_similarity(texts))


def test_polygraph_reads_words_without_case_and_signs() -> None:
    assert polygraph_lexical_similarity(["Paris.", "paris"]) == -1
    assert lexical_similarity(["Paris.", "paris"]) == 0
    assert lexical_similarity([re.findall("[a-z0-9]+", text.lower()) for text in ("Paris.", "paris")]) == 1


# ---- uqlm 0.6.7
def uqlm_semantic_entropy(probs: Sequence[float], members: Sequence[Sequence[int]]) -> float:
    """nli/entropy_utils.py: probabilities of clusters are sums of those of their answers, divided by all; abs(sum p log p)."""
    sums = [sum(probs[i] for i in some) for some in members]
    return abs(sum(p / sum(sums) * math.log(p / sum(sums)) for p in sums))


def uqlm_sequence_probability(logs: Sequence[float]) -> float:
    """white_box/baseclass/logprobs_scorer.py, _norm_prob: exp of the mean log-probability."""
    return math.exp(sum(logs) / len(logs))


def uqlm_exact_match(response: str, candidates: Sequence[str]) -> float:
    """black_box/match.py: the share of candidates that are the response."""
    return sum(response == candidate for candidate in candidates) / len(candidates)


@pytest.mark.parametrize("discrete", [True, False], ids=["discrete", "by probability"])
def test_semantic_entropy_is_that_of_uqlm(discrete: bool) -> None:
    logs = None if discrete else [sum(tokens) / len(tokens) for tokens in TOKENS]
    probs = [1 / len(ANSWERS)] * len(ANSWERS) if discrete else [uqlm_sequence_probability(tokens) for tokens in TOKENS]
    assert semantic_entropy(ANSWERS, alike, logs) == pytest.approx(uqlm_semantic_entropy(probs, classes()))


def test_self_consistency_is_the_match_of_the_majority_with_all_samples() -> None:
    """That of uqlm compares another, given response with the samples, and is lower where that is not the majority's."""
    samples = ["42", "41", "42", "40", "42"]
    assert self_consistency(samples) == uqlm_exact_match("42", samples)
    assert uqlm_exact_match("41", samples) == 0.2 < self_consistency(samples)


# ---- scores of sequences
def polygraph_sequence_scores(logs: Sequence[float], entropies: Sequence[float]) -> dict[str, float]:
    """estimators/max_probability.py, perplexity.py and token_entropy.py; "Perplexity" is the mean of -log p there, not its exponential."""
    return {
        "MaximumSequenceProbability": -sum(logs),
        "Perplexity": -sum(logs) / len(logs),
        "MeanTokenEntropy": sum(entropies) / len(entropies),
    }


def test_scores_of_sequences_are_those_of_polygraph_and_uqlm() -> None:
    pytest.importorskip("transformers")
    from test_generated_text import ENDS, gpt, wrapped_as

    torch.manual_seed(6)  # with which texts end after different numbers of tokens
    writer = wrapped_as(gpt, eos=ENDS)
    written = generate(writer, [[3, 4, 5], [6]], max_new_tokens=8, do_sample=True, num_return_sequences=3, seed=0)
    assert len(set(written.lengths.tolist())) > 1
    for row, n in enumerate(written.lengths.tolist()):
        logs, entropies = written.log_probs[row, :n].tolist(), written.risk.total[row, :n].tolist()
        theirs = polygraph_sequence_scores(logs, entropies)
        assert -written.log_prob[row].item() == pytest.approx(theirs["MaximumSequenceProbability"])
        assert -written.mean_log_prob[row].item() == pytest.approx(theirs["Perplexity"])
        assert written.perplexity[row].item() == pytest.approx(math.exp(theirs["Perplexity"]))
        assert written.mean_entropy[row].item() == pytest.approx(theirs["MeanTokenEntropy"])
        assert 1 / written.perplexity[row].item() == pytest.approx(uqlm_sequence_probability(logs))
