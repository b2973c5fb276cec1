"""What the outputs of a model mean, for the option `output=` of every wrapper."""

from .core.outputs import Binary, Detections, Logits, Mean, Meaning, Probs, State, Values

__all__ = ["Binary", "Detections", "Logits", "Mean", "Meaning", "Probs", "State", "Values"]
