"""Scores of agreement between several answers sampled for one prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations

from torch import Tensor

Equivalence = Callable[[str, str], bool]


def self_consistency(answers: Sequence[Hashable]) -> float:
    """Return the share of the most frequent answer (Wang et al. 2023, "Self-consistency improves chain of thought reasoning").

    Args:
        answers: final answers to one prompt, such as the number at the end of a chain of thought; answers that compare equal are the same.

    Returns:
        Between 1 / n and 1; higher means more certain. It is uqlm's exact match between the most frequent answer and all answers; that
        package uses a given answer, such as the greedy one, instead of the most frequent one.

    Raises:
        ValueError: if there are no answers.

    Example:
        >>> self_consistency(["42", "42", "41", "42"])
        0.75
    """
    _at_least(answers, 1)
    return Counter(answers).most_common(1)[0][1] / len(answers)


def rouge_l(candidate: Sequence[Hashable] | str, reference: Sequence[Hashable] | str) -> float:
    """Return the F-measure of the longest common subsequence of two texts (Lin 2004, "ROUGE: a package for automatic evaluation of summaries").

    With l the length of the subsequence, it is the harmonic mean (beta = 1) of precision l / |candidate| and recall l / |reference|.

    Args:
        candidate, reference: texts, which are split into words at white space (no stemming, case kept), or sequences of tokens.

    Returns:
        Between 0 and 1; 1 for two empty texts.

    Example:
        >>> rouge_l("the cat sat", "the cat was here")
        0.5714285714285714
    """
    a = candidate.split() if isinstance(candidate, str) else list(candidate)
    b = reference.split() if isinstance(reference, str) else list(reference)
    if not a and not b:
        return 1.0
    lengths = [0] * (len(b) + 1)
    for item in a:
        row = [0]
        for j, other in enumerate(b):
            row.append(lengths[j] + 1 if item == other else max(lengths[j + 1], row[j]))
        lengths = row
    return 2 * lengths[-1] / (len(a) + len(b))


def lexical_similarity(answers: Sequence[str] | Sequence[Sequence[Hashable]]) -> float:
    """Return the mean ROUGE-L over all pairs of answers (Fomicheva et al. 2020; with ROUGE-L as in Kuhn et al. 2023, "Semantic uncertainty").

    lm-polygraph's `LexicalSimilarity` is its negative, over stemmed words in lower case without punctuation; give such words for equal results.

    Args:
        answers: two or more answers to one prompt, texts or sequences of tokens.

    Returns:
        Between 0 and 1; higher means more certain.

    Raises:
        ValueError: for fewer than two answers.

    Example:
        >>> lexical_similarity(["a b c", "a b c", "x y z"])
        0.3333333333333333
    """
    _at_least(answers, 2)
    pairs = list(combinations(answers, 2))
    return sum(rouge_l(a, b) for a, b in pairs) / len(pairs)


def meaning_clusters(answers: Sequence[str], equivalent: Equivalence) -> list[int]:
    """Assign each answer to a cluster of equal meaning (Farquhar et al. 2024, algorithm 1).

    Each answer is compared with the first answer of every cluster, in order, and joins the first cluster that it is equivalent to.

    Args:
        answers: answers to one prompt.
        equivalent: function `equivalent(first, answer)`, whether two answers mean the same; in the paper, whether each entails the other.

    Returns:
        Cluster number of each answer, counted from 0 in order of appearance.

    Example:
        >>> meaning_clusters(["Paris", "PARIS", "Rome"], lambda a, b: a.lower() == b.lower())
        [0, 0, 1]
    """
    firsts: list[str] = []
    numbers = []
    for answer in answers:
        number = next((k for k, first in enumerate(firsts) if equivalent(first, answer)), len(firsts))
        if number == len(firsts):
            firsts.append(answer)
        numbers.append(number)
    return numbers


def semantic_entropy(
    answers: Sequence[str], equivalent: Equivalence, log_probs: Sequence[float] | Tensor | None = None
) -> float:
    """Return the entropy over meanings in nats (Farquhar et al. 2024, "Detecting hallucinations ... using semantic entropy", Nature).

    P(c) is the sum of exp(log p) over the answers of a cluster, normalized over the clusters; the entropy is -sum P(c) log P(c). Without
    log-probabilities, P(c) is the share of the answers, which gives the discrete semantic entropy.

    These are the entropies of uqlm, and the discrete one is `SemanticEntropyEmpirical` of lm-polygraph. Its `SemanticEntropy` is another score
    (Kuhn et al. 2023): minus the mean over the answers of the logarithm of their cluster's sum of likelihoods. It uses likelihoods of whole
    answers, not normalized by length, and sums not normalized over the clusters, so that it is not 0 if all answers mean the same.

    Args:
        answers: answers sampled for one prompt.
        equivalent: function `equivalent(a, b)`, whether two answers mean the same; see `meaning_clusters`.
        log_probs: log-probabilities of the answers [n], length-normalized as in the paper: `Generation.mean_log_prob`.

    Returns:
        Between 0 and log n; lower means more certain.

    Raises:
        ValueError: if there are no answers, another number of log-probabilities, or some above 0 or not finite.

    Example:
        >>> round(semantic_entropy(["yes", "Yes", "no"], lambda a, b: a.lower() == b.lower(), [-1.0, -1.0, -1.0]), 4)
        0.6365
    """
    _at_least(answers, 1)
    logs = [0.0] * len(answers) if log_probs is None else [float(value) for value in log_probs]
    if len(logs) != len(answers):
        raise ValueError(f"log_probs: expected one for each of {len(answers)} answers, found {len(logs)}")
    if any(not math.isfinite(value) or value > 1e-6 for value in logs):
        raise ValueError(f"log_probs: expected finite logarithms of probabilities, at most 0, found {logs}")
    highest = max(logs)
    masses: dict[int, float] = {}
    for number, value in zip(meaning_clusters(answers, equivalent), logs, strict=True):
        masses[number] = masses.get(number, 0.0) + math.exp(value - highest)
    total = sum(masses.values())
    return -sum(mass / total * math.log(mass / total) for mass in masses.values()) + 0.0


def _at_least(answers: Sequence[object], n: int) -> None:
    if isinstance(answers, str):
        raise ValueError("answers: expected a list of answers to one prompt, found a single text")
    if len(answers) < n:
        raise ValueError(
            f"answers: expected {n} or more to one prompt, found {len(answers)}; generate with do_sample=True, num_return_sequences=5"
        )
