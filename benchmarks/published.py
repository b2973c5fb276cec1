"""Published scores of the UCI sets, (NLL in nats, RMSE), both in original units; means over splits.

PBP (Hernández-Lobato & Adams 2015), MC dropout (Gal & Ghahramani 2016) and deep ensembles as in table 1 of Lakshminarayanan et al. (2017); MC
dropout 2018 is the grid search in the repository of Mukhoti et al. (2018), with a digit more where
two say nothing. Concrete dropout, NGBoost, DER (Amini et al. 2020) and WGBoost as in
table 1 of Matsubara (2024), not all with these splits or networks.
"""

from __future__ import annotations

ORDER = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine-red", "yacht")
STANDARD = {
    "PBP": ((2.57, 3.01), (3.16, 5.67), (2.04, 1.80), (-0.90, 0.10), (-3.73, 0.01), (2.84, 4.12), (2.97, 4.73), (0.97, 0.64), (1.63, 1.02)),
    "MC dropout 2016": (
        (2.46, 2.97), (3.04, 5.23), (1.99, 1.66), (-0.95, 0.10), (-3.80, 0.01), (2.80, 4.02), (2.89, 4.36), (0.93, 0.62), (1.55, 1.11)
    ),
    "MC dropout 2018": (
        (2.40, 2.90), (2.93, 4.82), (1.21, 0.54), (-1.14, 0.079), (-4.45, 0.0007), (2.80, 4.01), (2.87, 4.27), (0.93, 0.62), (1.25, 0.67)
    ),
    "deep ensembles": (
        (2.41, 3.28), (3.06, 6.03), (1.38, 2.09), (-1.20, 0.09), (-5.63, 0.00), (2.79, 4.11), (2.83, 4.71), (0.94, 0.64), (1.18, 1.58)
    ),
}  # fmt: skip
LATER = {
    "concrete dropout": (
        (2.72, 2.65), (3.51, 4.46), (2.30, 0.46), (-0.65, 0.07), (-5.87, 0.00), (2.75, 3.70), (2.81, 3.85), (1.70, 0.62), (1.75, 0.57)
    ),
    "NGBoost": (
        (2.43, 2.94), (3.04, 5.06), (0.60, 0.46), (-0.49, 0.16), (-5.34, 0.00), (2.79, 3.79), (2.81, 4.33), (0.91, 0.63), (0.20, 0.50)
    ),
    "DER": (
        (2.35, 3.06), (3.01, 5.85), (1.39, 2.06), (-1.24, 0.09), (-5.73, 0.00), (2.81, 4.23), (2.63, 4.64), (0.89, 0.61), (1.03, 1.57)
    ),
    "WGBoost": (
        (2.47, 2.78), (2.83, 4.15), (0.53, 0.42), (-0.44, 0.15), (-5.47, 0.00), (2.60, 3.19), (2.70, 4.09), (0.95, 0.61), (0.16, 0.48)
    ),
}  # fmt: skip


def best(columns: dict[str, tuple[tuple[float, float], ...]], data: str, score: str) -> float:
    """The least published NLL ("nll") or RMSE ("rmse") of a set."""
    return min(values[ORDER.index(data)][("nll", "rmse").index(score)] for values in columns.values())
