"""Kernels and collective operations, one per file. They import torch and triton, and know nothing of programs.

Each file holds one operation: its contract, its reference in plain torch, its kernels, and its
registration under `torch.ops.ztrans`.
"""

from .all_gather import all_gather as all_gather
from .barrier import barrier as barrier
from .cast_pack import cast_pack as cast_pack
from .gradient import gradient as gradient
from .reduce import mean as mean
from .reduce import reduce as reduce
from .reduce_mark import EVERY_AXIS as EVERY_AXIS
from .reduce_mark import global_mean as global_mean
from .reduce_mark import pmean as pmean
from .reduce_mark import psum as psum
from .reduce_scatter import reduce_scatter as reduce_scatter
from .symmetric import Symmetric as Symmetric
from .symmetric import rendezvous as rendezvous
from .tables import filled_after_capture as filled_after_capture
from .unpack import unpack as unpack
