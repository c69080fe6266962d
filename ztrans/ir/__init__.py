"""The program of a train step: a typed, functional, straight-line graph, and the tools to read and rewrite it.

The names below are public. With them a user writes a transform: the data (`Graph`, `Eqn`, `Var`), the layouts
(`Split`, `Partial`), the collectives (`all_gather`, `reduce`, `wait`), and functions that read and rewrite a program.
"""

from .collectives import (
    ACCUMULATE,
    ALL_GATHER,
    ALL_REDUCE,
    GRADIENT,
    JOIN,
    KEEP,
    PMEAN,
    PSUM,
    REDUCE_SCATTER,
    SHARD,
    WAIT,
    Rules,
    Start,
    all_gather,
    is_start,
    lane,
    pair,
    reduce,
    rules,
    wait,
)
from .graph import (
    Eqn,
    Graph,
    Layout,
    Names,
    Order,
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
from .micro_batches import Parts, parts
from .op_facts import is_matmul, is_random, is_view
from .printer import diff, equation, op_name, program
from .verifier import ProgramError, check

__all__ = [
    "ACCUMULATE", "ALL_GATHER", "ALL_REDUCE", "GRADIENT", "JOIN", "KEEP", "PMEAN", "PSUM", "REDUCE_SCATTER", "SHARD",
    "WAIT",
    "Eqn", "Graph", "Layout", "Names", "Order", "Partial", "Parts", "Primitive", "ProgramError",
    "Provenance", "Rules", "Split", "Start", "Var",
    "all_gather", "check", "dce", "diff", "equation", "is_matmul", "is_random", "is_start", "is_view", "lane",
    "op_name", "pair", "parts", "producers", "program", "reduce", "rename", "rules", "substitute", "users",
    "variables", "wait",
]  # fmt: skip
