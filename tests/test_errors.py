"""Errors of users: the exception, the transform, the leaf, the user's line, and the advice in the text."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.func import grad_and_value, vmap

import ztrans as zt
from tests.support.programs import CASES, sgd
from tests.support.worlds import batches, slices
from ztrans.runtime.mesh import _chosen_device
from ztrans.tracing.fx_trace import check_torch

HERE = Path(__file__).name


def loss(params, x, y):
    return (x @ params["w"] - y).square().mean()


STATE = {"params": {"w": torch.ones(4, 2)}, "m": torch.zeros(4, 2)}
BATCH = (torch.ones(3, 4), torch.ones(3, 2))


def lower(step, *transforms, state=None, batch=BATCH, **options):
    shard = zt.shard_params(zt.AbstractMesh(dp=2), **options)
    return zt.chain(shard, *transforms)(step).lower(state or STATE, batch)


def line(function: str, marker: str) -> str:
    """`test_errors.py:<line>` of the first line after `def function` that contains `marker`."""
    text = Path(__file__).read_text().splitlines()
    start = next(i for i, row in enumerate(text) if row.strip().startswith(f"def {function}("))
    number = next(i for i, row in enumerate(text[start:], start + 1) if marker in row)
    return f"{HERE}:{number}"


# ---- at import


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "3.0.0+cu130"])
def test_an_unsupported_torch_is_refused(version):
    with pytest.raises(RuntimeError) as e:
        check_torch(version)
    assert str(e.value) == (
        f"ztrans: this is torch {version}, and ztrans uses private APIs of torch>=2.11,<2.15.\n"
        f"Install such a torch, pip install 'torch>=2.11,<2.15', or a release of ztrans for torch {version}."
    )


# ---- while tracing


def test_reading_a_value_is_refused():
    def reads_item(state, batch):
        _, value = grad_and_value(loss)(state["params"], *batch)
        print(value.item())
        return state, value

    with pytest.raises(
        ValueError, match="trace: reads_item reads a tensor's value while it is traced"
    ) as e:
        lower(reads_item)
    assert line("reads_item", ".item()") in str(e.value)
    assert "torch.where" in str(e.value)


def test_branching_on_a_value_is_refused():
    def branches(state, batch):
        _, value = grad_and_value(loss)(state["params"], *batch)
        if value > 0:
            return state, -value
        return state, value

    with pytest.raises(ValueError, match="reads a tensor's value") as e:
        lower(branches)
    assert line("branches", "if value > 0") in str(e.value)


def test_a_shape_that_depends_on_values_is_refused():
    def selects(state, batch):
        return state, batch[0][batch[0] > 0].sum()

    with pytest.raises(ValueError, match="takes a shape from a tensor's values") as e:
        lower(selects)
    assert line("selects", "> 0]") in str(e.value)


def test_generators_and_seeds_are_refused():
    def generates(state, batch):
        return state, torch.rand(3, generator=torch.Generator()).sum()

    def seeds(state, batch):
        torch.manual_seed(1234)
        return state, batch[0].sum()

    with pytest.raises(ValueError, match=r"generates uses a torch\.Generator") as e:
        lower(generates)
    assert line("generates", "torch.Generator") in str(e.value)
    with pytest.raises(
        ValueError, match=r"seeds seeds torch's default generator or sets its state"
    ) as e:
        lower(seeds)
    assert line("seeds", "torch.manual_seed") in str(e.value)


def test_an_operation_without_results_is_left_out_with_a_warning():
    def asserts(state, batch):
        torch._assert_async((batch[0] > 0).all())
        return state, batch[0].sum()

    with pytest.warns(
        UserWarning, match=r"asserts calls aten._assert_async.default, which returns nothing"
    ) as told:
        zt.Step.of(asserts).trace(STATE, BATCH)
    assert line("asserts", "_assert_async") in str(told[0].message)


def test_a_closure_over_a_tensor_is_refused():
    mask = torch.ones(3, 1)

    def closes(state, batch):
        grads, value = grad_and_value(loss)(state["params"], batch[0] * mask, batch[1])
        return {**state, "params": sgd(state["params"], grads)}, value

    with pytest.raises(
        ValueError, match=r"reads a tensor \[3, 1\] \(torch.float32\) that is neither"
    ) as e:
        lower(closes)
    assert line("closes", "* mask") in str(e.value)
    assert "Pass it in: as state" in str(e.value)


def test_a_new_state_of_another_structure_is_refused():
    def forgets(state, batch):
        return {"params": state["params"]}, batch[0].sum()

    with pytest.raises(ValueError, match=re.escape("missing: ['m']")):
        lower(forgets)

    def adds(state, batch):
        return {**state, "extra": state["m"]}, batch[0].sum()

    with pytest.raises(ValueError, match=re.escape("new: ['extra']")):
        lower(adds)


def test_a_new_state_of_another_type_is_refused():
    def grows(state, batch):
        return {**state, "m": state["m"].to(torch.float64)}, batch[0].sum()

    with pytest.raises(ValueError, match=r"was given state.m: f32\[4,2\] and returned f64\[4,2\]"):
        lower(grows)


def test_a_step_must_return_a_pair():
    with pytest.raises(ValueError, match=r"returned dict; a train step returns \(state, output\)"):
        lower(lambda state, batch: state)


def test_a_state_leaf_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"state leaf state\.mode is 'fast'"):
        lower(lambda state, batch: (state, batch[0].sum()), state={**STATE, "mode": "fast"})


# ---- shard_params


def test_a_value_that_reaches_the_state_unreduced_is_refused():
    def unreduced(state, batch):
        each = vmap(torch.func.grad(lambda p, x, y: loss(p, x, y)), (None, 0, 0))(
            state["params"], *batch
        )
        mean = {k: g.mean(0) for k, g in each.items()}
        return {**state, "params": sgd(state["params"], mean)}, batch[0].sum()

    with pytest.raises(
        ValueError, match=r"reaches state params\.w: f32\[4,2\] without having been reduced"
    ) as e:
        lower(unreduced)
    assert "zt.pmean(x, 'dp')" in str(e.value)
    assert HERE in str(e.value)


def test_a_batch_statistic_that_the_update_writes_to_the_state_is_refused():
    def tracks(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        return {"params": sgd(state["params"], grads), "m": state["m"] * 0.9 + value}, value

    with pytest.raises(ValueError, match="reaches state m") as e:
        lower(tracks)
    assert line("tracks", "+ value") in str(e.value)


def test_an_integer_output_that_depends_on_the_batch_is_refused():
    def counts(state, batch):
        grads, _ = grad_and_value(loss)(state["params"], *batch)
        return {**state, "params": sgd(state["params"], grads)}, (batch[0] > 0).sum()

    with pytest.raises(ValueError, match="is an integer that depends on the batch") as e:
        lower(counts)
    assert line("counts", "> 0).sum()") in str(e.value)
    assert "zt.psum(x, 'dp')" in str(e.value)
    lower(counts, outputs="local")


@torch.library.custom_op("test_errors::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_fake(torch.empty_like)


def test_an_update_that_cannot_be_sharded_is_refused():
    def halves(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        m = halved(state["m"])
        return {"params": sgd(state["params"], grads), "m": m}, value

    with pytest.raises(
        ValueError, match="the update cannot run on shards: halved has no sharding rule"
    ) as e:
        lower(halves)
    assert line("halves", "halved(state") in str(e.value)
    assert "where=lambda path, leaf" in str(e.value)
    lower(halves, where=lambda path, leaf: path != "m")


def test_a_random_draw_for_a_value_that_is_not_sharded_is_refused():
    """Each rank may draw for its own shard. A value that every rank holds would differ between ranks."""

    def noisy(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        noise = {k: g + 0.01 * torch.randn_like(g) for k, g in grads.items()}
        return {**state, "params": sgd(state["params"], noise)}, value

    lower(noisy)
    with pytest.raises(
        ValueError,
        match=r"a random draw \(randn_like\) in the update, of a value that is not sharded",
    ) as e:
        lower(noisy, stage=0)
    assert line("noisy", "randn_like") in str(e.value)


def test_wrong_options_are_refused():
    mesh = zt.AbstractMesh(dp=2)
    with pytest.raises(ValueError, match="axis='tp' is not an axis of the mesh, which has 'dp'"):
        zt.shard_params(mesh, axis="tp")
    with pytest.raises(ValueError, match="stage=4"):
        zt.shard_params(mesh, stage=4)
    with pytest.raises(ValueError, match="replicate_axis is the sharded axis"):
        zt.shard_params(mesh, replicate_axis="dp")
    with pytest.raises(ValueError, match="outputs='sum'"):
        zt.shard_params(mesh, outputs="sum")
    with pytest.raises(ValueError, match="max_in_flight=-1"):
        zt.prefetch(max_in_flight=-1)
    with pytest.raises(TypeError, match="call it first"):
        zt.chain(zt.prefetch)
    with pytest.raises(TypeError, match="applies to a train step"):
        zt.prefetch()(3)
    with pytest.raises(TypeError, match="Lift the loop that trains it"):
        zt.shard_params(mesh)(torch.nn.Linear(2, 1))


def test_the_path_of_a_plan_is_no_plan():
    step = zt.shard_params(zt.AbstractMesh(dp=2))(CASES["mlp_momentum"].step)
    with pytest.raises(
        TypeError, match=re.escape("str is not a Plan. Read one from a file, zt.Plan.load(")
    ):
        step.with_plan("plan.json")


def test_the_name_of_a_device_is_no_cluster():
    step = zt.shard_params(zt.AbstractMesh(dp=2))(CASES["mlp_momentum"].step)
    case = CASES["mlp_momentum"]
    with pytest.raises(TypeError, match=re.escape("cluster='h100' is not a Cluster")):
        step.lower(case.state(), *batches(case, 1)[0], cluster="h100")


def test_pmean_over_an_axis_that_the_mesh_lacks_is_refused():
    def reduces(state, batch):
        return state, zt.pmean(batch[0].sum(), "tp")

    with pytest.raises(
        ValueError, match=r"pmean over 'tp', which is not an axis of the mesh \(dp\)"
    ) as e:
        lower(reduces)
    assert line("reduces", "zt.pmean") in str(e.value)


def test_overlap_grads_without_reductions_is_refused():
    case = CASES["mlp_momentum"]
    with pytest.raises(
        ValueError, match=r"no gradient reductions to overlap\.\nApply shard_params first"
    ):
        zt.overlap_grads()(case.step).lower(case.state(), *batches(case, 1)[0])


# ---- running


@pytest.fixture(scope="module")
def mesh():
    mesh = zt.make_mesh("cpu", dp=1)
    yield mesh
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_step_on_an_abstract_mesh_cannot_run():
    case = CASES["mlp_momentum"]
    step = zt.shard_params(zt.AbstractMesh(dp=2))(case.step)
    for use in (lambda: step(case.state(), *batches(case, 1)[0]), lambda: step.shard(case.state())):
        with pytest.raises(ValueError, match=re.escape("AbstractMesh(dp=2) has no devices")):
            use()


def test_full_tensors_as_state_are_refused(mesh):
    case = CASES["mlp_momentum"]
    step = zt.shard_params(mesh)(case.step)
    with pytest.raises(TypeError) as e:
        step(case.state(), *batches(case, 1)[0])
    assert "12 of 14 leaves, including:" in str(e.value)
    assert (
        "state.params.0.weight: expected a DTensor [16, 6] laid out [Shard(dim=0)], got a full tensor"
        in str(e.value)
    )
    assert "Call `state = step.shard(state)` once, before the loop." in str(e.value)


def test_state_with_another_layout_is_refused(mesh):
    case = CASES["mlp_momentum"]
    whole = zt.shard_params(mesh, stage=0)(case.step).shard(case.state())
    with pytest.raises(
        TypeError, match=re.escape("expected the layout [Shard(dim=0)], got [Replicate()]")
    ):
        zt.shard_params(mesh)(case.step)(whole, *batches(case, 1)[0])


def test_state_on_another_mesh_is_refused(mesh):
    case = CASES["mlp_momentum"]
    second_mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (1, 1), mesh_dim_names=("host", "dp")
    )
    state = zt.shard_params(second_mesh, replicate_axis="host")(case.step).shard(case.state())
    with pytest.raises(TypeError, match="is on another mesh"):
        zt.shard_params(mesh)(case.step)(state, *batches(case, 1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_fails_ends_without_waiting_for_the_others(fails):
    """NCCL ends a communicator together with all of its ranks, but the others wait for this one in a collective."""
    code = f"""
