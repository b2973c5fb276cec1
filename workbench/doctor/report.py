"""Report of a diagnosis: findings and verdicts, as objects, as text and as HTML."""

from __future__ import annotations

import html
import re
import textwrap
from dataclasses import dataclass, field

from .described_outputs import DescribedOutput
from .findings import HARMLESS, KINDS, Finding, rank

_COLOURS = {
    "ok": "#009E73",
    "needs settings": "#888888",
    "note": "#0072B2",
    "slower": "#E69F00",
    "refused": "#D55E00",
    "not run": "#888888",
}
_WIDTH = 110
_MAX_LISTED = 4  # places of one kind that are listed
_MAX_OUTPUTS = 12


@dataclass(frozen=True)
class Diagnosis:
    """Findings about a model before wrapping it, and a verdict for each wrapper; see `diagnose`.

    Args:
        name: name of the model.
        findings: what was found, the worst first.
        verdicts: by wrapper, "ok", "note", "slower", "refused", "needs settings" (the default ones don't fit this kind of model or input, which
            is no flaw of the model) or "not run".
        example: description of the inputs, "" if there were none.
        remarks: checks that were not made, and why.
        outputs: the outputs of the model, how each is interpreted, and the lines to write if it means something else.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)
    verdicts: dict[str, str] = field(default_factory=dict)
    example: str = ""
    remarks: list[str] = field(default_factory=list)
    outputs: list[DescribedOutput] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every wrapper was tried and takes the model without a remark, except for those that need settings."""
        return all(verdict in HARMLESS for verdict in self.verdicts.values())

    def find(self, kind: str) -> list[Finding]:
        """Return the findings of one kind, see `workbench.doctor.KINDS`."""
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
        return [finding for finding in self.findings if finding.kind == kind]

    # ---- as text
    def headline(self) -> str:
        """Return the result in one line."""
        subject = f"{self.name} on {self.example}" if self.example else self.name
        if self.ok:
            return f"{subject}: {'' if self.findings else 'nothing found, '}{self._conclusion()}."
        count = len({finding.kind for finding in self.findings if _worst(finding) not in HARMLESS})
        things = f"{count} {'thing' if count == 1 else 'things'} to know" if count else "nothing found"
        return f"{subject}: {things}, {self._conclusion()}."

    def _conclusion(self) -> str:
        """Which wrappers take the model."""
        refusing = [name for name, verdict in self.verdicts.items() if verdict == "refused"]
        if len(refusing) == len(self.verdicts):
            return "no wrapper takes it"
        if refusing:
            return f"{_enumerated(refusing)} {'refuses' if len(refusing) == 1 else 'refuse'} it"
        if "not run" in self.verdicts.values():
            return "wrapping works, no wrapper was run"
        unsettled = [name for name, verdict in self.verdicts.items() if verdict == "needs settings"]
        but = f" ({_enumerated(unsettled)} with settings that fit)" if unsettled else ""
        return f"every wrapper takes it{but}"

    def _groups(self) -> list[tuple[int, str, list[Finding]]]:
        """(number, kind, findings of the kind), the worst first."""
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.kind, []).append(finding)
        return [(number, kind, group) for number, (kind, group) in enumerate(groups.items(), 1)]

    def __str__(self) -> str:
        groups = self._groups()
        lines = [self.headline()]
        if not self.ok:
            lines += ["", *(self._verdict_line(wrapper, groups) for wrapper in self.verdicts)]
        harmless = []
        for number, kind, group in groups:
            if _is_harmless(group):
                harmless += _harmless_lines(kind, group)
            else:
                lines += [
                    "",
                    f"[{number}] {_capitalized(KINDS[kind].title)} ({_meaning(group)})",
                    *_group_lines(kind, group),
                ]
        lines += ["", "Also seen, and no wrapper minds:", *harmless] if harmless else []
        lines += ["", *_output_lines(self.outputs)] if self.outputs else []
        lines += ["", *(line for remark in self.remarks for line in _wrap_text(remark, ""))] if self.remarks else []
        return "\n".join(lines)

    def _verdict_line(self, wrapper: str, groups: list[tuple[int, str, list[Finding]]]) -> str:
        """A line with the verdict on a wrapper, and the numbers of the groups that explain it."""
        verdict = self.verdicts[wrapper]
        numbers = [n for n, _, group in groups if any(finding.means[wrapper] != "ok" for finding in group)]
        reasons = "" if verdict in HARMLESS else " ".join(f"[{n}]" for n in numbers)
        widths = max(map(len, self.verdicts)) + 2, max(map(len, self.verdicts.values())) + 2
        return f"  {wrapper:{widths[0]}}{verdict:{widths[1]}}{reasons}".rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """HTML for notebooks; text and background keep the colours of the theme."""
        e = html.escape
        fragments = [f"<style>{_STYLE}</style><div class='wb-diagnosis'><p class='wb-head'>{e(self.headline())}</p>"]
        if self.findings or not self.ok:
            badges = " ".join(_badge(name, verdict) for name, verdict in self.verdicts.items())
            fragments.append(f"<p class='wb-verdicts'>{badges}</p>")
        if self.findings:
            fragments.append("<table><tr><th>found</th><th>for</th><th>what it means, and what to do</th></tr>")
            for _, kind, group in self._groups():
                places = "".join(
                    f"<div><code>{e(place)}</code></div><div>{e(what)}</div>" for place, what in _places(group)
                )
                badges = "".join(f"<div>{_badge(names, verdict)}</div>" for verdict, names in _by_verdict(group))
                fragments.append(
                    f"<tr><td><b>{e(_capitalized(KINDS[kind].title))}</b>{places}</td><td>{badges or _badge('', 'ok')}</td>"
                    f"<td>{e(KINDS[kind].why)}<div>{e(_capitalized(group[0].remedy))}.</div></td></tr>"
                )
            fragments.append("</table>")
        if self.outputs:
            fragments.append(
                "<table><tr><th>output</th><th>interpreted as</th><th>if it means something else</th></tr>"
            )
            for output in self.outputs[:_MAX_OUTPUTS]:
                code = "".join(f"<div><code>{e(line)}</code></div>" for line in output.lines)
                name = f"<b>{e(output.name)}</b>"
                fragments.append(
                    f"<tr><td>{name} <span class='wb-kind'>{e(output.kind())}</span></td><td>{e(output.taken_for)}</td><td>{code}</td></tr>"
                )
            fragments.append(f"</table>{''.join(f'<p>{e(line)}</p>' for line in _remarks_on(self.outputs))}")
        fragments += [f"<p>{e(remark)}</p>" for remark in self.remarks]
        return "".join([*fragments, "</div>"])


