"""Run any callable under K branches: a branch is a set of replaced tensors and of interventions at call sites.

- `plan`: what differs between the branches: axes, rules for tensors, interventions.
- `run`: one call, from a plan to the outputs of all branches; `combine` and `results` hold these.
- `ladder`: the table of executors, which of them runs a call, and what is tried next where it refuses; `rung` is one try.
- `request`: all that an executor gets to see of the engine.
- `executors/`: the ways to run the branches of a request. A new one is a file there and a row in the ladder's table.
- `clones`, `branch`, `clone`: the copies of the model that branches run on, one pass on a copy, and structural copies as such.
- `sites`: the calls that mix data with parameters. `rank_one`: weights that reach them in factors.
- `effects/`: what a pass does beside its output, kept right over all branches.
- `tree`: inputs and outputs taken apart. `dependence`: which tensors an output depends on.

Nothing here knows a method; everything here imports torch only.
"""
