"""Collectives as equations over lists, and the marks in a trace that say where to place them.

    f, g   = all_gather([a, b], dtype, axis=dp)          shards -> whole values, cast before they are sent
    f, g   = reduce_scatter([a, b], mean, axis=dp)       one term on each rank -> shards of the mean
    f, g   = all_reduce([a, b], mean, axis=dp)           one term on each rank -> the mean, on every rank
    x      = wait(f)                                     a future -> its value
    s      = shard(x, dim, axis=dp)                      whole -> this rank's part; nothing moves
    g      = gradient(g0, w)                             marks g0 as the gradient of w
    y      = pmean(x, axis) | psum(x, axis)              marks a reduction that the user asked for
    s      = accumulate(g) | join(x) | keep(w)           marks values that several micro-batches make up or share

A list is a bucket. The operation itself packs, casts and unpacks its members; a program has no equations for that. Each
collective has a file here, with all of its rules (see `interface`). `rules(eqn)` gives the rules of any equation.
"""

from ..layout import without
from .buckets import bucket_key, coalesce
from .buffers import (
    ALONE,
    DIRECT,
    HALF,
    buffer_bytes,
    is_alone,
    is_small,
    partial_dtype,
    wire_dtype,
)
from .future import WAIT, wait
from .gather import ALL_GATHER, all_gather
from .interface import Rules
from .marks import GRADIENT, PMEAN, PSUM, erase_marks
from .micro_marks import ACCUMULATE, JOIN, KEEP
from .pairing import Pairs, pair
from .reduction import ALL_REDUCE, REDUCE_SCATTER, reduce
from .shard import SHARD
from .start import Start
from .table import PRIMITIVES, STARTS, is_start, lane, role, rules
from .trivial import erase_trivial
