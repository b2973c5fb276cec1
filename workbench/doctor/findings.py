"""Findings about a model: the kinds there are, why each matters, what it means for each wrapper, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from ..introspect.locations import NOWHERE, Location

WRAPPERS = ("vote", "sample", "sculpt", "neo")
# from best to worst; "not run" stands outside, for what was not tried
VERDICTS = ("ok", "note", "slower", "refused")


class FindingKind(NamedTuple):
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


_ALL_OK = ("ok", "ok", "ok", "ok")
_NOT_RUN = ("not run", "not run", "not run", "not run")
_REFUSED_BY_ALL = ("refused", "refused", "refused", "refused")
_SLOWER_BUT_NEO = ("slower", "slower", "slower", "ok")
_NOTE_BUT_NEO = ("note", "note", "note", "ok")
_NOTE_FOR_ALL = ("note", "note", "note", "note")
_NOTE_FOR_VOTE = ("note", "ok", "ok", "ok")
_ONE_BY_ONE = (
    "One pass for all branches (vmap) is not possible, so each voter, sample or risk head is a pass of its own."
)

KINDS: dict[str, FindingKind] = {
    "error": FindingKind(
        "the model raises an error",
        "It is the model's own: wrapped, it raises the same.",
        "call model(...) with these inputs until it runs, then diagnose again",
        _NOT_RUN,
    ),
    "refused": FindingKind("a wrapper refuses the model", "", "see the message", _ALL_OK),
    "lazy": FindingKind(
        "parameters without a shape yet",
        "What has no values can't be shared or multiplied.",
        "call the model once with real inputs before wrapping it",
        _REFUSED_BY_ALL,
    ),
    "scripted": FindingKind(
        "scripted code (torch.jit)",
        "Scripted code can't be run with other parameters.",
        "wrap the model before scripting it",
        _REFUSED_BY_ALL,
    ),
    "wrapped": FindingKind(
        "wrapped already",
        "A method can be on a model once.",
        "wrap the plain model, workbench.unwrap(model), or add other methods",
        _ALL_OK,
    ),
    "wrapped_part": FindingKind(
        "a part is wrapped",
        "Wrappers work on whole models.",
        "put the plain part back (workbench.unwrap) and wrap the whole with compose(...)",
        _REFUSED_BY_ALL,
    ),
    "no_parameters": FindingKind(
        "no floating-point parameters",
        "There is nothing to wrap.",
        "assign layers to attributes of the module (or keep them in an nn.ModuleList), so that they are registered",
        _REFUSED_BY_ALL,
    ),
    "unregistered": FindingKind(
        "tensors that are not registered",
        "They are not moved, saved or trained, and all branches share them.",
        "self.register_buffer(name, tensor), or an nn.Parameter (in lists: nn.ParameterList) if it is to be trained",
        _NOTE_FOR_ALL,
    ),
    "grows": FindingKind(
        "a container grows with every call",
        "Each branch works on a copy; the wrapped model ends as if it had been called once. Memory grows.",
        "keep what has to be kept outside of forward, or keep the last value only",
        _NOTE_BUT_NEO,
    ),
    "state": FindingKind(
        "forward changes attributes, or objects in them",
        "Each branch works on a copy; the wrapped model ends as if it had been called once, with the first branch's value.",
        "return it, or register a buffer for it if later calls depend on it",
        _NOTE_BUT_NEO,
    ),
    "buffers": FindingKind(
        "forward writes buffers",
        "Each branch works on a copy, merged once a call; each voter keeps its own.",
        "nothing, if they are running statistics",
        _NOTE_BUT_NEO,
    ),
    "input_write": FindingKind(
        "forward writes into its inputs",
        f"The caller's tensor changes, with and without a wrapper. {_ONE_BY_ONE}",
        "work on a copy: x = x.clone(), or x = x * 2 instead of x.mul_(2)",
        _SLOWER_BUT_NEO,
    ),
    "global_write": FindingKind(
        "forward writes what lies outside of the model",
        "It is written once for each branch, the last one's value stays.",
        "return it, or keep it in an attribute of the model",
        _SLOWER_BUT_NEO,
    ),
    "randomness": FindingKind(
        "random numbers that torch.manual_seed does not control",
        "Seeding torch does not repeat them, and they do not follow the model to its device.",
        "draw with torch functions from torch's global generator",
        _NOTE_BUT_NEO,
    ),
    "random_eval": FindingKind(
        "random numbers in evaluation mode",
        "Two calls on the same input differ, and the spread of branches contains this noise.",
        "draw only `if self.training`, and pass training=self.training to functions such as F.dropout, unless it is meant",
        _NOTE_FOR_ALL,
    ),
    "control_flow": FindingKind(
        "control flow depends on values",
        f"Branches may go different ways. {_ONE_BY_ONE}",
        "compute both and choose: torch.where(condition, a, b)",
        _SLOWER_BUT_NEO,
    ),
    "item": FindingKind(
        "values are taken out of tensors",
        f"Outside of a tensor there is one number, not one for each branch, and no gradient. {_ONE_BY_ONE}",
        "compute with tensors",
        _SLOWER_BUT_NEO,
    ),
    "dynamic_shape": FindingKind(
        "shapes depend on values",
        f"Each branch may select another number of elements. {_ONE_BY_ONE}",
        "keep the shape: torch.where(mask, a, b), or multiply by the mask",
        _SLOWER_BUT_NEO,
    ),
    "autograd": FindingKind(
        "derivatives are taken in forward",
        "They are taken in each branch.",
        "torch.func.grad works under vmap; else leave it as it is",
        _SLOWER_BUT_NEO,
    ),
    "checkpoint": FindingKind(
        "activation checkpointing",
        f"Parts run again in the backward pass, where noise on activations could not be drawn again. {_ONE_BY_ONE}",
        'switch it off if memory allows; sample.Wrapper(where="weights") takes it',
        ("slower", "refused", "slower", "ok"),
    ),
    "vmap": FindingKind(
        "one pass for all branches is not possible", _ONE_BY_ONE, "rewrite this line if speed matters", _SLOWER_BUT_NEO
    ),
    "compiled": FindingKind(
        "compiled (torch.compile)",
        "Wrapped, it runs uncompiled.",
        "compile what the wrapper gives: torch.compile(wrapped)",
        _NOTE_FOR_ALL,
    ),
    "batch_mixing": FindingKind(
        "rows depend on other rows",
        "Rows can't be dealt out to voters in training: each step trains all voters on the whole batch.",
        "nothing, if it is meant (graphs, contrastive models); else reduce over other axes than the first",
        _NOTE_FOR_VOTE,
    ),
    "no_rows": FindingKind(
        "no row for each row of the input",
        "Rows can't be dealt out to voters in training: each step trains all voters on the whole batch. neo gives a risk to each row of the "
        "output, so it needs rows.",
        "return one row for each row of the input, and reduce outside of the model",
        ("note", "ok", "ok", "refused"),
    ),
    "integer_output": FindingKind(
        "the output has whole numbers",
        "They have no risk; voters and samples answer with what most of them say.",
        "return the scores, and do argmax, rounding or decoding outside of the wrapped model",
        _REFUSED_BY_ALL,
    ),
    "probabilities": FindingKind(
        "the output is squashed to probabilities",
        "Its risk would be taken for that of a value, and sculpt's risk head is squashed, too.",
        'return logits and wrap with output="logits", or keep it and wrap with output="probs"',
        _NOTE_BUT_NEO,
    ),
    "non_tensor_output": FindingKind(
        "a part of the output is no tensor",
        "It is the first branch's. Plain numbers and strings must be equal in all branches.",
        "leave it out of the output (a cache of keys and values: use_cache=False), or return it as a tensor",
        _NOTE_BUT_NEO,
    ),
    "no_gradient": FindingKind(
        "no gradient reaches a parameter from the output",
        "Nothing can be trained through the wrapped model.",
        "remove torch.no_grad, .detach(), .data or .item() on the way to the output",
        _NOTE_FOR_ALL,
    ),
    "unused": FindingKind(
        "parameters that no output depends on",
        "Nothing trains them, and voters do not differ by them.",
        "remove them, or find out why their layers do not run or are detached",
        _NOTE_FOR_VOTE,
    ),
    "frozen": FindingKind(
        "frozen parameters",
        "Voters share them; where all that would vote is frozen, vote refuses.",
        "requires_grad_(True) before wrapping, if voters are to differ there",
        _NOTE_FOR_VOTE,
    ),
    "hooks": FindingKind(
        "hooks on modules",
        "They run once for each branch, and keep all branches from running in one pass (vmap).",
        "nothing, if they do not count calls; hooks set on the wrapped model run once a call",
        _SLOWER_BUT_NEO,
    ),
    "tied": FindingKind(
        "tied parameters",
        "They stay tied, in each voter.",
        "nothing",
        _ALL_OK,
    ),
}


@dataclass(frozen=True)
class Finding:
    """One thing that a wrapper, or who uses it, should know.

    Args:
        kind: what it is, a key of `KINDS`.
        where: path of the module, the name of the class for the model itself.
        line: "file.py:12", "" where there is no line of the user's.
        what: what was seen there.
        means: by wrapper "ok", "note" (works, but read this), "slower" (a pass for each branch), "refused" or "not run".
        remedy: what to do.
        code: the source of the line, "" if there is none.
    """

    kind: str
    where: str
    line: str
    what: str
    means: Mapping[str, str] = field(hash=False)
    remedy: str
    code: str = ""


def make_finding(
    kind: str,
    where: str,
    what: str = "",
    location: Location = NOWHERE,
    remedy: str = "",
    means: Mapping[str, str] | None = None,
) -> Finding:
    """A finding with what its kind says where nothing else is given.

    Args:
        kind, what: see `Finding`.
        where: path of the module or name of the model, where the location has no path.
        location: the line of the user's.
        remedy, means: in place of those of the kind; wrappers that are left out of `means` keep theirs.
    """
    usual = dict(zip(WRAPPERS, KINDS[kind].means, strict=True))
    return Finding(
        kind,
        location.path or where,
        location.line,
        what,
        MappingProxyType({**usual, **(means or {})}),
        remedy or KINDS[kind].remedy,
        location.code,
    )
