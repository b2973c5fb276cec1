"""Conformal intervals by the package darts on given forecasts, for comparison in the `drift` benchmark."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import require


def intervals(prediction: Tensor, target: Tensor, every: int, coverage: float, scores: int) -> tuple[Tensor, Tensor]:
    """Return symmetric intervals by darts' `ConformalNaiveModel` for each step of the horizon.

    Args:
        prediction, target: forecasts made `every` steps apart, and the true values [times, steps].
        every: steps between forecasts, at most `steps`.
        coverage: desired coverage of the intervals.
        scores: number of latest forecasts whose errors are used.

    Returns:
        (lower, upper) [times, steps]; infinite where there are too few scores yet.
    """
    darts, models = require("darts"), require("darts.models")
    steps = prediction.shape[1]
    values = torch.cat([target[:-1, :every].flatten(), target[-1]]).double().numpy()
    whole = darts.TimeSeries.from_values(values)
    times = whole.time_index
    forecasts = [
        darts.TimeSeries.from_times_and_values(times[i * every : i * every + steps], row)
        for i, row in enumerate(prediction.double().numpy())
    ]

    class Fixed(models.GlobalNaiveSeasonal):  # type: ignore[misc, name-defined]
        """A model that returns the given forecasts."""

        def historical_forecasts(self, *args: Any, **kwargs: Any) -> Any:
            return [forecasts]

    fixed = Fixed(input_chunk_length=steps, output_chunk_length=steps)
    fixed.fit(whole)
    quantiles = [(1 - coverage) / 2, 0.5, (1 + coverage) / 2]
    model = models.ConformalNaiveModel(fixed, quantiles, cal_length=scores, cal_stride=every)
    answers = model.historical_forecasts(
        whole,
        forecast_horizon=steps,
        stride=every,
        last_points_only=False,
        predict_likelihood_parameters=True,
        verbose=False,
    )
    ends = np.full((len(prediction), steps, 2), np.inf)
    ends[..., 0] = -np.inf
    for answer in answers:
        ends[int(answer.start_time()) // every] = answer.values()[:, [0, -1]]
    lower, upper = torch.tensor(ends).to(prediction).unbind(-1)
    return lower, upper
