"""All models of a comparison in one picture: a row each, columns of prediction and risks, and the truth where it is known."""

from __future__ import annotations

import html
from typing import Any

from workbench import plots

from ..common.pictures import new_figure, svg, themed_figure
from .findings import Findings

NONE_YET = "Train models first: this is a row for each, with one scale for all."


def matrix_figure(findings: Findings, output: Any, options: dict[str, Any]) -> Any:
    """The matrix of the models of the present settings whose weights are in this kernel.

    Args:
        findings: of the comparison.
        output: what the plain model gives.
        options: of `plots.matrix`.

    Returns:
        A matplotlib Figure that pyplot knows nothing of.

    Raises:
        ValueError: there is no such model, or the data have no matrix.
    """
    models = {kept.name: kept.wrapped for kept in findings.present if kept.wrapped is not None}
    if not models:
        read = f"; {', '.join(kept.name for kept in findings.present)} were read from a file, without weights"
        raise ValueError(f"matrix: nothing is trained with the present settings{read if findings.present else ''}")
    unsaid = output if output in ("logits", "probs") else "values"
    axes = plots.matrix(models, findings.data, **{"output": unsaid, "figure": new_figure, **options})
    return axes.flat[0].figure


def matrix_page(findings: Findings, output: Any) -> str:
    """The same as HTML, in the colours of the page; what is in the way of it, in words."""
    if not findings.present:
        return f"<p>{NONE_YET}</p>"
    try:
        drawn = _drawn(findings, output)
    except Exception as error:  # the models are there all the same
        return f"<p>no picture: {html.escape(str(error))}</p>"
    absent = [kept.name for kept in findings.present if kept.wrapped is None]
    note = f"<p>Without {html.escape(', '.join(absent))}: read from a file, without weights.</p>" if absent else ""
    return drawn + note


def _drawn(findings: Findings, output: Any) -> str:
    figure = matrix_figure(findings, output, {"figure": themed_figure})
    names = ", ".join(kept.name for kept in findings.present if kept.wrapped is not None)
    return svg(figure, f"prediction and risks of {names} on {findings.data.name}")


__all__ = ["NONE_YET", "matrix_figure", "matrix_page"]
