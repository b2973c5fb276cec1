"""Display of single tokens: bytes of UTF-8, line breaks and invisible characters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workbench.risk import Risk
from workbench.text import Generation
from workbench.text.pieces import visible, words_of


def byte_level() -> Any:
    """GPT-2's kind of tokenizer, trained here."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=alphabet, special_tokens=["<|end of text|>"], show_progress=False
    )
    inner.train_from_iterator(["schön schön schön"], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end of text|>")


def test_bytes_are_read_as_text_and_parts_of_a_character_as_escapes() -> None:
    tokenizer = byte_level()
    words = words_of(tokenizer, tokenizer(" schön schön\n😀")["input_ids"])
    assert words == [" schön", " schön", "\n", "\\xf0", "\\x9f", "\\x98", "\\x80"]
    assert words_of(tokenizer, [tokenizer.eos_token_id]) == ["<|end of text|>"]
    assert words_of(tokenizer, [len(tokenizer) + 2]) == [f"<unknown id {len(tokenizer) + 2}>"]
    every = words_of(tokenizer, range(len(tokenizer)))
    assert not any("Ã" in word or "Ġ" in word for word in every)


def test_pieces_of_other_tokenizers() -> None:
    pieces = ["▁Hello", "<0x0A>", "<0xC3>", "Ã©", "##ing", "</s>"]
    plain = SimpleNamespace(convert_ids_to_tokens=lambda ids: [pieces[i] for i in ids])
    assert words_of(plain, range(6)) == [" Hello", "\n", "\\xc3", "Ã©", "##ing", "</s>"]


def test_what_shows_nothing_stands_as_an_escape() -> None:
    assert visible("é 漢 😀\n\t") == "é 漢 😀\n\t"
    assert visible("\x00\r\x1b\u202e\u200b\ud800") == r"\x00\r\x1b\u202e\u200b\ud800"


def test_joiners_stay_between_what_they_join() -> None:
    for whole in ("می\u200cخواهم", "क्\u200dष", "👩\u200d👩\u200d👧", "❤\ufe0f\u200d🔥", "👩🏽\u200d🚀"):
        assert visible(whole) == whole
    for hidden in ("pass\u200dword", "\u200dम", "می\u200c", "می\u200c\u200cخ", "1\u200c2", " \u200c "):
        assert visible(hidden) == hidden.replace("\u200c", r"\u200c").replace("\u200d", r"\u200d")


def test_html_of_odd_tokens() -> None:
    odd = ["\n", "\r\n", "<img src=x onerror=alert(1)>", "\"&'", "\u202egnp", "😀", "", " "]
    n = len(odd)
    numbers = torch.linspace(0, 1, n)[None]
    written = Generation(
        sequences=torch.arange(n)[None],
        tokens=torch.arange(n)[None],
        mask=torch.ones(1, n, dtype=torch.bool),
        log_probs=-numbers,
        member_log_probs=-numbers[None],
        risk=Risk(total=numbers, aleatoric=numbers, epistemic=0 * numbers),
        alternatives=torch.arange(n)[None, :, None],
        alternative_probs=numbers[..., None],
        words=lambda tokens: [odd[i] for i in tokens.tolist()],
    )
    html = written.html()
    shown = [part.split(">", 1)[1].split("</span>")[0] for part in html.split("<span ")[1:]]
    assert shown[:2] == ["↵\n", "↵\n"]  # whose risk is seen
    assert shown[2:] == [
        "&lt;img src=x onerror=alert(1)&gt;",
        "&quot;&amp;&#x27;",
        "\\u202egnp",
        "😀",
        "∅",
        " ",
    ]
    assert html.count("<") == 2 * n + 6  # spans, one paragraph, the frame and the legend
    assert "\u202e" not in html
