"""HTML of a text whose tokens are coloured by their risk."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from workbench.text.pieces import visible

# as in the figures of workbench.plots
COLOURS = {"total": "68, 68, 68", "aleatoric": "0, 114, 178", "epistemic": "213, 94, 0"}


def page(generation: Any, kind: str) -> str:
    """One paragraph for each sequence; nothing in it runs, and everything that a model wrote is escaped."""
    values = generation.risk[kind]
    highest = float(values.nan_to_num(0.0).max()) if values.numel() else 0.0
    paragraphs = [
        f'<p style="white-space: pre-wrap; line-height: 1.7; font-family: monospace">{"".join(_tokens(generation, kind, row, highest))}</p>'
        for row in range(len(generation.tokens))
    ]
    legend = (
        f"<small>{kind} risk of each token, up to {highest:.2f} nats; hover for probabilities and alternatives</small>"
    )
    return f'<div class="workbench-text tex2jax_ignore mathjax_ignore">{"".join(paragraphs)}{legend}</div>'


def _tokens(generation: Any, kind: str, row: int, highest: float) -> list[str]:
    n = int(generation.lengths[row])
    words = _words(generation, generation.tokens[row, :n])
    spans = []
    for i, word in enumerate(words):
        risk = float(generation.risk[kind][row, i])
        opacity = 0.75 * risk / highest if highest > 0 and math.isfinite(risk) else 0.0
        title = escape(_title(generation, row, i), quote=True).replace("\n", "&#10;")
        ground = f"background: rgba({COLOURS[kind]}, {opacity:.3f})"
        spans.append(f'<span style="{ground}" title="{title}">{_shown(word)}</span>')
    return spans


def _title(generation: Any, row: int, i: int) -> str:
    risks = ", ".join(f"{name} {float(generation.risk[name][row, i]):.3f}" for name in generation.risk.names())
    others = _words(generation, generation.alternatives[row, i])
    shares = generation.alternative_probs[row, i].tolist()
    lines = [f"{share:.3f}  {word!r}" for word, share in zip(others, shares, strict=True)]
    return "\n".join([f"probability {math.exp(float(generation.log_probs[row, i])):.3f}", risks, *lines])


def _shown(word: str) -> str:
    # so that the ground of a line break can be seen
    return escape(visible(word.replace("\r\n", "\n"))).replace("\n", "↵\n")


def _words(generation: Any, tokens: Any) -> list[str]:
    if generation.words is None:
        return [f" {int(token)}" for token in tokens]
    return generation.words(tokens)
