"""Collectives as equations over lists, and the marks that a trace carries for them.

    f, g   = all_gather([a, b], dtype, axis=dp)          shards -> whole values, cast before the wire
    f, g   = reduce_scatter([a, b], mean, axis=dp)       one term a rank -> shards of the sum
    f, g   = all_reduce([a, b], mean, axis=dp)           one term a rank -> the sum, everywhere
    x      = wait(f)                                     a future -> its value
    s      = shard(x, dim, axis=dp)                      whole -> this rank's part; nothing moves
    g      = gradient(g0, w)                             marks g0 as the gradient of w (from the trace)
    y      = pmean(x, axis) | psum(x, axis)              what the user asked for (from the trace)

A list is a bucket: packing, casting and unpacking belong to the operation, not to the program. Each collective has a
file here, with all of its rules (see `interface`); `rules(eqn)` gives those of any equation.
"""

from ..layout import without
from .buckets import bucket_key, coalesce
from .buffers import ALONE, buffer_bytes, is_alone, wire_dtype
from .future import WAIT, wait
from .gather import ALL_GATHER, all_gather
from .interface import Memberwise, Rules
from .marks import GRADIENT, PMEAN, PSUM, erase_marks
from .pairing import Pairs, Started, Waited, pair
from .reduction import ALL_REDUCE, REDUCE_SCATTER, reduce
from .shard import SHARD
from .start import Start
from .table import PRIMITIVES, STARTS, is_start, lane, rules
from .trivial import erase_trivial
