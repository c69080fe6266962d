"""`remat`: backward computes cheap values again; no bit changes, and the peak falls."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.cover import parameters_of
from tests.support.programs import CASES, gpt_adam
from tests.support.worlds import ALL, on_ranks, sharded
from ztrans.ir.op_facts import is_random
from ztrans.ir.printer import op_name

EVERY = zt.remat(at_least=0)
SHARD = zt.shard_params(zt.AbstractMesh(dp=2))


def loss(params, x, y):
    h = F.layer_norm(x @ params["in"], (16,), params["scale"], params["shift"])
    return (F.gelu(h @ params["up"]) @ params["down"] - y).square().mean()


def step(state, batch):
    grads, value = grad_and_value(loss)(state, *batch)
    return {k: p - 0.1 * grads[k] for k, p in state.items()}, value


def lower(*transforms):
    shapes = {"in": (8, 16), "scale": (16,), "shift": (16,), "up": (16, 32), "down": (32, 4)}
    state = {k: torch.zeros(*shape) for k, shape in shapes.items()}
    return zt.chain(*transforms)(step).lower(state, (torch.zeros(4, 8), torch.zeros(4, 4)))


def test_the_difference_prints(golden):
    assert zt.ir.diff(lower(), lower(EVERY)) == golden


def recomputed(graph) -> list[str]:
    return [v.name for e in graph.eqns for v in e.outs if v is not None and ".again" in v.name]


def test_small_values_are_not_recomputed():
    assert recomputed(lower(EVERY).graph)
    assert not recomputed(lower(zt.remat()).graph), "all of them are smaller than 64 KiB"


@pytest.mark.slow
@pytest.mark.parametrize("name", parameters_of(sorted(CASES)))
def test_no_bit_changes_and_the_peak_does_not_rise(name):
    """No matmul, attention, convolution, lookup or random draw is repeated."""
    before, outputs, a = sharded(CASES[name], 2, steps=2, transforms=())
    after, remat_outputs, b = sharded(CASES[name], 2, steps=2, transforms=(EVERY,))
    assert all(
        torch.equal(x, y)
        for x, y in zip(
            pytree.tree_leaves((before, outputs)), pytree.tree_leaves((after, remat_outputs))
        )
    )
    assert b.memory_analysis().peak <= a.memory_analysis().peak
    for op in {e.op for e in a.graph.eqns if is_random(e) or _is_dear(e)}:
        assert sum(e.op is op for e in a.graph.eqns) == sum(e.op is op for e in b.graph.eqns), op


def _is_dear(eqn) -> bool:
    return any(word in str(eqn.op) for word in ("mm", "attention", "conv", "embedding"))


@pytest.mark.slow
def test_remat_lowers_the_peak_of_a_gpt():
    """In each block it recomputes gelu, both norms, and the reordered result of attention."""
    case = gpt_adam(layers=2)
    kept, remat = (on_ranks(case, 2, SHARD, *more, *ALL) for more in ((), (EVERY,)))
    repeated = Counter(
        op_name(e.op) for e in remat.graph.eqns if any(v and ".again" in v.name for v in e.outs)
    )
    assert (repeated["gelu"], repeated["native_layer_norm"]) == (2, 5) and set(repeated) == {
        "gelu",
        "native_layer_norm",
        "view",
    }
    assert remat.memory_analysis().peak < 0.8 * kept.memory_analysis().peak


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_adam", "autocast"])
def test_remat_may_be_anywhere_in_a_chain(name):
    case = CASES[name]
    chain = [SHARD, *ALL]
    orders = [[*chain[:k], EVERY, *chain[k:]] for k in range(len(chain) + 1)]
    orders.append([SHARD, *ALL[::-1], EVERY])
    assert len({str(on_ranks(case, 2, *order)) for order in orders}) == 1


@pytest.mark.parametrize("size", [-1, 1.5, True, "64k"])
def test_wrong_sizes_are_refused(size):
    with pytest.raises(ValueError) as caught:
        zt.remat(at_least=size)
    assert str(caught.value) == f"remat: at_least={size!r}; it is a number of bytes."
