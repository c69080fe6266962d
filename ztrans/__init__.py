"""ztrans: composable function transforms for training steps, over PyTorch."""

from .compiled import Compiled as Compiled
from .ir.graph import Eqn as Eqn
from .ir.graph import Graph as Graph
from .ir.graph import Var as Var
from .ir.interpreter import evaluate as evaluate
from .ir.interpreter import lockstep as lockstep
from .ir.layout import AbstractMesh as AbstractMesh
from .ir.printer import diff as diff
from .ir.verifier import check as check
from .ops import pmean as pmean
from .ops import psum as psum
from .planning.cluster import Cluster as Cluster
from .planning.cluster import cluster as cluster
from .planning.cost import Cost as Cost
from .planning.cost import Memory as Memory
from .planning.plan import Plan as Plan
from .planning.timeline import Timeline as Timeline
from .profiling.calibrate import calibrate as calibrate
from .profiling.profile import Profile as Profile
from .runtime.codegen import to_fx as to_fx
from .runtime.mesh import make_mesh as make_mesh
from .stages import Lowered as Lowered
from .stages import Traced as Traced
from .step import Step as Step
from .tracing.lifting.lift import lift as lift
from .tracing.lifting.lifted_state import restore as restore
from .transforms.base import Transform as Transform
from .transforms.base import chain as chain
from .transforms.delay_weight_grads import delay_weight_grads as delay_weight_grads
from .transforms.fuse_cast_gather import fuse_cast_gather as fuse_cast_gather
from .transforms.overlap_grads import overlap_grads as overlap_grads
from .transforms.prefetch import prefetch as prefetch
from .transforms.remat import remat as remat
from .transforms.shard_params import shard_params as shard_params

__version__ = "0.1.0"
