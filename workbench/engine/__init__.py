"""Run any callable under K branches: a branch is a set of replaced tensors and of interventions at call sites.

`plan` says what differs between the branches, `clone` makes the module objects that they run on, `run` picks an executor
(`loop`, `vmapped`) and merges the state afterwards, `state` looks after buffers and attributes, `sites` finds the calls that mix data with
parameters, `tree` takes inputs and outputs apart. Nothing here knows a wrapper; everything here imports torch only.
"""
