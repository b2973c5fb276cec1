"""Readable text of single tokens."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's tokens for single bytes
# Unicode categories of characters that are invisible or change the direction of the surrounding text
INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
# zero-width (non-)joiners between what they join: letters without case, as in Persian and Hindi, and emoji; elsewhere nothing shows them
JOINED = re.compile(r"(?<=(.))[\u200c\u200d](?=(.))", re.DOTALL)
JOINABLE = {"Lo", "Mn", "Mc", "So", "Sk"}


def words_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each single token, such as " answer"; bytes that are not a complete character become escapes.

    An id that the tokenizer does not know, as a model may have more than its tokenizer, is written as in "<unknown id 151700>".

    Args:
        tokenizer: tokenizer of transformers, or an object with `convert_ids_to_tokens`.
        ids: token ids.
    """
    pieces = [
        f"<unknown id {number}>" if piece is None else str(piece)
        for number, piece in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True)
    ]
    join = getattr(tokenizer, "convert_tokens_to_string", None)
    if join is not None and join(["Ã©"]) == "é":  # every character represents one byte, as in GPT-2
        bytes_of = _bytes()
        return [
            bytes(map(bytes_of.__getitem__, piece)).decode("utf-8", "backslashreplace")
            if bytes_of.keys() >= set(piece)
            else piece
            for piece in pieces
        ]
    pieces = [
        bytes.fromhex(match[1]).decode("utf-8", "backslashreplace") if (match := BYTE.fullmatch(piece)) else piece
        for piece in pieces
    ]
    return [piece.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n") for piece in pieces]


def visible(word: str) -> str:
    """Replace invisible characters and those that change the writing direction by escapes.

    Line breaks and tabs stay, and so do joiners inside words of scripts that need them and inside emoji.

    Example:
        >>> visible("a\\x00b\\u202e") == "a" + chr(92) + "x00b" + chr(92) + "u202e"
        True
    """
    kept = {
        m.start() for m in JOINED.finditer(word) if all(unicodedata.category(char) in JOINABLE for char in m.groups())
    }
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) in INVISIBLE and char not in "\n\t" and i not in kept
        else char
        for i, char in enumerate(word)
    )


@functools.cache
def _bytes() -> dict[str, int]:
    """Map each character of GPT-2's alphabet to its byte: printable bytes are their own characters, the others start at 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
