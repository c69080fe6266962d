"""Kernels and collective operations. They import torch, Triton and einops, and do not depend on programs.

The file of an operation has its contract, its reference in plain torch, its kernels, and its registration under
`torch.ops.ztrans`. `marks` has the operations that mark a trace. Operations are built from `kernel`, `operation`,
`move`, `tables` and `symmetric`.
"""

from . import arrived, fused_adamw, hadamard  # register their operations
from .all_gather import all_gather
from .barrier import barrier
from .cast_pack import cast_pack
from .decode import decode, decode_unpack
from .encode import encode, encode_pack
from .marks import EVERY_AXIS, global_mean, gradient, pmax, pmean, pmin, psum, pvary
from .moments import MOMENTS, decoded, narrowed, nearest, widened
from .reduce import HALF, mean, reduce
from .reduce_scatter import reduce_scatter
from .stochastic_round import leaf_keys, rounded, stochastic_round
from .sum_coded import sum_coded
from .sum_terms import sum_terms
from .symmetric import Symmetric
from .tables import filled_after_capture
from .unpack import unpack
