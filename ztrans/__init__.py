"""Composable function transforms of PyTorch train steps."""

from . import ir, stages, testing
from .eager_step import eager
from .ir.layout import AbstractMesh
from .ir.registered_rules import sharding_rule
from .lift.lift import lift
from .lift.lifted_state import write_back
from .local_steps import local_steps, nesterov
from .ops import global_mean, pmax, pmean, pmin, psum, pvary
from .planning.cluster import Cluster, Device, Link, by_host, cluster
from .planning.plan import Plan
from .profiling.calibrate import calibrate
from .profiling.profile import Profile
from .profiling.tuning import Tuning
from .report.timeline import Timeline
from .runtime.checkpoints.export import export
from .runtime.checkpoints.extras import GlobalRng
from .runtime.checkpoints.load import load
from .runtime.checkpoints.load_weights import load_weights
from .runtime.checkpoints.save import last_checkpoint, save
from .runtime.mesh import make_mesh
from .runtime.stop import request_stop, stop_on
from .runtime.stream_weights import stream_weights
from .search.search import search
from .step import Step
from .transforms.accumulate import accumulate
from .transforms.base import Transform, chain
from .transforms.delay_weight_grads import delay_weight_grads
from .transforms.ema import ema
from .transforms.fuse_cast_gather import fuse_cast_gather
from .transforms.offload import offload
from .transforms.overlap_grads import overlap_grads
from .transforms.owned_updates import owned_updates
from .transforms.prefetch import prefetch
from .transforms.quantize_gathers import quantize_gathers
from .transforms.quantize_grads import quantize_grads
from .transforms.remat import remat
from .transforms.shard_params import shard_params
from .transforms.store import store
from .transforms.tile import tile
from .weights import state_dict

__version__ = "0.1.0"

__all__ = [
    "AbstractMesh", "Cluster", "Device", "GlobalRng", "Link", "Plan", "Profile", "Step", "Timeline", "Transform",
    "Tuning", "accumulate", "by_host", "calibrate", "chain", "cluster", "delay_weight_grads", "eager", "ema", "export",
    "fuse_cast_gather", "global_mean", "ir", "last_checkpoint", "lift", "load", "load_weights", "local_steps",
    "make_mesh", "nesterov", "offload", "ops", "overlap_grads", "owned_updates", "pmax", "pmean", "pmin", "prefetch",
    "psum", "pvary", "quantize_gathers", "quantize_grads", "remat", "request_stop", "save", "search", "shard_params",
    "sharding_rule", "stages", "state_dict", "stop_on", "store", "stream_weights", "testing", "tile", "write_back",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
