"""Scores of sampled answers: compared with their papers' formulas, worked out by hand."""

from __future__ import annotations

import math

import pytest

from workbench.text import lexical_similarity, meaning_clusters, rouge_l, self_consistency, semantic_entropy


def subsequences(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(w for i, w in enumerate(words) if k >> i & 1) for k in range(2 ** len(words))}


@pytest.mark.parametrize(
    ("a", "b"),
    [("the cat sat", "the cat was here"), ("a b c d", "d c b a"), ("x", "y"), ("a a b", "a b a"), ("", "a")],
)
def test_rouge_l_of_all_subsequences(a: str, b: str) -> None:
    longest = max(map(len, subsequences(a.split()) & subsequences(b.split())))
    precision, recall = longest / max(1, len(a.split())), longest / max(1, len(b.split()))
    expected = 0.0 if not longest else 2 * precision * recall / (precision + recall)
    assert rouge_l(a, b) == pytest.approx(expected)


def test_lexical_similarity_is_the_mean_over_pairs() -> None:
    a, b, c = "the cat sat", "the cat sat down", "no idea"
    # of 3 and 4 words 3 in common: precision 1, recall 3/4
    assert lexical_similarity([a, b, c]) == pytest.approx((2 * 0.75 / 1.75 + 0 + 0) / 3)


def test_semantic_entropy_of_weighted_clusters() -> None:
    answers = ["Paris", "paris", "Rome", "PARIS"]
    logs = [-0.1, -1.2, -0.7, -2.0]
    paris = math.exp(-0.1) + math.exp(-1.2) + math.exp(-2.0)
    rome = math.exp(-0.7)
    p = paris / (paris + rome)

    def equivalent(a: str, b: str) -> bool:
        return a.lower() == b.lower()

    assert semantic_entropy(answers, equivalent, logs) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    assert semantic_entropy(answers, equivalent) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert semantic_entropy(["a"] * 4, equivalent) == 0
    assert semantic_entropy(list("abcd"), equivalent, [-3.0] * 4) == pytest.approx(math.log(4))


def test_clusters_are_compared_by_their_first_answer() -> None:
    # "b" is near "a" and "c", which are not near each other
    def near(a: str, b: str) -> bool:
        return abs(ord(a) - ord(b)) <= 1

    assert meaning_clusters(["a", "b", "c", "d"], near) == [0, 0, 1, 1]


def test_self_consistency_is_the_share_of_the_majority() -> None:
    assert self_consistency([4, 4, 5, 4, 6]) == 0.6


def test_what_cannot_be_scored() -> None:
    with pytest.raises(ValueError, match="found 0"):
        self_consistency([])
    with pytest.raises(ValueError, match="single text"):
        lexical_similarity("abc")
    with pytest.raises(ValueError, match="2 or more"):
        lexical_similarity(["abc"])
    with pytest.raises(ValueError, match="one for each of 2"):
        semantic_entropy(["a", "b"], str.__eq__, [-1.0])
    with pytest.raises(ValueError, match="at most 0"):
        semantic_entropy(["a", "b"], str.__eq__, [-1.0, 0.5])
