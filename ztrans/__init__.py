"""ztrans: composable function transforms of PyTorch train steps."""

from . import ir, testing
from .compiled import Compiled
from .ir.differences import diff
from .ir.graph import Eqn, Graph, Var
from .ir.interpreter import evaluate, lockstep
from .ir.layout import AbstractMesh
from .ir.verifier import ProgramError, check
from .lift.lift import lift
from .lift.lifted_state import restore
from .ops import global_mean, pmean, psum
from .planning.cluster import Cluster, Device, Link, by_host, cluster
from .planning.cost import Cost, Memory
from .planning.plan import Plan
from .planning.timeline import Timeline
from .profiling.calibrate import calibrate
from .profiling.profile import Profile
from .runtime.checkpoints.load import load
from .runtime.checkpoints.save import save
from .runtime.codegen import to_fx
from .runtime.mesh import make_mesh
from .stages import Lowered, Traced
from .step import Step
from .transforms.accumulate import accumulate
from .transforms.base import Transform, chain
from .transforms.delay_weight_grads import delay_weight_grads
from .transforms.fuse_cast_gather import fuse_cast_gather
from .transforms.overlap_grads import overlap_grads
from .transforms.prefetch import prefetch
from .transforms.remat import remat
from .transforms.shard_params import shard_params

__version__ = "0.1.0"

__all__ = [
    "AbstractMesh", "Cluster", "Compiled", "Cost", "Device", "Eqn", "Graph", "Link", "Lowered", "Memory", "Plan",
    "Profile", "ProgramError", "Step", "Timeline", "Traced", "Transform", "Var",
    "accumulate", "by_host", "calibrate", "chain", "check", "cluster", "delay_weight_grads", "diff", "evaluate",
    "fuse_cast_gather", "global_mean", "ir", "lift", "load", "lockstep", "make_mesh", "ops", "overlap_grads", "pmean",
    "prefetch", "psum", "remat", "restore", "save", "shard_params", "testing", "to_fx",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
