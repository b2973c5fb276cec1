"""HTML of generated text whose tokens are coloured by their risk."""

from __future__ import annotations

import json
import math
from html import escape
from typing import Any

import torch
from torch import Tensor

from workbench.plots._common import COLOURS, MODELS, TOTAL_ON_DARK
from workbench.text.pieces import visible

MAX_TOKENS = 5000  # up to which a page includes the alternatives of tokens; with more it shows the text only


def page(generation: Any, kind: str) -> str:
    """Return HTML with one paragraph per sequence, without scripts, and with all generated text escaped.

    It includes the data of `widgets.TokenRisks`, into which reports turn it.
    """
    label, colour, values = kinds(generation)[kind]
    finite = values[values.isfinite()]
    highest = float(finite.max()) if finite.numel() else 0.0
    style = "white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.7; font-family: monospace"
    paragraphs = [
        f'<p dir="auto" style="{style}">{"".join(_tokens(generation, row, colour, values, highest))}</p>'
        for row in range(len(generation.tokens))
    ]
    legend = f"<small>{label} of each token, up to {highest:.3g} nats; hover for probabilities and alternatives</small>"
    data = ""
    if int(generation.lengths.sum()) <= MAX_TOKENS:
        state = json.dumps({"content": content(generation), "kind": kind}, separators=(",", ":"), allow_nan=False)
        # in single quotes, since JSON is full of double ones
        data = f" data-wb-tokens='{escape(state, quote=False).replace(chr(39), '&#x27;')}'"
    return f'<div class="workbench-text tex2jax_ignore mathjax_ignore"{data}>{"".join(paragraphs)}{legend}</div>'


def kinds(generation: Any) -> dict[str, tuple[str, str, Tensor]]:
    """Return the quantities that tokens can be coloured by, name -> (label, colour, values [n, t])."""
    risks = {name: (f"{name} risk", COLOURS[name], generation.risk[name]) for name in generation.risk.names()}
    return {**risks, "-log probability": ("−log probability", MODELS[3][0], -generation.log_probs)}


def content(generation: Any) -> dict[str, Any]:
    """Return texts, risks, alternatives and each member's probabilities for JSON; numbers that are not finite are None."""
    by_name = kinds(generation)
    risks = torch.stack([values for _, _, values in by_name.values()], -1).tolist()
    return {
        "members": len(generation.member_log_probs),
        "kinds": [{"name": name, "label": label, "colour": colour} for name, (label, colour, _) in by_name.items()],
        "totalOnDark": TOTAL_ON_DARK,
        "sequences": [
            {
                "name": _name(generation, row),
                "tokens": [
                    {"risks": [*map(_short, risks[row][i])], **_choices(generation, row, i)} for i in range(int(n))
                ],
            }
            for row, n in enumerate(generation.lengths)
        ],
    }


def _name(generation: Any, row: int) -> str:
    prompt, number = divmod(row, generation.n_return)
    return f"prompt {prompt + 1}" + (f", text {number + 1}" if generation.n_return > 1 else "")


def _choices(generation: Any, row: int, i: int) -> dict[str, Any]:
    """Return the token and its alternatives, with the token put first if it is not among them."""
    token, choices = int(generation.tokens[row, i]), generation.alternatives[row, i].tolist()
    by_member = generation.member_alternative_probs
    probs = generation.alternative_probs[row, i].tolist()
    member_probs: list[list[float]] = [[] for _ in choices] if by_member is None else by_member[:, row, i].T.tolist()
    if token not in choices:
        choices = [token, *choices]
        probs = [math.exp(float(generation.log_probs[row, i])), *probs]
        member_probs = [generation.member_log_probs[:, row, i].exp().tolist(), *member_probs]
    words = _words(generation, generation.tokens.new_tensor(choices))
    written = choices.index(token)
    return {
        "word": _readable(words[written]),
        "choices": [
            [_readable(word), _short(prob), [*map(_short, by_members)]]
            for word, prob, by_members in zip(words, probs, member_probs, strict=True)
        ],
        "written": written,
    }


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _tokens(generation: Any, row: int, colour: str, values: Tensor, highest: float) -> list[str]:
    n = int(generation.lengths[row])
    words = _words(generation, generation.tokens[row, :n])
    spans = []
    for i, word in enumerate(words):
        risk = float(values[row, i])
        # at most so opaque that black letters stay readable on dark grey
        opacity = 0.6 * risk / highest if highest > 0 and math.isfinite(risk) else 0.0
        title = escape(_title(generation, row, i), quote=True).replace("\n", "&#10;")
        background = f"background: {colour}{round(255 * opacity):02x}"
        # visible signs, so that the backgrounds of a line break and of an empty token can be seen
        shown = escape(_readable(word)).replace("\n", "↵\n") or "∅"
        spans.append(f'<span style="{background}" title="{title}">{shown}</span>')
    return spans


def _title(generation: Any, row: int, i: int) -> str:
    risks = ", ".join(f"{name} {float(generation.risk[name][row, i]):.3g}" for name in generation.risk.names())
    alternatives = _words(generation, generation.alternatives[row, i])
    probs = generation.alternative_probs[row, i].tolist()
    lines = [f"{prob:.3f}  {word!r}" for word, prob in zip(alternatives, probs, strict=True)]
    return "\n".join([f"probability {math.exp(float(generation.log_probs[row, i])):.3f}", risks, *lines])


def _readable(word: str) -> str:
    return visible(word.replace("\r\n", "\n"))


def _words(generation: Any, tokens: Any) -> list[str]:
    if generation.words is None:
        return [f" {int(token)}" for token in tokens]
    return generation.words(tokens)