_STYLE = """
.wb-diagnosis { color: inherit; background: transparent; max-width: 75em; }
.wb-diagnosis table { color: inherit; background: transparent; border-collapse: collapse; margin: .5em 0; }
.wb-diagnosis tr, .wb-diagnosis td, .wb-diagnosis th { background: transparent; color: inherit; text-align: left;
  vertical-align: top; padding: .3em .7em; border: none; border-bottom: 1px solid rgba(128, 128, 128, .4); }
.wb-diagnosis .wb-verdicts .wb-badge { display: inline-block; margin: 0 1em .3em 0; }
.wb-diagnosis code { white-space: pre-wrap; color: inherit; background: rgba(128, 128, 128, .15); padding: 0 .2em; }
.wb-diagnosis .wb-head { font-weight: bold; }
.wb-diagnosis .wb-badge { display: inline-block; padding-left: .4em; border-left: .35em solid; }
.wb-diagnosis .wb-kind { white-space: nowrap; }
""".replace("\n", " ").strip()


def _badge(name: str, verdict: str) -> str:
    label = f"{name}: {verdict}" if name else verdict
    return f"<span class='wb-badge' style='border-left-color: {_COLOURS[verdict]}'>{html.escape(label)}</span>"


def _worst(finding: Finding) -> str:
    return max(finding.means.values(), key=rank)


def _worst_meanings(group: list[Finding]) -> dict[str, str]:
    """The worst verdict of a group of findings, by wrapper."""
    return {name: max((finding.means[name] for finding in group), key=rank) for name in group[0].means}


def _is_harmless(group: list[Finding]) -> bool:
    return all(_worst(finding) in HARMLESS for finding in group)


def sort_findings(findings: list[Finding]) -> list[Finding]:
    """Return the findings without repeats, the worst kinds first; kinds that are equally bad in the order of `KINDS`."""
    kinds = list(KINDS)
    unique = list({(f.kind, f.where, f.line, f.what): f for f in findings}.values())
    worst: dict[str, int] = {}
    for finding in unique:
        worst[finding.kind] = max(worst.get(finding.kind, 0), rank(_worst(finding)))
    return sorted(unique, key=lambda finding: (-worst[finding.kind], kinds.index(finding.kind)))


