"""Encoding of sentences as word numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PADDING, UNKNOWN = 0, 1
WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary that encodes sentences as word numbers; 0 is padding, and 1 a word that is in no training sentence.

    Args:
        words: words in the order of their numbers, which start at 2.
        length: number of words to which sentences are padded or truncated.

    Example:
        >>> vocabulary = Vocabulary.of(["turn it off", "is it on?"])
        >>> vocabulary(["Is it broken?"]).tolist()
        [[3, 4, 1, 2]]
    """

    words: tuple[str, ...]
    length: int

    @classmethod
    def of(cls, sentences: Iterable[str]) -> Vocabulary:
        """Build the vocabulary of training sentences, with words sorted alphabetically."""
        split = [_words(sentence) for sentence in sentences]
        return cls(tuple(sorted({word for words in split for word in words})), max(map(len, split)))

    def __len__(self) -> int:
        return len(self.words) + 2

    def __call__(self, sentences: Sequence[str]) -> Tensor:
        """Encode sentences as int64 [n, length]; longer sentences are truncated."""
        numbers = {word: number for number, word in enumerate(self.words, 2)}
        rows = torch.full((len(sentences), self.length), PADDING)
        for row, sentence in zip(rows, sentences, strict=True):
            word_numbers = [numbers.get(word, UNKNOWN) for word in _words(sentence)][: self.length]
            row[: len(word_numbers)] = torch.tensor(word_numbers, dtype=torch.int64)
        return rows


def _words(sentence: str) -> list[str]:
    return WORD.findall(sentence.lower())
