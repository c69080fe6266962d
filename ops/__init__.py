"""Kernels and collective operations, one per file; they know torch and triton, never graphs.

Each file holds one operation: its contract, its reference in plain torch, its kernels, and its
registration under `torch.ops.ztrans`.
"""

from .gradient import gradient as gradient
from .pack import pack as pack
from .pack import unpack as unpack
from .reduce import reduce as reduce
from .reduce_mark import pmean as pmean
from .reduce_mark import psum as psum