import atexit
import torch.distributed as dist
import ztrans as zt
atexit.register(lambda: print("left to the end:", dist.is_initialized()))
zt.make_mesh("cpu", dp=-1)
assert not {fails}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"left to the end: {fails}\n" and (done.returncode != 0) == fails


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the error without a GPU")
def test_a_mesh_of_gpus_needs_a_gpu():
    with pytest.raises(
        RuntimeError,
        match=r"make_mesh: 'cuda' needs a CUDA device .* none here\.\nMake the mesh of CPUs",
    ):
        zt.make_mesh("cuda", dp=-1)


@pytest.mark.parametrize(
    "environment, chosen",
    [({"RANK": "5", "LOCAL_RANK": "5"}, [1]), ({"RANK": "5"}, []), ({}, [3])],
    ids=["torchrun", "another launcher", "alone"],
)
def test_a_process_uses_the_gpu_of_its_local_rank_or_keeps_its_own(
    monkeypatch, environment, chosen
):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    devices = []
    doubles = {"is_available": lambda: True, "device_count": lambda: 4, "current_device": lambda: 3}
    for name, double in {**doubles, "set_device": devices.append}.items():
        monkeypatch.setattr(torch.cuda, name, double)
    assert _chosen_device("cuda") == "cuda" and devices == chosen


