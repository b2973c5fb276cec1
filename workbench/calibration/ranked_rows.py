"""The risk by which rows are ranked, and the rows of highest risk."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from workbench.calibration.answers import RISKS, log_probabilities, risk_named
from workbench.calibration.collection import collect
from workbench.calibration.models import check_model, output_of
from workbench.distributions.base import wide_dtype
from workbench.errors import as_count
from workbench.risk import Risk


class TopUncertain(NamedTuple):
    """Row numbers (int64 [k]) and risks [k], highest first."""

    indices: Tensor
    values: Tensor


def position_risk(y: Tensor, risk: Risk, by: str, output: str) -> Tensor:
    """Return the risk as the model gives it, [rows] or [rows, ...]; for by="confidence" 1 - the highest class probability (y: classes last)."""
    if by != "confidence":
        return risk_named(risk, by)
    if y.dim() < 2 or y.shape[-1] < 2:  # of one column, each row would be sure
        raise ValueError(f"by='confidence' takes class scores [rows, classes], but the model gives {list(y.shape)}")
    return 1 - log_probabilities(y, output).amax(-1).exp()


def row_risk(y: Tensor, risk: Risk, by: str, output: str) -> Tensor:
    """Return one risk per row [rows]: the root mean square over outputs and positions."""
    chosen = position_risk(y, risk, by, output)
    if chosen.dim() == 1:
        return chosen
    if by == "vacuitic":
        raise ValueError(
            f"by='vacuitic': the model gives one number per position, {['rows', *chosen.shape[1:]]}; they are negative for usual inputs, so "
            "that their mean square does not rank rows. Wrap with neo.Wrapper(per='image') for one number per row, or use "
            "selective(..., per='position')"
        )
    # in float64: squares of tiny or huge risks leave the range of float32
    return chosen.flatten(1).to(wide_dtype(chosen)).square().mean(1).sqrt().to(chosen.dtype)


def check_by(by: str, per: str = "row") -> None:
    if not isinstance(by, str) or by not in (*RISKS, "confidence"):
        raise ValueError(f"by must be one of {', '.join(RISKS)}, or 'confidence' for classes; found {by!r}")
    if not isinstance(per, str) or per not in ("row", "position"):
        raise ValueError(f"per must be 'row' or 'position'; found {per!r}")


def check_confidence(wrapped: Any) -> None:
    """Raise ValueError unless the output of a model was said to be scores of classes: values, or probabilities without a name, look alike."""
    check_model(wrapped)
    if output_of(wrapped) == "values":
        raise ValueError(
            "by='confidence' is 1 - the highest class probability, but the output of the model is not said to be classes: wrap with "
            "output='logits' or output='probs' if it is; for values use by='total'"
        )


def top_uncertain(
    wrapped: Any, data: Any, k: int, by: str = "epistemic", *, batch_size: int = 1024, seed: int = 0
) -> TopUncertain:
    """Return the k rows of highest risk, such as those to label next or to inspect.

    Args:
        wrapped: a model wrapped by one of the wrappers, or a calibrated model.
        data: inputs, a tensor [n, ...] or batches of it, or pairs (x, y) in any form that `selective` takes; targets are ignored. A
            DataLoader must keep the order of its rows, since rows are identified by their number.
        k: number of rows, from 1 to n.
        by: the risk to sort by, as for `selective`.
        batch_size: rows per call of the model.
        seed: seed of the model's random draws; the global random state is not touched.

    Returns:
        (indices, values): row numbers int64 [k] and risks [k], highest first; rows of equal risk keep their order.

    Raises:
        ValueError: k is out of range, the DataLoader shuffles, the model does not measure this risk, or by is "confidence" and the output is
            not said to be classes.

    Example:
        >>> from workbench import vote
        >>> wrapped = vote.Wrapper(3)(nn.Linear(1, 1, bias=False))
        >>> top_uncertain(wrapped, torch.tensor([[0.0], [3.0], [-5.0]]), k=2).indices
        tensor([2, 1])
    """
    check_by(by)
    if by == "confidence":
        check_confidence(wrapped)
    if isinstance(data, DataLoader) and not _keeps_order(data):
        raise ValueError(
            "the DataLoader shuffles its rows, so that row numbers would be meaningless; use shuffle=False"
            if not isinstance(data.dataset, IterableDataset)
            else f"{data.num_workers} workers read the {type(data.dataset).__name__}, so that row numbers would be meaningless; use "
            "num_workers=0"
        )
    k = as_count("k", k)  # their number may not be known yet
    answers = collect(
        wrapped,
        data,
        risk=by != "confidence",
        targets=False,
        batch_size=batch_size,
        seed=seed,
        check=lambda answers: row_risk(answers.y, answers.risk, by, output_of(wrapped)),
    )
    risk = row_risk(answers.y, answers.risk, by, output_of(wrapped))
    if k > len(risk):
        raise ValueError(f"k must be a whole number from 1 to {len(risk)}, the number of rows; found {k!r}")
    values, indices = risk.sort(descending=True, stable=True)
    return TopUncertain(indices[:k], values[:k])


def _keeps_order(loader: DataLoader) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        return loader.num_workers < 2  # several workers each iterate over all of it, or take turns
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    return type(sampler) is SequentialSampler and (batches is None or type(batches) is BatchSampler)
