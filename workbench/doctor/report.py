"""What `diagnose` gives: findings and verdicts, as objects, as text and as HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .kinds import KINDS, VERDICTS, WRAPPERS

_COLOURS = {"ok": "#009E73", "note": "#0072B2", "slower": "#E69F00", "refused": "#D55E00", "not run": "#888888"}
_WIDTH = 110
_MOST = 4  # places of one kind that are written out


@dataclass(frozen=True)
class Finding:
    """One thing that a wrapper, or who uses it, should know.

    Args:
        kind: what it is, a key of `KINDS`.
        where: path of the module, the name of the class for the model itself.
        line: "file.py:12", "" where there is no line of the user's.
        what: what was seen there.
        means: by wrapper "ok", "note" (works, but read this), "slower" (a pass for each branch), "refused" or "not run".
        remedy: what to do.
        code: the source of the line, "" if there is none.
    """

    kind: str
    where: str
    line: str
    what: str
    means: Mapping[str, str] = field(hash=False)
    remedy: str
    code: str = ""


def finding(
    kind: str,
    where: str = "",
    line: str = "",
    what: str = "",
    code: str = "",
    remedy: str = "",
    means: Mapping[str, str] | None = None,
) -> Finding:
    """A finding with what its kind says where nothing else is given."""
    usual = dict(zip(WRAPPERS, KINDS[kind].means, strict=True))
    return Finding(
        kind, where, line, what, MappingProxyType({**usual, **(means or {})}), remedy or KINDS[kind].remedy, code
    )


@dataclass(frozen=True)
class Diagnosis:
    """What was found in a model before wrapping it; see `diagnose`.

    Args:
        name: of the model.
        findings: what was found, the worst first.
        verdicts: by wrapper, "ok", "note", "slower", "refused" or "not run".
        example: the inputs in words, "" if there were none.
        remarks: what could not be looked at, and why.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)
    verdicts: dict[str, str] = field(default_factory=dict)
    example: str = ""
    remarks: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there is nothing to know: every wrapper was tried and takes the model."""
        return all(verdict == "ok" for verdict in self.verdicts.values())

    def find(self, kind: str) -> list[Finding]:
        """The findings of one kind, see `workbench.doctor.KINDS`."""
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
        return [found for found in self.findings if found.kind == kind]

    # ---- in words
    def headline(self) -> str:
        """The result in one line."""
        given = f" on {self.example}" if self.example else ""
        serious = len({found.kind for found in self.findings if _worst(found) not in ("ok",)})
        refusing = [name for name, verdict in self.verdicts.items() if verdict == "refused"]
        if self.ok:
            return f"{self.name}{given}: {'nothing found, ' if not self.findings else ''}every wrapper takes it."
        count = f"{serious} {'thing' if serious == 1 else 'things'} to know" if serious else "nothing found"
        if len(refusing) == len(WRAPPERS):
            end = "no wrapper takes it"
        elif refusing:
            end = f"{_listed(refusing)} {'refuses' if len(refusing) == 1 else 'refuse'} it"
        elif "not run" in self.verdicts.values():
            end = "wrapping works, no wrapper was run"
        else:
            end = "every wrapper takes it"
        return f"{self.name}{given}: {count}, {end}."

    def _groups(self) -> list[tuple[str, list[Finding]]]:
        """Findings by kind, the worst first."""
        groups: dict[str, list[Finding]] = {}
        for found in self.findings:
            groups.setdefault(found.kind, []).append(found)
        return list(groups.items())

    def _reasons(self, wrapper: str) -> list[int]:
        """Numbers of the groups that mean something to a wrapper."""
        return [
            number
            for number, (_, group) in enumerate(self._groups(), 1)
            if any(found.means[wrapper] != "ok" for found in group)
        ]

    def __str__(self) -> str:
        lines = [self.headline()]
        if not self.ok:
            lines.append("")
            for wrapper, verdict in self.verdicts.items():
                reasons = "" if verdict == "ok" else " ".join(f"[{n}]" for n in self._reasons(wrapper))
                lines.append(f"  {wrapper:8}{verdict:9}{reasons}".rstrip())
        for number, (kind, group) in enumerate(self._groups(), 1):
            if all(_worst(found) == "ok" for found in group):
                continue
            lines += ["", f"[{number}] {_capital(KINDS[kind].title)} ({_meaning(group)})"]
            for place, what in _places(group):
                lines += _wrapped(place, "    ") if place else []
                lines += _wrapped(what, "      " if place else "    ") if what else []
            lines += _wrapped(KINDS[kind].why, "    ")
            lines += _wrapped(f"What to do: {group[0].remedy}.", "    ")
        harmless = [(kind, group) for kind, group in self._groups() if all(_worst(found) == "ok" for found in group)]
        lines += ["", "Also seen, and no wrapper minds:"] if harmless else []
        for kind, group in harmless:
            seen = [f"{found.what} ({found.line})" if found.line else found.what for found in group]
            lines += _wrapped(f"{KINDS[kind].title}: {'; '.join(_some(seen, 'more'))}", "    ")
        if self.remarks:
            lines.append("")
            lines += [line for remark in self.remarks for line in _wrapped(remark, "")]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks; colours of text and background are the theme's own."""
        e = html.escape
        parts = [f"<style>{_STYLE}</style><div class='wb-diagnosis'><p class='wb-head'>{e(self.headline())}</p>"]
        if self.findings or not self.ok:
            cells = "".join(f"<td>{_badge(name, verdict)}</td>" for name, verdict in self.verdicts.items())
            parts.append(f"<table class='wb-verdicts'><tr>{cells}</tr></table>")
        if self.findings:
            head = "".join(f"<th>{name}</th>" for name in WRAPPERS)
            parts.append(f"<table><tr><th>found</th>{head}<th>what it means, and what to do</th></tr>")
            for kind, group in self._groups():
                places = "".join(
                    f"<div><code>{e(place)}</code></div><div>{e(what)}</div>" for place, what in _places(group)
                )
                worst = {name: max((found.means[name] for found in group), key=_rank) for name in WRAPPERS}
                cells = "".join(f"<td>{_badge('', worst[name])}</td>" for name in WRAPPERS)
                parts.append(
                    f"<tr><td><b>{e(_capital(KINDS[kind].title))}</b>{places}</td>{cells}"
                    f"<td>{e(KINDS[kind].why)}<div>{e(_capital(group[0].remedy))}.</div></td></tr>"
                )
            parts.append("</table>")
        parts += [f"<p>{e(remark)}</p>" for remark in self.remarks]
        return "".join([*parts, "</div>"])


