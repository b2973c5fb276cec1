"""Uncertainty of generated text: the risk of each token, and scores of whole sequences and of several samples.

Example:
    >>> semantic_entropy(["Paris", "It is Paris", "Rome"], lambda a, b: a.split()[-1] == b.split()[-1])
    0.6365141682948128
"""

from __future__ import annotations

from workbench.text.generation import generate
from workbench.text.result import Generation
from workbench.text.samples import lexical_similarity, meaning_clusters, rouge_l, self_consistency, semantic_entropy

__all__ = [
    "Generation",
    "generate",
    "lexical_similarity",
    "meaning_clusters",
    "rouge_l",
    "self_consistency",
    "semantic_entropy",
]
