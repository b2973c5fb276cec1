"""All models of a comparison in one picture: a row for each, with prediction and risks in columns, and the truth if known."""

from __future__ import annotations

import html
from typing import Any

from workbench import plots

from ..common.pictures import new_figure, svg, themed_figure
from .findings import Findings

NONE_YET = "Train models first: each gets a row here, all on the same scales."


def matrix_figure(findings: Findings, output: Any, options: dict[str, Any]) -> Any:
    """Draw the matrix of the models trained with the current settings whose weights are in this kernel.

    Args:
        findings: findings of the comparison.
        output: what the plain model gives.
        options: options of `plots.matrix`.

    Returns:
        A matplotlib Figure that is not registered with pyplot.

    Raises:
        ValueError: if there is no such model, or `plots.matrix` can't draw the data.
    """
    models = {kept.name: kept.wrapped for kept in findings.present if kept.wrapped is not None}
    if not models:
        read = f"; {', '.join(kept.name for kept in findings.present)} were read from a file, without weights"
        raise ValueError(f"matrix: nothing is trained with the current settings{read if findings.present else ''}")
    default_output = output if output in ("logits", "probs") else "values"
    axes = plots.matrix(models, findings.data, **{"output": default_output, "figure": new_figure, **options})
    return axes.flat[0].figure


def matrix_page(findings: Findings, output: Any) -> str:
    """Draw the matrix as HTML in the colours of the page, or say why it can't be drawn."""
    if not findings.present:
        return f"<p>{NONE_YET}</p>"
    try:
        drawn = _drawn(findings, output)
    except Exception as error:  # a picture that fails must not hide the trained models
        return f"<p>no picture: {html.escape(str(error))}</p>"
    absent = [kept.name for kept in findings.present if kept.wrapped is None]
    note = f"<p>Without {html.escape(', '.join(absent))}, read from a file without weights.</p>" if absent else ""
    return drawn + note


def _drawn(findings: Findings, output: Any) -> str:
    figure = matrix_figure(findings, output, {"figure": themed_figure})
    names = ", ".join(kept.name for kept in findings.present if kept.wrapped is not None)
    return svg(figure, f"prediction and risks of {names} on {findings.data.name}")


__all__ = ["NONE_YET", "matrix_figure", "matrix_page"]
