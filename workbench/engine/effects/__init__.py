"""Effects of a pass beside its output, kept right over all branches.

- `attributes`: which attributes of the modules forward changes; `branch_values`: each branch's own values of them.
- `contents`: what users change in place in the objects that modules hold.
- `inputs`: tensors and objects among the inputs that forward changes.
- `buffers`: merged once over all branches.
- `random`: the random streams of the branches; `private_random`: draws that start at a seed and leave all others alone.
"""
