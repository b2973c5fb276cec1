"""Tokens one by one, as people can read them."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's tokens of single bytes
# categories of Unicode that show nothing, or steer what stands around them
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def words_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token by itself, such as " answer"; bytes that are no whole character are written as escapes.

    Args:
        tokenizer: of transformers, or whatever has `convert_ids_to_tokens`.
        ids: of the tokens.
    """
    pieces = [str(piece) for piece in tokenizer.convert_ids_to_tokens(list(ids))]
    join = getattr(tokenizer, "convert_tokens_to_string", None)
    if join is not None and join(["Ã©"]) == "é":  # every character stands for one byte, as in GPT-2
        bytes_of = _bytes()
        return [
            bytes(map(bytes_of.__getitem__, piece)).decode("utf-8", "backslashreplace")
            if bytes_of.keys() >= set(piece)
            else piece
            for piece in pieces
        ]
    pieces = [
        bytes.fromhex(found[1]).decode("utf-8", "backslashreplace") if (found := BYTE.fullmatch(piece)) else piece
        for piece in pieces
    ]
    return [piece.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n") for piece in pieces]


def visible(word: str) -> str:
    """A text in which what shows nothing, or turns the direction of writing, stands as an escape; line breaks and tabs stay.

    Example:
        >>> visible("a\\x00b\\u202e") == "a" + chr(92) + "x00b" + chr(92) + "u202e"
        True
    """
    return "".join(
        sign.encode("unicode_escape").decode() if unicodedata.category(sign) in UNSEEN and sign not in "\n\t" else sign
        for sign in word
    )


@functools.cache
def _bytes() -> dict[str, int]:
    """The byte of each character of GPT-2's alphabet: printable ones stand for themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