def test_a_mesh_that_needs_more_ranks_is_refused(mesh):
    with pytest.raises(
        RuntimeError,
        match=re.escape("make_mesh: dp=2 does not fit 1 rank.\nStart the script with torchrun"),
    ):
        zt.make_mesh("cpu", dp=2)


@pytest.mark.slow
def test_many_batch_shapes_warn(mesh):
    case = CASES["mlp_momentum"]
    step = zt.shard_params(mesh)(case.step)
    state = step.shard(case.state())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(1, 9):
            state, _ = step(state, *case.batch(n))
        state, _ = step(state, *case.batch(1))  # seen before
    with pytest.warns(
        UserWarning,
        match=r"(?s)traced for 9 different calls.*batch\.0 was f32\[8,6\] and is f32\[9,6\].*Every new shape",
    ):
        step(state, *case.batch(9))


def test_a_compiled_step_refuses_arguments_of_other_shapes(mesh):
    case = CASES["mlp_momentum"]
    step = zt.shard_params(mesh)(case.step)
    state = step.shard(case.state())
    compiled = step.lower(state, *batches(case, 1)[0]).compile()
    with pytest.raises(TypeError, match="arg2 is new"):
        compiled(state, *batches(case, 1)[0], 3)
    with pytest.raises(TypeError, match=re.escape("batch.0 was f32[24,6] and is f32[12,6]")):
        compiled(state, *slices(batches(case, 1)[0], 2)[0])


