"""Meanings of outputs: values, classes, detections, distributions and states, and which output has which."""
