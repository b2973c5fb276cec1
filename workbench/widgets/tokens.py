"""Generated texts with tokens coloured by a risk, and the alternatives of each token with their probabilities by voter."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

from workbench.errors import require
from workbench.text import Generation
from workbench.text.markup import content, kinds
from workbench.widgets.common.saved import SavedOutput

Kind = Literal["total", "aleatoric", "epistemic", "-log probability"]
MODULE = Path(__file__).parent / "static" / "tokens.js"


@cache
def _widget() -> Any:
    """Return the widget class; made on first use, as it needs anywidget."""
    base: Any = require("anywidget").AnyWidget
    t = require("traitlets")

    class Tokens(base):
        _esm = MODULE.read_text(encoding="utf-8")
        content = t.Dict().tag(sync=True)
        kind, hides = (t.Unicode().tag(sync=True) for _ in range(2))

    return Tokens


class TokenRisks:
    """Texts of a language model with each token coloured by its risk; hover, touch or focus shows the alternatives.

    Each alternative has its mean probability and that of each voter or sample, which shows where they disagree. Arrow keys move between
    tokens; Enter keeps the alternatives open. A saved notebook shows the texts without the widget; a report shows the widget, without a kernel.

    Args:
        written: result of `workbench.text.generate`.
        kind: what to colour by: "total", "aleatoric" or "epistemic" risk, or "-log probability" of the token; can be changed in the widget.

    Raises:
        ModuleNotFoundError: if anywidget is not installed.
        TypeError: if `written` is not a `Generation`.
        ValueError: if there is no such risk.

    Example:
        >>> import pytest; transformers = pytest.importorskip("transformers"); _ = pytest.importorskip("anywidget")
        >>> from workbench import text, vote
        >>> from workbench.outputs import Logits
        >>> config = transformers.GPT2Config(vocab_size=20, n_layer=1, n_head=2, n_embd=8, bos_token_id=1, eos_token_id=None)
        >>> model = vote.Wrapper(3, output={"logits": Logits(dim=-1)})(transformers.GPT2LMHeadModel(config)).eval()
        >>> shown = TokenRisks(text.generate(model, [[1, 2, 3]], max_new_tokens=5), "epistemic")
        >>> shown
        TokenRisks(Generation(1 sequence, up to 5 tokens, 3 members), 'epistemic')
        >>> shown.kind = "-log probability"
    """

    def __init__(self, written: Generation, kind: Kind = "total") -> None:
        if not isinstance(written, Generation):
            raise TypeError(f"written: expected the result of workbench.text.generate, found {type(written).__name__}")
        self._written = written
        self._check(kind)
        self._saved = SavedOutput(lambda: written.html(self.kind), lambda: self.kind, repr(written))
        #: The anywidget widget.
        self.widget = _widget()(content=content(written), kind=kind, hides=self._saved.style)
        self.widget.observe(lambda _: self._saved.update(), "kind")

    @property
    def kind(self) -> Kind:
        """What tokens are coloured by; can be set."""
        chosen: Kind = self.widget.kind
        return chosen

    @kind.setter
    def kind(self, kind: Kind) -> None:
        self._check(kind)
        self.widget.kind = kind

    def _check(self, kind: str) -> None:
        if kind not in (known := kinds(self._written)):
            raise ValueError(f"kind: expected one of {', '.join(known)}, found {kind!r}")

    def _ipython_display_(self) -> None:
        self._saved.display(self.widget, repr(self))

    def _mime_(self) -> tuple[str, str]:
        """Return the texts as HTML for marimo, which shows no ipywidgets."""
        return "text/html", self._written.html(self.kind)

    def __repr__(self) -> str:
        return f"TokenRisks({self._written!r}, {self.kind!r})"


__all__ = ["MODULE", "TokenRisks"]
