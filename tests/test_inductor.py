"""compile(backend="inductor") computes what the eager backend does, with few kernels."""

import pytest
import torch
from programs import CASES
from torch.utils import _pytree as pytree
from worlds import batches, clone, distance

import ztrans as zt


def both(step, state, data, **lowering) -> tuple:
    """Final state and outputs with either backend."""
    lowered = zt.Step.of(step).lower(state, *data[0], **lowering)
    results = []
    for backend in ("eager", "inductor"):
        compiled, mine, outputs = lowered.compile(backend=backend), clone(state), []
        torch.manual_seed(7)
        for batch in data:
            mine, output = compiled(mine, *batch)
            outputs.append(pytree.tree_map_only(torch.Tensor, torch.clone, output))
        results.append((mine, outputs, compiled))
    return results


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # Inductor's own modules use torch.jit
QUICK = ("mlp_momentum", "adamw_fused", "lstm")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in QUICK)])
def test_steps_compute_what_eager_ones_do(name):
    """To 1e-5 in fp32: a fused sum is made in another order, and a product by another library."""
    case = CASES[name]
    (state, outputs, _), (mine, mines, _) = both(case.step, case.state(), batches(case, 3))
    half = name in ("autocast", "cast_inside", "cast_outside")
    assert distance(mine, state, 1e-3) < (2e-2 if half else 1e-5)
    assert distance(mines, outputs, 1e-3) < (2e-2 if half else 1e-5)
