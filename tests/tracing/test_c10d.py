"""In-place collectives of torch.distributed in a step become functional ones, or are refused with the user's line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad_and_value
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.in_place import CALLS, own
from tests.support.worlds import distance
from ztrans.runtime.contract import update_hash

HERE = Path(__file__).name
# torch 2.13 deprecates some of them in favour of new names.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning")


@pytest.fixture
def mesh():
    """A mesh of two ranks, of which this process is the first. Its collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


A, B = own(0), own(1)
ROWS = [torch.cat([A[i : i + 2], B[i : i + 2]]) for i in (0, 2)]
# The results of each call on the two ranks, computed by hand.
WANTED = {
    "all_reduce": [(A + B) * 2] * 2,
    "maximum_of_a_view": [torch.cat([x[:1], torch.maximum(A, B)[1:]]) for x in (A, B)],
    "not_waited_for_at_once": [A + B + 3] * 2,
    "broadcast": [B] * 2,
    "all_gather": [[A, B]] * 2,
    "all_gather_of_a_scalar": [[A.sum(), B.sum()]] * 2,
    "all_gather_into_tensor": [torch.cat([A, B])] * 2,
    "all_gather_stacked": [torch.stack([A, B])] * 2,
    "all_to_all_single": [2 * rows for rows in ROWS],
    "reduce_scatter_tensor": [*(A + B).chunk(2)],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_in_place_collectives_become_functional(mesh, name):
    """Also on a view and on a list of outputs, and with an explicit wait in the step."""
    step = zt.shard_params(mesh, stage=0, outputs="local")(lambda s, x: (s, CALLS[name](x.clone())))
    lowered = step.lower(torch.zeros(1), A)
    assert not any(e.op._schema.is_mutable for e in zt.ir.check(lowered.graph).eqns)
    _, outputs = lowered.lockstep(torch.zeros(1), [(A,), (B,)])
    assert pytree.tree_structure(outputs[0]) == pytree.tree_structure(WANTED[name][0])
    assert all(map(torch.equal, pytree.tree_leaves(outputs), pytree.tree_leaves(WANTED[name])))


def test_a_second_wait_returns_the_same_tensor(mesh):
    """What is computed from one of them is not written over the other."""

    def step(state, x):
        total = funcol.all_reduce(state["w"], "sum", mesh)
        doubled = funcol.wait_tensor(total) * 2
        return {"w": state["w"] + x}, (total + doubled, doubled)

    w = torch.arange(4.0)
    outputs = zt.Step.of(step)({"w": w.clone()}, torch.ones(4))[1]
    assert torch.equal(outputs[0], 3 * w) and torch.equal(outputs[1], 2 * w)


def test_a_collective_of_a_constant_does_not_run_in_a_trace(mesh):
    """Its value is unknown. PyTorch would send it, and wait for ranks that may not trace a program now."""

    def step(state, x, reads):
        total = torch.tensor(float(len(x)))
        dist.all_reduce(total)
        return {"n": state["n"] + (float(total) if reads else total)}, x.sum()

    shard, state = zt.shard_params(mesh), {"n": torch.zeros(())}
    lowered = shard(step).lower(state, torch.zeros(2), False)
    assert lowered.lockstep(state, [(torch.zeros(2), False)] * 2)[0] == {"n": 4.0}
    with pytest.raises(
        ValueError, match=r"reads a tensor's value while it is traced(?s:.)*test_c10d.py:\d+"
    ):
        shard(step).lower(state, torch.zeros(2), True)
    programs = [
        update_hash(shard(step).lower(state, torch.zeros(n), False).unordered) for n in (1, 2)
    ]
    assert programs[0] == programs[1], "the sizes of two batches may differ"


@pytest.mark.parametrize("stage", range(4))
def test_a_step_may_reduce_its_gradients_over_the_sharded_axis_itself(mesh, stage):
    """Its all_reduce takes whole gradients, also where the update has only shards of them."""

    def step(state, x, by_hand=True):
        grads, value = grad_and_value(lambda p: torch.tanh(x @ p["w"]).square().mean())(state)
        for g in grads.values() if by_hand else ():
            dist.all_reduce(g)
            g /= 2
        return {k: p - 0.1 * grads[k] for k, p in state.items()}, value

    state, x = {"w": torch.randn(6, 3)}, torch.cat([A, B])
    lowered = zt.chain(zt.shard_params(mesh, stage=stage), zt.overlap_grads())(step).lower(state, A)
    new, _ = lowered.lockstep(state, [(A,), (B,)])
    assert distance(new, step(state, x, by_hand=False)[0]) < 1e-6


REFUSED = {
    "send": lambda x: dist.send(x, 1),
    "recv": lambda x: dist.recv(x, 1),
    "send, not waited for": lambda x: dist.isend(x, 1),
    "recv, not waited for": lambda x: dist.irecv(x, 1).wait(),
    "send in a batch": lambda x: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)]),
    "isend": lambda x: torch.ops._c10d_functional.isend(x, 1, 0, "dp"),
    "reduce": lambda x: dist.reduce(x, 0),
    "gather": lambda x: dist.gather(x, [torch.empty_like(x) for _ in range(2)]),
    "scatter": lambda x: dist.scatter(torch.empty_like(x), [x, x]),
    "barrier": lambda x: dist.barrier(),
    "allreduce": lambda x: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0)),
    "allgather": lambda x: dist.all_gather([x, torch.empty(3)], x),
    "reduce_scatter": lambda x: dist.reduce_scatter(x[:2], list(x.chunk(2))),
    "alltoall": lambda x: dist.all_to_all(list(x.chunk(2)), list(x.chunk(2))),
}  # fmt: skip
if not hasattr(torch.ops._c10d_functional, "isend"):
    del REFUSED["isend"]  # this torch does not have it yet


@pytest.mark.parametrize("name", REFUSED)
def test_a_collective_without_a_functional_form_is_refused_at_its_line(mesh, name):
    with pytest.raises(
        ValueError,
        match=rf"trace: step calls torch.distributed's {name.split()[0].strip(',')}, which a program",
    ) as e:
        zt.Step.of(lambda s, x: (s, (REFUSED[name](x.clone()), x)[1])).trace(torch.zeros(1), A)
    number = next(
        n
        for n, row in enumerate(Path(__file__).read_text().splitlines(), 1)
        if f'"{name}": lambda' in row
    )
    assert f"{HERE}:{number} " in str(e.value)
    assert "Use all_reduce, all_gather, all_gather_into_tensor, reduce_scatter_tensor" in str(
        e.value
    )


def test_a_collective_of_objects_is_refused(mesh):
    with pytest.raises(ValueError, match="which does not run on tensors without values") as e:
        zt.Step.of(lambda s, x: (dist.all_gather_object([None, None], 3), (s, x))[1]).trace(
            torch.zeros(1), A
        )
    assert HERE in str(e.value)