def _group_lines(kind: str, group: list[Finding]) -> list[str]:
    """Places, reason and remedy of the findings of one kind."""
    lines: list[str] = []
    for place, what in _places(group):
        lines += _wrap_text(place, "    ") if place else []
        lines += _wrap_text(what, "      " if place else "    ") if what else []
    lines += _wrap_text(KINDS[kind].why, "    ")
    return lines + _wrap_text(f"What to do: {group[0].remedy}.", "    ")


def _harmless_lines(kind: str, group: list[Finding]) -> list[str]:
    seen = [f"{finding.what} ({finding.line})" if finding.line else finding.what for finding in group]
    return _wrap_text(f"{KINDS[kind].title}: {'; '.join(_abbreviated(seen))}", "    ")


def _places(group: list[Finding]) -> list[tuple[str, str]]:
    """(where, what) of the findings of a group; findings on one line of code, as in a stack of equal layers, are merged."""
    merged: dict[tuple[str, str], list[Finding]] = {}
    for number, finding in enumerate(group):
        merged.setdefault((finding.line or str(number), finding.code), []).append(finding)
    places = []
    for (_, code), members in merged.items():
        others = len({finding.where for finding in members}) - 1
        where = members[0].where + (f" and {others} more" if others else "")
        place = f"{members[0].line} in {where}" if members[0].line else where
        if code:
            place += f": {textwrap.shorten(code, 70, placeholder=' ...')}"
        places.append((place, "; ".join(_abbreviated(list(dict.fromkeys(map(_what, members)))))))
    if len(places) > _MAX_LISTED and group[0].kind != "refused":  # each wrapper has its own reason
        places = [*places[: _MAX_LISTED - 1], ("", f"and {len(places) - _MAX_LISTED + 1} more places")]
    return places


def _what(finding: Finding) -> str:
    """What was found; for a refusal, preceded by the wrappers that refuse unless the text names one."""
    refusing = [name for name, verdict in finding.means.items() if verdict == "refused"]
    if finding.kind != "refused" or any(name in finding.what for name in refusing):
        return finding.what
    return f"{', '.join(refusing)}: {finding.what}"


def _abbreviated(items: list[str]) -> list[str]:
    """The first items of a long list, and how many more there are."""
    if len(items) <= _MAX_LISTED:
        return items
    return [*items[: _MAX_LISTED - 1], f"and {len(items) - _MAX_LISTED + 1} more"]


def _meaning(group: list[Finding]) -> str:
    """The verdicts of a group of findings, each with its wrappers."""
    return "; ".join(f"{verdict}: {names}" for verdict, names in _by_verdict(group))


def _by_verdict(group: list[Finding]) -> list[tuple[str, str]]:
    """(verdict, wrappers that it applies to), the worst first; if it applies to most wrappers, the exceptions are named."""
    worst = _worst_meanings(group)
    lines = []
    for verdict in reversed([verdict for verdict in _COLOURS if verdict not in HARMLESS]):
        names = [name for name in worst if worst[name] == verdict]
        others = [name for name in worst if name not in names]
        if names and not others:
            lines.append((verdict, "every wrapper"))
        elif names:
            short = len(others) <= 2 < len(names)
            lines.append((verdict, f"all but {_enumerated(others)}" if short else ", ".join(names)))
    return lines


# ---- outputs
def _output_lines(outputs: list[DescribedOutput]) -> list[str]:
    """Lines about each output: how it is interpreted, and what to write if it means something else."""
    lines = ["Outputs, how each is interpreted, and what to write if one means something else:"]
    for output in outputs[:_MAX_OUTPUTS]:
        lines.append(f"  {output.name or 'output'}  {output.kind()}: {output.taken_for}")
        lines += [f"      {line}" for line in output.lines]
    return lines + [f"  {line}" for line in _remarks_on(outputs)]


def _remarks_on(outputs: list[DescribedOutput]) -> list[str]:
    more = len(outputs) - _MAX_OUTPUTS
    remarks = [f"and {more} more outputs"] if more > 0 else []
    if len(outputs) > 1:
        remarks.append(
            "Several go into one dict, output={...: ..., ...}; outputs that it does not name are averaged, without a risk."
        )
    classes = sorted(
        {name for output in outputs for line in output.lines for name in re.findall(r"([A-Z]\w+)\(", line)}
    )
    return remarks + ([f"from workbench.outputs import {', '.join(classes)}"] if classes else [])


def _enumerated(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _wrap_text(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
