"""Executors: ways to run the branches of a request, from fast to universal.

- `vmap`: all branches in one pass; `rescue` and `autocast` make more models work under it.
- `replay`: one pass per branch, in which the shared trunk is computed once.
- `loop`: one pass per branch, for every model.
- `traced`: inside `torch.compile`; `graph_break` leaves its graph.

An executor is a function of a `Request` that returns one result per branch, or raises if it cannot give the right result. It is added by
a row in `dispatch.EXECUTORS`.
"""
