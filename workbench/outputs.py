"""Meanings of model outputs, for the option `output=` of every wrapper."""

from .core.outputs.class_scores import Binary, Logits, Probs
from .core.outputs.meanings import Detections, Mean, Meaning, State, Values

__all__ = ["Binary", "Detections", "Logits", "Mean", "Meaning", "Probs", "State", "Values"]
