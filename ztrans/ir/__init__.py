"""The program of a train step: a typed, functional, straight-line graph, and the tools to read and rewrite it.

The names below are public. With them a user writes a transform: the data (`Graph`, `Eqn`, `Var`), the layouts
(`Split`, `Partial`), the collectives (`all_gather`, `reduce`, `wait`), and functions that read and rewrite a program.
"""

from .collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SHARD,
    WAIT,
    Start,
    all_gather,
    is_start,
    lane,
    reduce,
    rules,
    wait,
)
from .copies import TO_DEVICE, TO_HOST, is_copy, to_device, to_host, wait_for_copy
from .differences import diff
from .graph import (
    Eqn,
    Graph,
    Hints,
    Layout,
    Names,
    Partial,
    Primitive,
    Provenance,
    Split,
    Var,
    dce,
    producers,
    rename,
    substitute,
    users,
    variables,
)
from .interpreter import evaluate, lockstep
from .layout import LeafSharding
from .marks import ACCUMULATE, GRADIENT, JOIN, KEEP, PMEAN, PSUM
from .micro_batches import MicroBatchPrograms, micro_batch_programs
from .op_facts import is_matmul, is_random, is_view
from .pairing import pair
from .printer import equation, op_name, program
from .rules import Rules
from .structure import structure
from .verifier import ProgramError, check

__all__ = [
    "ACCUMULATE", "ALL_GATHER", "ALL_REDUCE", "GRADIENT", "JOIN", "KEEP", "PMEAN", "PSUM", "REDUCE_SCATTER", "SHARD",
    "TO_DEVICE", "TO_HOST", "WAIT",
    "Eqn", "Graph", "Hints", "Layout", "LeafSharding", "MicroBatchPrograms", "Names", "Partial", "Primitive",
    "ProgramError", "Provenance", "Rules", "Split", "Start", "Var",
    "all_gather", "check", "dce", "diff", "equation", "evaluate", "is_copy", "is_matmul", "is_random", "is_start",
    "is_view", "lane", "lockstep", "micro_batch_programs", "op_name", "pair", "producers", "program", "reduce",
    "rename", "rules", "structure", "substitute", "to_device", "to_host", "users", "variables", "wait",
    "wait_for_copy",
]  # fmt: skip
