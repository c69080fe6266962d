"""The cases of FSDP2's own tests of training, as lifted loops on ranks in lock-step.

`docs/evidence.md` lists all cases by name. The truth is an untouched loop in one process over the whole batch.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from tests.support import equal_loops
from tests.support.equal_loops import adam, loop, model_of, square
from tests.support.worlds import ALL, distance
from ztrans.ir.collectives import is_start

ROWS = 24
WIDTH = 6
STEPS = 2
PAGE = Path(__file__).resolve().parents[2] / "docs/evidence.md"
MESH = zt.AbstractMesh(dp=4)
SHARDED = (zt.shard_params(MESH), *ALL)


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]))


def layers() -> nn.Sequential:
    return nn.Sequential(mlp(WIDTH, 7, WIDTH), mlp(WIDTH, 5, WIDTH), nn.Linear(WIDTH, 3))


def rows(width: int = WIDTH, dtype: torch.dtype = torch.float64) -> list[tuple]:
    """The global batch of each step."""
    values = torch.randn(STEPS, ROWS, width, generator=torch.Generator().manual_seed(1))
    return [(x,) for x in values.to(dtype)]


def tokens(tensors: int = 1) -> list[tuple]:
    return [
        *zip(
            *torch.randint(
                17, (tensors, STEPS, ROWS, 4), generator=torch.Generator().manual_seed(1)
            )
        )
    ]


def trains_equally(
    make, transforms=SHARDED, losses=(square,), data=None, mesh=MESH, **options
) -> zt.stages.Lowered:
    return equal_loops.trains_equally(make, transforms, losses, data or rows(), mesh, **options)


@pytest.fixture
def mesh():
    yield zt.make_mesh("cpu", dp=1)
    torch.distributed.destroy_process_group()


@pytest.fixture
def four():
    """The second of four ranks, whose others do not exist."""
    torch.distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield zt.make_mesh("cpu", dp=4)
    torch.distributed.destroy_process_group()


def test_a_step_without_a_batch():
    trains_equally(
        layers, losses=(lambda model: square(model[2], model[0][0].weight),), data=[()] * STEPS
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, is_largest", [((16, 15, 8), False), ((7, 15, 3), False), ((16, 17, 8), True)]
)
def test_uneven_layers_that_are_cut_along_their_first_or_largest_dim(sizes, is_largest):
    mesh = zt.AbstractMesh(dp=8)
    largest = lambda path, leaf: leaf.shape.index(max(leaf.shape)) if leaf.ndim else 0
    shard = zt.shard_params(mesh, dim=largest if is_largest else None)
    trains_equally(partial(mlp, *sizes), (shard, *ALL), data=rows(sizes[0]), mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"reshard": "always"}, {"reshard": "auto"}, {"reshard": 2}, {"stage": 2}]
)
@pytest.mark.parametrize("transforms", [(), ALL])
def test_layers_that_are_gathered_early_or_late_and_once_or_twice(options, transforms):
    trains_equally(layers, (zt.shard_params(MESH, **options), *transforms))


@pytest.mark.slow
def test_a_state_that_is_cast_after_it_is_sharded(mesh):
    """Leaves are DTensors before and after each call; those of another dtype are traced anew."""
    truth, model = (model_of(layers, torch.float32) for _ in range(2))
    plain = loop(truth.double(), adam(truth))
    optimizer = adam(model)
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    run = zt.chain(zt.shard_params(mesh), *ALL)(step)
    state = run.shard(state)
    run(pytree.tree_map(torch.clone, state), *rows(dtype=torch.float32)[0])
    state = pytree.tree_map(lambda x: x.double() if x.ndim else x, state)
    for batch in rows():
        state, loss = run(state, *batch)
        assert distance(loss, plain(*batch)) <= 1e-9
        assert all(
            isinstance(p, DTensor) and p.dtype is torch.float64 for p in state["params"].values()
        )
    assert (
        distance([p.full_tensor() for p in state["params"].values()], [*truth.parameters()]) <= 1e-9
    )


@pytest.mark.slow
def test_a_step_of_the_module_and_a_step_of_its_first_layer_take_turns():
    trains_equally(layers, losses=(square, lambda model, x: square(model[0], x)))


def test_a_module_that_is_used_twice_in_forward():
    trains_equally(
        layers, losses=(lambda model, x: square(model[2], model[0](x).tanh() + model[0](x)),)
    )


class Head(nn.Module):
    """An embedding of 17 rows, a body and a head, which may be tied, and a body that may be a checkpoint."""

    def __init__(self, is_tied: bool = False, is_checkpoint: bool = False) -> None:
        super().__init__()
        self.embed, self.body, self.norm = (
            nn.Embedding(17, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.RMSNorm(WIDTH),
        )
        self.head, self.is_checkpoint = nn.Linear(WIDTH, 17, bias=False), is_checkpoint
        if is_tied:
            self.head.weight = self.embed.weight

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """What the head reads; the module skips its head."""
        x, body = self.embed(ids), lambda x: self.body(x).tanh()
        return self.norm(
            checkpoint(body, x, use_reentrant=False) if self.is_checkpoint else body(x)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(ids))


def chunked(model: Head, ids: torch.Tensor) -> torch.Tensor:
    """The head runs for some of the tokens at a time, each with a backward of its own, and the body after them."""
    hidden = model.hidden(ids)
    total = torch.zeros(())
    gradients = []
    for chunk, targets in zip(hidden.detach().chunk(2, 1), ids.chunk(2, 1)):
        chunk = chunk.contiguous().requires_grad_()
        loss = F.cross_entropy(model.head(chunk).flatten(0, 1), targets.flatten()) / 2
        loss.backward()
        total = total + loss.detach()
        gradients.append(chunk.grad)
    hidden.backward(torch.cat(gradients, 1))
    return total


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("is_tied, is_checkpoint", [(False, False), (True, False), (False, True)])
def test_a_loss_in_chunks_with_a_backward_for_each(is_tied, is_checkpoint, micro):
    trains_equally(
        partial(Head, is_tied, is_checkpoint),
        (*SHARDED, zt.accumulate(micro)),
        (chunked,),
        tokens(),
    )


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_tied_weights_whose_rows_the_ranks_do_not_divide(is_checkpoint):
    loss_of = lambda model, ids: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    lowered = trains_equally(partial(Head, True, is_checkpoint), losses=(loss_of,), data=tokens())
    assert "params.embed.weight: f64[17@dp,6]" in str(lowered) and "params.head" not in str(lowered)


def test_two_forwards_of_nested_checkpoints_before_one_backward():
    """The loss compares two outputs of one model, as in preference optimization."""

    def loss_of(model, chosen, rejected):
        scores = [
            checkpoint(model, ids, use_reentrant=False).square().sum((1, 2))
            for ids in (chosen, rejected)
        ]
        return -F.logsigmoid(scores[0] - scores[1]).mean()

    trains_equally(partial(Head, is_checkpoint=True), losses=(loss_of,), data=tokens(2))


def test_two_forwards_without_the_head_leave_it_as_it_is():
    loss_of = lambda model, a, b: (model.hidden(a).square() + model.hidden(b).tanh()).mean()
    lowered = trains_equally(Head, losses=(loss_of,), data=tokens(2))
    assert not any(
        e.provenance and "params.head.weight" in e.provenance.paths for e in lowered.graph.eqns
    )


def test_modules_under_autocast_cast_their_inputs():
    """Both ranks have the same rows, so the mean of their gradients in bf16 has the bits of one."""

    def loss_of(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            half = model[1](model[0](x).float())
        assert half.dtype is torch.bfloat16
        return half.float().square().mean()

    data = [(x[:12].repeat(2, 1),) for (x,) in rows(dtype=torch.float32)]
    mesh = zt.AbstractMesh(dp=2)
    trains_equally(
        layers,
        (zt.shard_params(mesh), *ALL),
        (loss_of,),
        data,
        mesh,
        dtype=torch.float32,
        bound=1e-6,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "hosts, stage, keep, width",
    [(1, 2, "whole", 3), (1, 3, "whole", 5), (2, 2, "whole", 5), (2, 3, "shard", 3)],
)
def test_micro_batches_on_hosts_with_checkpoints(hosts, stage, keep, width):
    mesh, axis = (zt.AbstractMesh(host=2, dp=2), "host") if hosts == 2 else (MESH, None)
    make = lambda: nn.Sequential(
        nn.LayerNorm(width, bias=False), mlp(width, 2 * width, width), mlp(width, width, width)
    )
    loss_of = lambda model, x: square(model[2], checkpoint(model[:2], x, use_reentrant=False))
    shard = zt.shard_params(mesh, stage=stage, replicate_axis=axis)
    trains_equally(make, (shard, *ALL, zt.accumulate(3, keep=keep)), (loss_of,), rows(width), mesh)


def test_another_method_than_forward_reads_parameters():
    class Patches(nn.Conv2d):
        def features(self, images):
            return super().forward(images).flatten(2).transpose(1, 2)

    make = lambda: nn.Sequential(Patches(1, 5, 2, stride=2), nn.Linear(5, 3))
    trains_equally(
        make,
        losses=(lambda model, x: square(model[1], model[0].features(x.view(-1, 1, 4, 4))),),
        data=rows(16),
    )


def test_one_rank_sends_nothing_and_has_the_numbers_of_the_loop():
    mesh = zt.AbstractMesh(dp=1)
    lowered = trains_equally(layers, (zt.shard_params(mesh), *ALL), mesh=mesh, bound=1e-14)
    assert not any(map(is_start, lowered.graph.eqns))


def test_an_error_in_forward_leaves_the_next_step_whole(mesh):
    def fails(module, args):
        raise RuntimeError("in forward")

    truth = model_of(layers)
    model = model_of(layers)
    optimizer = adam(model)
    plain = loop(truth, adam(truth))
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    run = zt.chain(zt.shard_params(mesh), *ALL)(step)
    state = run.shard(state)
    hook = model[1].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match=r"^in forward$"):
        run(state, *rows()[0])
    hook.remove()
    for batch in rows():
        state, loss = run(state, *batch)
        assert torch.equal(loss, plain(*batch))


def test_shards_of_an_inner_dim_are_contiguous(four):
    model = model_of(layers)
    optimizer = adam(model)
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    run = zt.chain(zt.shard_params(four, dim=lambda path, leaf: max(leaf.ndim - 1, 0)), *ALL)(step)
    state = run.shard(state)
    state, _ = run(state, *rows()[0])
    assert state["params"]["0.0.weight"].placements == (Shard(1),)
    assert all(
        x.is_contiguous() for leaf in pytree.tree_leaves(state) for x in (leaf, leaf.to_local())
    )


def test_the_table_has_every_case_once_and_every_test():
    """Another test checks that all tests that a page names exist."""
    table = PAGE.read_text().partition("## FSDP2's own tests")[2].partition("\n## ")[0]
    cases = re.findall(
        r"^\| `(test_\w+)` \| ((?:equal|does not apply: ).*?) \|(.*)\|$", table, re.MULTILINE
    )
    assert len(cases) == len({name for name, _, _ in cases}) == 39
    assert all("::" in tests for _, claim, tests in cases if claim.startswith("equal"))
    tests = set(
        re.findall(r"^def (test_(?!the_table)\w+)", Path(__file__).read_text(), re.MULTILINE)
    )
    assert tests == set(re.findall(r"test_fsdp2_cases.py::(\w+)`", table))
