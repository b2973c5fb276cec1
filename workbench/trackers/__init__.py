"""Experiment trackers that log the results of trainings, sweeps and reports: TensorBoard, MLflow, Weights & Biases.

`fit`, `experiments.grid`, `experiments.run_cells`, `run_notebook` and `notebook.run_grid` take ``log_to=``: "tensorboard", "mlflow" or "wandb",
or an object: an instance of one of these classes, or of any class that follows `Tracker`.

Example:
    >>> import torch
    >>> from workbench import compose, fit
    >>> class Printed:
    ...     def begin(self, name, settings, group="", resume=None):
    ...         print(name, settings["epochs"])
    ...     def log(self, values, step=None):
    ...         print(step, sorted(values))
    ...     def end(self, status):
    ...         print(status)
    >>> x = torch.linspace(0, 1, 40)[:, None]
    >>> _ = fit(compose()(torch.nn.Linear(1, 1)), (x, x), epochs=2, progress=False, log_to=Printed())
    Linear[] 2
    1 ['loss', 'lr', 'validation_loss']
    2 ['loss', 'lr', 'validation_loss']
    None ['best_epoch', 'best_loss', 'best_validation_loss', 'seconds']
    finished
"""

from __future__ import annotations

from workbench.trackers.base import Tracker
from workbench.trackers.mlflow import MLflow
from workbench.trackers.tensorboard import TensorBoard
from workbench.trackers.wandb import WandB

__all__ = ["MLflow", "TensorBoard", "Tracker", "WandB"]
