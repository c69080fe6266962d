"""The program of a train step: a typed, functional, straight-line graph, and the tools to read and rewrite it.

The names below are public. With them a user writes a transform: the data (`Graph`, `Eqn`, `Var`), the layouts
(`Split`, `Partial`), a `Rewriter`, whose `emit` turns a function of PyTorch into equations, a builder for each
collective and copy (`all_gather`, `reduce`, `shard`, `to_host`, `wait`), and functions that read a program.
"""

from .collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SHARD,
    WAIT,
    Start,
    all_gather,
    all_reduce,
    all_to_all,
    is_start,
    lane,
    reduce,
    reduce_scatter,
    role,
    row,
    rows,
    rules,
    shard,
    wait,
)
from .copies import TO_DEVICE, TO_HOST, is_copy, to_device, to_host, wait_for_copy
from .differences import diff
from .emit import emit
from .graph import (
    Eqn,
    Graph,
    Hints,
    Kept,
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
from .marks import ACCUMULATE, GRADIENT, JOIN, KEEP, PMAX, PMEAN, PMIN, PSUM, PVARY
from .micro_batches import MicroBatchPrograms, micro_batch_programs
from .op_facts import is_matmul, is_random, is_view
from .pairing import pair
from .printer import equation, op_name, program
from .rewriter import Rewriter, reordered
from .rules import Rules
from .structure import structure
from .verifier import ProgramError, check
from .wire_format import Coded

__all__ = [
    "ACCUMULATE", "ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "GRADIENT", "JOIN", "KEEP", "PMAX", "PMEAN", "PMIN", "PSUM",
    "PVARY", "REDUCE_SCATTER", "SHARD", "TO_DEVICE", "TO_HOST", "WAIT",
    "Coded", "Eqn", "Graph", "Hints", "Kept", "Layout", "LeafSharding", "MicroBatchPrograms", "Names", "Partial",
    "Primitive", "ProgramError", "Provenance", "Rewriter", "Rules", "Split", "Start", "Var",
    "all_gather", "all_reduce", "all_to_all", "check", "dce", "diff", "emit", "equation", "evaluate", "is_copy",
    "is_matmul", "is_random", "is_start", "is_view", "lane", "lockstep", "micro_batch_programs", "op_name", "pair",
    "producers", "program", "reduce", "reduce_scatter", "rename", "reordered", "role", "row", "rows", "rules", "shard",
    "structure", "substitute", "to_device", "to_host", "users", "variables", "wait", "wait_for_copy",
]  # fmt: skip
