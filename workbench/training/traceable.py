"""Conditions under which all steps of a training are the same computation, as long as model and criterion are not changed from outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from workbench.core.calls.traceable import Facts, UntraceableError, check_contents, is_plain, torch_now
from workbench.core.outputs.options import form_of
from workbench.core.wrapped import Wrapped
from workbench.distributions.logits import LogitNormal
from workbench.distributions.values import Cauchy, Laplace, Normal
from workbench.methods.sculpt import Sculpt
from workbench.training.default_losses import LossByMeaning, cross_entropy_of_probs

_FUNCTIONS: tuple[Any, ...] = (
    *(None, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.cross_entropy, F.nll_loss, cross_entropy_of_probs),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss),
)
_LOSSES = (
    *(
        nn.MSELoss,
        nn.L1Loss,
        nn.SmoothL1Loss,
        nn.HuberLoss,
        nn.CrossEntropyLoss,
        nn.NLLLoss,
        nn.BCELoss,
        nn.BCEWithLogitsLoss,
    ),
    nn.PoissonNLLLoss,
)
_FAMILIES = (Normal, Laplace, Cauchy)  # distributions whose likelihood does not validate the targets
_CLASS_FAMILIES = (Normal, LogitNormal)  # those of class numbers, which are validated on the CPU only


class StepFacts(Facts):
    """Everything that a training step depends on besides the batch and the values of tensors, and whether it is still the same.

    Args:
        wrapped: the model, in training mode.
        criterion: the criterion it is trained with.

    Raises:
        UntraceableError: the step may depend on something else.
    """

    def __init__(self, wrapped: Wrapped, criterion: Any) -> None:
        _check_criterion(criterion)
        auxiliary = {"criterion": criterion} if isinstance(criterion, nn.Module) else {}
        super().__init__(wrapped, True, auxiliary)
        _check_distributions(wrapped, self.device)
        self._torch = torch_now()
        if any(map(_has_hooks, self.parameters)):
            raise UntraceableError("a parameter has hooks")
        if not is_plain(self._torch, gradients=True):
            raise UntraceableError("torch is in another mode")

    def hold(self) -> bool:
        """Return whether nothing has changed."""
        return (
            super().hold()
            and not any(map(_has_hooks, self.parameters))
            and not any(module._backward_hooks or module._backward_pre_hooks for module in self._modules)
            and all(p.requires_grad for p in self.parameters)
            and not any(p.requires_grad for p in self.frozen)
            and torch_now() == self._torch
        )


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _check_distributions(wrapped: Wrapped, device: torch.device) -> None:
    record = wrapped._workbench
    for method in record.methods:
        if type(method) is not Sculpt:
            continue
        family, form = type(method.distribution), form_of(record.output)
        of_values = family in _FAMILIES and form == "values"
        of_classes = family in _CLASS_FAMILIES and form in ("values", "logits") and device.type != "cpu"
        if not (of_values or of_classes):
            raise UntraceableError(f"the distribution {family.__name__}")


def _check_criterion(criterion: Any) -> None:
    if any(criterion is function for function in _FUNCTIONS):
        return
    if type(criterion) is LossByMeaning and criterion.class_weight is None:
        return
    if type(criterion) in _LOSSES:
        return check_contents("criterion", criterion)
    raise UntraceableError(f"the criterion {getattr(criterion, '__name__', type(criterion).__name__)}")


__all__ = ["StepFacts", "UntraceableError"]
