"""What can be found in a model: in words, why it matters, what it means for each wrapper, and what to do about it."""

from __future__ import annotations

from typing import NamedTuple

WRAPPERS = ("vote", "sample", "sculpt", "neo")
# from best to worst; "not run" stands outside, for what was not tried
VERDICTS = ("ok", "note", "slower", "refused")


class Kind(NamedTuple):
    """One kind of finding.

    Args:
        title: what it is.
        why: what it does to a wrapped model.
        remedy: what to do.
        means: one verdict for each of `WRAPPERS`; "slower" and "refused" are what is expected, trying the wrappers decides.
    """

    title: str
    why: str
    remedy: str
    means: tuple[str, str, str, str]


_OK = ("ok", "ok", "ok", "ok")
_NOT_RUN = ("not run", "not run", "not run", "not run")
_ALL_REFUSE = ("refused", "refused", "refused", "refused")
_PASSES = ("slower", "slower", "slower", "ok")
_BRANCHES = ("note", "note", "note", "ok")
_EACH = ("note", "note", "note", "note")
_VOTE = ("note", "ok", "ok", "ok")
_ONE_BY_ONE = (
    "One pass for all branches (vmap) is not possible, so each voter, sample or risk head is a pass of its own."
)

KINDS: dict[str, Kind] = {
    "error": Kind(
        "the model raises an error",
        "It is the model's own: wrapped, it raises the same.",
        "call model(...) with these inputs until it runs, then diagnose again",
        _NOT_RUN,
    ),
    "refused": Kind("a wrapper refuses the model", "", "see the message", _OK),
    "lazy": Kind(
        "parameters without a shape yet",
        "What has no values can't be shared or multiplied.",
        "call the model once with real inputs before wrapping it",
        _ALL_REFUSE,
    ),
    "scripted": Kind(
        "scripted code (torch.jit)",
        "Scripted code can't be run with other parameters.",
        "wrap the model before scripting it",
        _ALL_REFUSE,
    ),
    "wrapped": Kind(
        "wrapped already",
        "A method can be on a model once.",
        "wrap the plain model, workbench.unwrap(model), or add other methods",
        _OK,
    ),
    "wrapped_part": Kind(
        "a part is wrapped",
        "Wrappers work on whole models.",
        "put the plain part back (workbench.unwrap) and wrap the whole with compose(...)",
        _ALL_REFUSE,
    ),
    "no_parameters": Kind(
        "no floating-point parameters",
        "There is nothing to wrap.",
        "assign layers to attributes of the module (or keep them in an nn.ModuleList), so that they are registered",
        _ALL_REFUSE,
    ),
    "unregistered": Kind(
        "tensors that are not registered",
        "They are not moved, saved or trained, and all branches share them.",
        "self.register_buffer(name, tensor), or an nn.Parameter (in lists: nn.ParameterList) if it is to be trained",
        _EACH,
    ),
    "grows": Kind(
        "a container grows with every call",
        "Each branch works on a copy; the wrapped model ends as if it had been called once. Memory grows.",
        "keep what has to be kept outside of forward, or keep the last value only",
        _BRANCHES,
    ),
    "state": Kind(
        "forward changes attributes, or objects in them",
        "Each branch works on a copy; the wrapped model ends as if it had been called once, with the first branch's value.",
        "return it, or register a buffer for it if later calls depend on it",
        _BRANCHES,
    ),
    "buffers": Kind(
        "forward writes buffers",
        "Each branch works on a copy, merged once a call; each voter keeps its own.",
        "nothing, if they are running statistics",
        _BRANCHES,
    ),
    "input_write": Kind(
        "forward writes into its inputs",
        f"The caller's tensor changes, with and without a wrapper. {_ONE_BY_ONE}",
        "work on a copy: x = x.clone(), or x = x * 2 instead of x.mul_(2)",
        _PASSES,
    ),
    "global_write": Kind(
        "forward writes what lies outside of the model",
        "It is written once for each branch, the last one's value stays.",
        "return it, or keep it in an attribute of the model",
        _PASSES,
    ),
    "randomness": Kind(
        "random numbers that torch.manual_seed does not control",
        "Seeding torch does not repeat them, and they do not follow the model to its device.",
        "draw with torch functions from torch's global generator",
        _BRANCHES,
    ),
    "random_eval": Kind(
        "random numbers in evaluation mode",
        "Two calls on the same input differ, and the spread of branches contains this noise.",
        "draw only `if self.training`, and pass training=self.training to functions such as F.dropout, unless it is meant",
        _EACH,
    ),
    "control_flow": Kind(
        "control flow depends on values",
        f"Branches may go different ways. {_ONE_BY_ONE}",
        "compute both and choose: torch.where(condition, a, b)",
        _PASSES,
    ),
    "item": Kind(
        "values are taken out of tensors",
        f"Outside of a tensor there is one number, not one for each branch, and no gradient. {_ONE_BY_ONE}",
        "compute with tensors",
        _PASSES,
    ),
    "dynamic_shape": Kind(
        "shapes depend on values",
        f"Each branch may select another number of elements. {_ONE_BY_ONE}",
        "keep the shape: torch.where(mask, a, b), or multiply by the mask",
        _PASSES,
    ),
    "autograd": Kind(
        "derivatives are taken in forward",
        "They are taken in each branch.",
        "torch.func.grad works under vmap; else leave it as it is",
        _PASSES,
    ),
    "checkpoint": Kind(
        "activation checkpointing",
        f"Parts run again in the backward pass, where noise on activations could not be drawn again. {_ONE_BY_ONE}",
        'switch it off if memory allows; sample.Wrapper(where="weights") takes it',
        ("slower", "refused", "slower", "ok"),
    ),
    "vmap": Kind(
        "one pass for all branches is not possible", _ONE_BY_ONE, "rewrite this line if speed matters", _PASSES
    ),
    "compiled": Kind(
        "compiled (torch.compile)",
        "Wrapped, it runs uncompiled.",
        "compile what the wrapper gives: torch.compile(wrapped)",
        _EACH,
    ),
    "batch_mixing": Kind(
        "rows depend on other rows",
        "Rows can't be dealt out to voters in training: each step trains all voters on the whole batch.",
        "nothing, if it is meant (graphs, contrastive models); else reduce over other axes than the first",
        _VOTE,
    ),
    "no_rows": Kind(
        "no row for each row of the input",
        "Rows can't be dealt out to voters in training: each step trains all voters on the whole batch. neo gives a risk to each row of the "
        "output, so it needs rows.",
        "return one row for each row of the input, and reduce outside of the model",
        ("note", "ok", "ok", "refused"),
    ),
    "integer_output": Kind(
        "the output has whole numbers",
        "They have no risk; voters and samples answer with what most of them say.",
        "return the scores, and do argmax, rounding or decoding outside of the wrapped model",
        _ALL_REFUSE,
    ),
    "probabilities": Kind(
        "the output is squashed to probabilities",
        "Its risk would be taken for that of a value, and sculpt's risk head is squashed, too.",
        'return logits and wrap with output="logits", or keep it and wrap with output="probs"',
        _BRANCHES,
    ),
    "non_tensor_output": Kind(
        "a part of the output is no tensor",
        "It is the first branch's. Plain numbers and strings must be equal in all branches.",
        "leave it out of the output (a cache of keys and values: use_cache=False), or return it as a tensor",
        _BRANCHES,
    ),
    "no_gradient": Kind(
        "no gradient reaches a parameter from the output",
        "Nothing can be trained through the wrapped model.",
        "remove torch.no_grad, .detach(), .data or .item() on the way to the output",
        _EACH,
    ),
    "unused": Kind(
        "parameters that no output depends on",
        "Nothing trains them, and voters do not differ by them.",
        "remove them, or find out why their layers do not run or are detached",
        _VOTE,
    ),
    "frozen": Kind(
        "frozen parameters",
        "Voters share them, unless all are frozen.",
        "requires_grad_(True) before wrapping, if voters are to differ there",
        _VOTE,
    ),
    "hooks": Kind(
        "hooks on modules",
        "They run once for each branch, and keep all branches from running in one pass (vmap).",
        "nothing, if they do not count calls; hooks set on the wrapped model run once a call",
        _PASSES,
    ),
    "tied": Kind(
        "tied parameters",
        "They stay tied, in each voter.",
        "nothing",
        _OK,
    ),
}
