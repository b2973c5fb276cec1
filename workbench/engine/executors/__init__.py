"""Executors: ways to run the branches of a request, from fast to universal.

- `vmap`: all in one pass; `rescue` and `autocast` let more models run under it.
- `replay`: one pass a branch, on one computation of the trunk that they share.
- `loop`: one pass a branch, for every model.
- `traced`: inside `torch.compile`; `graph_break` is the way out of its graph.

An executor is a function of a `Request` that returns one result a branch, or raises where it cannot be right; a row in `ladder.RUNGS` puts
it on the ladder.
"""
