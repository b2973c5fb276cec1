"""Report of checking a wrapper: a table of model by check, as text and for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, field

SIGNS = {"passed": ".", "refused": "r", "FAILED": "F"}
COLOURS = {"passed": "#e6f4ee", "refused": "#fff3cd", "FAILED": "#f8d7da"}


@dataclass(frozen=True)
class Outcome:
    """Outcome of one check on one model.

    Args:
        status: "passed", "refused" or "FAILED".
        message: message of the refusal or of the failure.
    """

    status: str
    message: str = ""


@dataclass
class Report:
    """The outcomes of all checks of a wrapper.

    Args:
        wrapper: description of the wrapper.
        outcomes: outcomes by (model, check).

    Example:
        >>> report = Report("mine", {("mlp", "training"): Outcome("FAILED", "gradient of 0.weight")})
        >>> report.failures
        [('mlp', 'training', 'gradient of 0.weight')]
    """

    wrapper: str
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        """Names of the models, in the order of their checks."""
        return list(dict.fromkeys(model for model, _ in self.outcomes))

    @property
    def checks(self) -> list[str]:
        """Names of the checks."""
        return list(dict.fromkeys(check for _, check in self.outcomes))

    @property
    def failures(self) -> list[tuple[str, str, str]]:
        """(model, check, message) of each failure."""
        return list(self._of("FAILED"))

    @property
    def refusals(self) -> list[tuple[str, str, str]]:
        """(model, check, message) of each refusal."""
        return list(self._of("refused"))

    def _of(self, status: str) -> Iterator[tuple[str, str, str]]:
        for (model, check), outcome in self.outcomes.items():
            if outcome.status == status:
                yield model, check, outcome.message

    def raise_for_failures(self) -> None:
        """Raise an error if a check has failed.

        Raises:
            AssertionError: lists every failing model and check, with its message.
        """
        if self.failures:
            lines = [f"  {model}, {check}: {_brief(message)}" for model, check, message in self.failures]
            raise AssertionError("\n".join([self.summary(), *lines]))

    def summary(self) -> str:
        """Return how many checks passed, were refused and failed, in one line."""
        statuses = [outcome.status for outcome in self.outcomes.values()]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in SIGNS)
        return f"{self.wrapper} on {len(self.models)} models: {counts}"

    def __str__(self) -> str:
        width = max((len(model) for model in self.models), default=0)
        lines = [self.summary()]
        lines += [f"{'':{width}}  {'| ' * number}{check}" for number, check in enumerate(self.checks)]
        for model in self.models:
            row = [self.outcomes.get((model, check)) for check in self.checks]
            lines.append(
                f"{model:{width}}  {' '.join(' ' if one is None else SIGNS[one.status] for one in row)}".rstrip()
            )
        lines.append(". passed, r refused, F FAILED")
        for status in ("FAILED", "refused"):
            lines += [f"{status} {model}, {check}: {_brief(message)}" for model, check, message in self._of(status)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Report({self.summary()})"

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{html.escape(check)}</th>" for check in self.checks)
        rows = []
        for model in self.models:
            cells = "".join(self._cell(self.outcomes.get((model, check))) for check in self.checks)
            rows.append(f"<tr><th>{html.escape(model)}</th>{cells}</tr>")
        caption = f"<caption>{html.escape(self.summary())}</caption>"
        return f"<table>{caption}<thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"

    def _cell(self, outcome: Outcome | None) -> str:
        if outcome is None:
            return "<td></td>"
        style = f"background:{COLOURS[outcome.status]};color:#222"
        return f'<td style="{style}" title="{html.escape(_brief(outcome.message), quote=True)}">{outcome.status}</td>'


def _brief(message: str) -> str:
    """A message in one line."""
    line = " ".join(message.split())
    return line if len(line) <= 300 else f"{line[:299]}…"