def test_an_unknown_backend_is_refused(mesh):
    case = CASES["mlp_momentum"]
    with pytest.raises(ValueError, match="unknown backend 'tvm'"):
        zt.shard_params(mesh)(case.step).lower(case.state(), *batches(case, 1)[0]).compile(
            backend="tvm"
        )


def test_a_step_after_its_process_group_is_destroyed_is_refused():
    mesh = zt.make_mesh("cpu", dp=1)
    case = CASES["mlp_momentum"]
    step = zt.shard_params(mesh)(case.step)
    state = step.shard(case.state())
    torch.distributed.destroy_process_group()
    with pytest.raises(RuntimeError, match="no process group: the mesh's has been destroyed"):
        step(state, *batches(case, 1)[0])


def test_a_step_that_has_run_is_refused_after_its_process_group_is_destroyed():
    """Also after another process group has been made: the mesh, and the state on it, belong to the first one."""
    mesh = zt.make_mesh("cpu", dp=1)
    case = CASES["mlp_momentum"]
    step = zt.shard_params(mesh)(case.step)
    batch = batches(case, 1)[0]
    state, _ = step(step.shard(case.state()), *batch)
    torch.distributed.destroy_process_group()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="the process group of this step's mesh has been destroyed"
        ):
            step(state, *batch)
        zt.make_mesh("cpu", dp=1)


def test_without_a_compiler_inductor_says_so():
    from torch._inductor import config

    lowered = zt.Step.of(lambda w, x: (w - x, x.sum())).lower(torch.ones(4), torch.ones(4))
    message = r"needs a C\+\+ compiler, and there is none.\nInstall g\+\+ or clang"
    # `monkeypatch` would delete the setting afterwards, instead of restoring it.
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ValueError, match=message):
        lowered.compile(backend="inductor")
