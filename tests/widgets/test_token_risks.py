"""The widget for generated text: its data compared with the generation, and what saved pages contain."""

from __future__ import annotations

import html
import json
import math
import re
from typing import Any

import pytest
from helpers.token_cases import WORDS, hostile

from workbench.text.markup import MAX_TOKENS
from workbench.widgets import TokenRisks

pytest.importorskip("anywidget")


def test_every_token_has_its_risks_and_choices() -> None:
    written = hostile()
    content = TokenRisks(written).widget.content
    json.dumps(content, allow_nan=False)
    assert [kind["name"] for kind in content["kinds"]] == ["aleatoric", "epistemic", "total", "-log probability"]
    first, second = content["sequences"]
    assert (len(first["tokens"]), len(second["tokens"])) == (len(WORDS), 5)
    for row, sequence in enumerate(content["sequences"]):
        for i, token in enumerate(sequence["tokens"]):
            risks = [written.risk[kind["name"]][row, i] for kind in content["kinds"][:3]] + [-written.log_probs[row, i]]
            for told, risk in zip(token["risks"], risks, strict=True):
                assert told == (pytest.approx(float(risk), rel=1e-3) if risk.isfinite() else None)
            ids = written.alternatives[row, i].tolist()
            if i not in ids:
                ids = [i, *ids]
            assert len(token["choices"]) == len(ids)
            assert token["written"] == ids.index(i)
            for number, (_, share, members) in zip(ids, token["choices"], strict=True):
                each = written.member_log_probs[:, row, i].exp().tolist()
                if number != i:
                    at = written.alternatives[row, i].tolist().index(number)
                    each = written.member_alternative_probs[:, row, i, at].tolist()  # type: ignore[index]
                assert members == pytest.approx(each, rel=1e-3)
                if number != i or i != 1 or row:
                    assert share == pytest.approx(sum(each) / 3, rel=1e-3)


def test_what_shows_nothing_or_turns_the_text_is_an_escape() -> None:
    words = [token["word"] for token in TokenRisks(hostile()).widget.content["sequences"][0]["tokens"]]
    assert words[:12] == ["The", " answer", " is", " 42", ".", "\n", "\n", "", " ", "\t", "\\u202egnp", "😀"]
    assert words[12] == WORDS[12]  # which the page never reads as HTML


def test_the_kind_can_be_set_and_no_other() -> None:
    shown = TokenRisks(hostile(), "epistemic")
    assert shown.widget.kind == "epistemic"
    shown.kind = "-log probability"
    assert shown.widget.kind == shown.kind == "-log probability"
    with pytest.raises(ValueError, match="found 'vacuitic'"):
        shown.kind = "vacuitic"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="expected one of aleatoric"):
        TokenRisks(hostile(), "perplexity")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="found str"):
        TokenRisks("a text")  # type: ignore[arg-type]


def test_a_saved_page_holds_what_the_widget_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = TokenRisks(hostile(), "epistemic")
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: sent.append((data, options)))  # type: ignore[arg-type]
    monkeypatch.setattr("workbench.widgets.common.saved._in_ipython", lambda: True)
    shown._ipython_display_()
    (widget, _), (saved, _) = sent
    assert widget["application/vnd.jupyter.widget-view+json"]["model_id"] == shown.widget.model_id
    assert widget["text/plain"] == repr(shown)  # for viewers without widgets
    page = saved["text/html"]
    (held,) = re.findall(r" data-wb-tokens='([^']*)'", page)
    assert json.loads(html.unescape(held)) == {"content": shown.widget.content, "kind": "epistemic"}
    (name,) = set(re.findall(r"wb-saved-\w+", page))
    assert shown.widget.hides == f".{name}{{display:none!important}}"
    assert "<img" not in page
    assert "<script" not in page
    shown.kind = "total"
    assert "total risk of each token" in sent[2][0]["text/html"]
    assert shown._mime_() == ("text/html", shown._written.html("total"))


def test_what_drawing_prints_does_not_come_between_widget_and_saved_page(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: order.append(min(data)))
    monkeypatch.setattr("workbench.widgets.common.saved._in_ipython", lambda: True)
    shown = TokenRisks(hostile())

    def draw() -> str:
        order.append("drawn")
        return "page"

    monkeypatch.setattr(shown._saved, "page", draw)
    shown._ipython_display_()
    assert order == ["drawn", "application/vnd.jupyter.widget-view+json", "text/html"]


def test_grounds_go_up_to_the_highest_finite_number() -> None:
    written = hostile()
    page = written.html("-log probability")
    surprises = -written.log_probs[written.mask]
    highest = float(surprises[surprises.isfinite()].max())
    assert f"up to {highest:.3g} nats" in page
    opacities = [int(two, 16) / 255 for two in re.findall(r"background: #[0-9A-F]{6}([0-9a-f]{2})", page)]
    expected = [0.6 * value / highest if value < math.inf else 0.0 for value in surprises.tolist()]
    assert opacities == pytest.approx(expected, abs=1 / 255)


def test_pages_of_many_tokens_hold_the_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_TOKENS >= 1000
    monkeypatch.setattr("workbench.text.markup.MAX_TOKENS", 10)
    page = hostile().html()
    assert "data-wb-tokens" not in page
    assert page.count('" title="') == len(WORDS) + 5


def test_one_member_disagrees_with_nobody() -> None:
    content = TokenRisks(hostile(members=1)).widget.content
    assert content["members"] == 1
    assert all(len(choice[2]) == 1 for choice in content["sequences"][0]["tokens"][0]["choices"])
