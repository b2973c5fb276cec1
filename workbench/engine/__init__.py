"""Run a callable under K branches, each with its own replaced tensors and interventions.

Terms:

- branch: one forward pass of the model with some of its tensors replaced and with interventions (noise, taps) at call sites.
- axis: one direction along which branches differ, such as the voters of a vote. K is the product of the axis sizes.
- slot: the dotted name of a parameter or buffer of the model, such as "encoder.weight", whose tensor a branch may replace.
- trunk: the part of the model before the first tensor that differs between branches; it is the same for all of them.
- dealt rows: each row of the batch is answered by one branch along an axis only, instead of by all of them.
- executor: a way to run the branches; it gives the right result or refuses.

Modules:

- `plan`: what differs between the branches: axes, rules for tensors, interventions.
- `run`: one call, from a plan to the outputs of all branches; `combine` and `results` hold the outputs.
- `dispatch`: the table of executors, which one runs a call, and which is tried next if it refuses; `attempts`: one attempt.
- `request`: everything an executor sees of the engine.
- `executors/`: the ways to run the branches of a request. A new one is a file there and a row in that table.
- `clones`, `branch`, `branch_pass`, `clone`: the copies of the model that branches run on, one of them, a pass on it, and structural copies.
- `sites`: the calls that mix data with parameters. `rank_one`: weights kept as rank-one factors.
- `effects/`: side effects of a pass, kept consistent over all branches.
- `tree`: flattening of inputs and outputs. `dependence`: which tensors an output depends on.

The engine knows no method and imports torch only.
"""
