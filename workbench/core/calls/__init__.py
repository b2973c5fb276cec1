"""Calls of a wrapped object: the plan of a call, and the prediction, risks and loss computed from its branches."""