_STYLE = """
.wb-diagnosis { color: inherit; background: transparent; max-width: 75em; }
.wb-diagnosis table { color: inherit; background: transparent; border-collapse: collapse; margin: .5em 0; }
.wb-diagnosis tr, .wb-diagnosis td, .wb-diagnosis th { background: transparent; color: inherit; text-align: left;
  vertical-align: top; padding: .3em .7em; border: none; border-bottom: 1px solid rgba(128, 128, 128, .4); }
.wb-diagnosis .wb-verdicts td { border: none; padding-left: 0; }
.wb-diagnosis code { color: inherit; background: rgba(128, 128, 128, .15); padding: 0 .2em; }
.wb-diagnosis .wb-head { font-weight: bold; }
.wb-diagnosis .wb-badge { white-space: nowrap; padding-left: .4em; border-left: .35em solid; }
.wb-diagnosis .wb-badge span { color: inherit; }
""".replace("\n", " ").strip()


def _badge(name: str, verdict: str) -> str:
    label = f"{name}: {verdict}" if name else verdict
    return f"<span class='wb-badge' style='border-left-color: {_COLOURS[verdict]}'>{html.escape(label)}</span>"


def _rank(verdict: str) -> int:
    return VERDICTS.index(verdict) if verdict in VERDICTS else len(VERDICTS)


def _worst(found: Finding) -> str:
    return max(found.means.values(), key=_rank)


def ordered(findings: list[Finding]) -> list[Finding]:
    """The worst first, each once; else in the order of kinds."""
    kinds = list(KINDS)
    once = list({(f.kind, f.where, f.line, f.what): f for f in findings}.values())
    worst = {
        kind: max(_rank(_worst(f)) for f in once if f.kind == kind)
        for kind in kinds
        if any(f.kind == kind for f in once)
    }
    return sorted(once, key=lambda found: (-worst[found.kind], kinds.index(found.kind)))


def _places(group: list[Finding]) -> list[tuple[str, str]]:
    """(where, what) of the findings of a group; those on one line of code together, as in the layers of a stack."""
    merged: dict[tuple[str, str], list[Finding]] = {}
    for number, found in enumerate(group):
        merged.setdefault((found.line or str(number), found.code), []).append(found)
    places = []
    for (_, code), members in merged.items():
        others = len({found.where for found in members}) - 1
        where = members[0].where + (f" and {others} more" if others else "")
        place = f"{members[0].line} in {where}" if members[0].line else where
        if code:
            place += f": {textwrap.shorten(code, 70, placeholder=' ...')}"
        places.append((place, "; ".join(_some(list(dict.fromkeys(found.what for found in members)), "more"))))
    if len(places) > _MOST:
        places = [*places[: _MOST - 1], ("", f"and {len(places) - _MOST + 1} more places")]
    return places


def _some(items: list[str], rest: str) -> list[str]:
    """The first of many."""
    return items if len(items) <= _MOST else [*items[: _MOST - 1], f"and {len(items) - _MOST + 1} {rest}"]


def _meaning(group: list[Finding]) -> str:
    """What a group means, the wrappers by verdict."""
    worst = {name: max((found.means[name] for found in group), key=_rank) for name in WRAPPERS}
    by_verdict = {
        verdict: [name for name in WRAPPERS if worst[name] == verdict] for verdict in _COLOURS if verdict != "ok"
    }
    said = [f"{verdict}: {', '.join(names)}" for verdict, names in reversed(by_verdict.items()) if names]
    return "; ".join(said)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
