"""Side effects of a pass, kept consistent over all branches.

- `attributes`: attributes of modules that forward changes; `branch_values`: each branch's own values of them; `attribute_losses`: loss terms
  among them.
- `contents`: objects held by modules, which users may change in place between calls.
- `parameters`: parameters that forward writes into.
- `inputs`: tensors and objects among the inputs that forward changes; `written`: tensors; `containers`: lists, dicts and dataclasses.
- `outside`: tensors outside the model, put back if a pass fails.
- `buffers`: merged once over all branches.
- `random`: the random streams of the branches; `private_random`: seeded draws that leave all other random streams untouched.
"""
