"""A step as a CUDA graph, on a simulated GPU. A replay computes the captured step again in the same memory."""

from __future__ import annotations

import contextlib
import gc
from collections import OrderedDict

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import grad_and_value
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ztrans as zt
from tests.support.fake_cuda import FakeCuda
from tests.support.programs import CASES
from tests.support.worlds import batches
from ztrans import ops
from ztrans.calling.leaf_records import check_whole
from ztrans.compiled import LocalProgram
from ztrans.ops import tables
from ztrans.ops.tables import on_device
from ztrans.runtime.contract import Contract
from ztrans.runtime.cuda import graph_capture
from ztrans.runtime.cuda.graph_capture import (
    Capture,
    check_device,
    check_values,
    copied_inputs,
    placed,
    with_rates,
)
from ztrans.runtime.executable import executable
from ztrans.runtime.failure import Writes
from ztrans.runtime.session import session_of


def step(state, batch):
    """The batch has a number and tensors. Outputs are views of the state, of the batch, and new values."""
    lr, (x, y) = batch
    grads, loss = grad_and_value(lambda w: (x @ w - y).square().mean())(state["w"])
    new = {"w": state["w"] - lr * grads, "steps": state["steps"] + 1}
    return new, {"loss": loss, "w": new["w"], "x": x, "none": None, "twice": lr * 2}


def state_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(3, 2, generator=generator), "steps": torch.zeros(())}


def batch_of(k):
    generator = torch.Generator().manual_seed(100 + k)
    return 0.1 * (k + 1), (
        torch.randn(4, 3, generator=generator),
        torch.randn(4, 2, generator=generator),
    )


def captured(fn, state, batch):
    """A compiled step that is captured on the simulated GPU, that GPU, and a list with an entry for each run."""
    cuda = FakeCuda()
    lowered = zt.Step.of(fn).lower(state, *batch)
    run = executable(lowered.graph, None)
    calls = []

    def counted(inputs):
        calls.append(1)
        return run(inputs)

    compiled = lowered.compile()
    capture = Capture(counted, lowered.graph, cuda, "cpu")
    compiled.binding.local_program = LocalProgram(lowered, capture, Writes())
    return compiled, cuda, calls


def trained(compiled, state, data):
    outputs = []
    for batch in data:
        state, output = compiled(state, *batch)
        outputs.append(output)
    return state, outputs


def same(a, b):
    pairs = list(zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@pytest.mark.slow
def test_replays_compute_what_the_step_computes():
    data = [(batch_of(k),) for k in range(5)]
    compiled, cuda, calls = captured(step, state_of(), data[0])
    state = state_of()
    state_after, outputs = trained(compiled, state, data)
    truth, wanted = trained(
        zt.Step.of(step).lower(state_of(), *data[0]).compile(), state_of(), data
    )
    assert same(state_after, truth) and same(outputs, wanted), (
        "numbers are read at each call, and earlier outputs stay"
    )
    assert state_after["w"] is state["w"], "the state is updated in place"
    assert len(calls) == 2 and cuda.graphs[0].replays == 4
    first_side, default, second_side = cuda.entered
    assert first_side is second_side is not default is cuda.now, (
        "the first run and the capture are on one side stream"
    )
    assert cuda.capture_modes == ["thread_local"]


@pytest.mark.slow
def test_workspaces_of_cublas_are_released_just_before_and_after_a_capture(monkeypatch):
    """So a graph has workspaces in its own memory, and nobody else is given them or can release them."""
    data = [(batch_of(k),) for k in range(3)]
    compiled, cuda, calls = captured(step, state_of(), data[0])
    seen = []
    release = lambda: seen.append((cuda.capturing, len(calls)))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", release, raising=False)
    trained(compiled, state_of(), data)
    assert seen == [(False, 1), (False, 2)], (
        "after the first call, which runs; around the second, which is captured"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_adam", "adamw_fused", "muon"])
def test_whole_training_steps_are_captured(name):
    case = CASES[name]
    data = batches(case, 4)
    compiled, cuda, _ = captured(case.step, case.state(), data[0])
    state_after, outputs = trained(compiled, pytree.tree_map(clone, case.state()), data)
    truth, wanted = trained(
        zt.Step.of(case.step).lower(case.state(), *data[0]).compile(),
        pytree.tree_map(clone, case.state()),
        data,
    )
    assert same(state_after, truth) and same(outputs, wanted) and cuda.graphs[0].replays == 3


def clone(x):
    return x.clone() if isinstance(x, torch.Tensor) else torch.as_tensor(x)


@pytest.mark.slow
def test_another_state_is_refused_until_the_graph_is_closed():
    data = [(batch_of(k),) for k in range(3)]
    compiled, cuda, calls = captured(step, state_of(), data[0])
    trained(compiled, state_of(), data[:1])
    state, _ = trained(compiled, state_of(1), data[:2])  # the second call captures, with this state
    with pytest.raises(ValueError) as refused:
        compiled(state_of(2), *data[2])
    assert str(refused.value).startswith(
        "step: state leaf w is not where it was when the step was captured"
    )
    assert "Pass the state that the step returned" in str(refused.value) and "close()" in str(
        refused.value
    )
    compiled(state, *data[2])
    compiled.close()
    assert cuda.graphs[0].resets == 1 and cuda.synchronized == [None]
    compiled.close()
    assert cuda.graphs[0].resets == 1, "a second close() does nothing"
    state_after, _ = trained(compiled, state_of(2), data)
    truth, _ = trained(zt.Step.of(step).lower(state_of(), *data[0]).compile(), state_of(2), data)
    assert same(state_after, truth) and len(cuda.graphs) == 2
    assert calls == [1] * 4


@pytest.mark.slow
def test_a_failed_capture_says_why_and_leaves_the_state_unchanged():
    data = [(batch_of(k),) for k in range(2)]
    compiled, cuda, _ = captured(step, state_of(), data[0])
    capture = compiled.binding.local_program.runner
    inner = capture.run

    def reads(inputs):
        results = inner(inputs)
        if cuda.graphs:
            inputs[0].sum().item()
        return results

    capture.run = reads
    state, _ = trained(compiled, state_of(), data[:1])
    before = pytree.tree_map(torch.clone, state)
    with pytest.raises(
        RuntimeError,
        match="step: the step cannot be captured as a CUDA graph: operation not permitted",
    ):
        compiled(state, *data[1])
    assert same(before, state) and capture.captured is None


@pytest.mark.slow
def test_a_first_run_that_fails_is_repeated_and_the_caller_is_behind_what_it_launched():
    compiled, cuda, calls = captured(step, state_of(), (batch_of(0),))
    capture = compiled.binding.local_program.runner
    run = capture.run

    def failing(inputs):
        cuda.now.tick()
        raise KeyError("half way")

    capture.run = failing
    with pytest.raises(KeyError):
        compiled(state_of(), batch_of(0))
    (side,) = cuda.entered
    assert cuda.compute.clock[side] == side.clock[side] == 1
    capture.run = run
    trained(compiled, state_of(), [(batch_of(k),) for k in range(2)])
    assert len(calls) == 2 and len(cuda.graphs) == 1, "a run, then a capture"


@pytest.mark.slow
def test_the_graph_is_closed_when_the_process_ends(monkeypatch):
    ends = []
    monkeypatch.setattr("atexit.register", lambda f, *args: ends.append((f, args)))
    data = [(batch_of(k),) for k in range(2)]
    compiled, cuda, _ = captured(step, state_of(), data[0])
    trained(compiled, state_of(), data)
    ((close, args),) = ends
    close(*args)
    assert cuda.graphs[0].resets == 1
    del compiled
    gc.collect()
    close(*args)  # does nothing: the graph is gone already


def test_state_on_the_cpu_is_refused_if_the_step_changes_it():
    lowered = zt.Step.of(step).lower(state_of(), batch_of(0))
    there, here = torch.empty(3, 2, device="meta"), torch.zeros(())
    given = [there if v.name == "w" else here for v in lowered.graph.inputs[:2]]
    with pytest.raises(ValueError) as refused:
        placed(lowered.graph, [*given, here], "meta")
    message = str(refused.value)
    assert message.startswith(
        "step: state leaf steps is on cpu, and a CUDA graph would not see it change.\n"
    )
    assert "capturable=True or fused=True" in message
    placed_ = placed(lowered.graph, [there, there, here], "meta")
    assert [x.device.type for x in placed_] == ["meta"] * 3, "numbers go to the device"


@pytest.mark.slow
def test_a_learning_rate_of_a_lifted_loop_is_read_at_every_call(monkeypatch):
    """A fused optimizer on a GPU reads it in fp32."""

    def lifted():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True)

        def loop(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return optimizer, *zt.lift(loop, model, optimizer)

    def run(optimizer, compiled, state):
        losses = []
        for k in range(5):
            optimizer.param_groups[0]["lr"] = 2.0 ** -(7 - k)
            state, loss = compiled(state, batch_of(k)[1][0])
            losses.append(loss)
        return state, losses

    optimizer, function, state = lifted()
    lowered = zt.Step.of(function).lower(state, batch_of(0)[1][0])
    graph, cuda = with_rates(lowered.graph), FakeCuda()
    names, rate = [v.name for v in graph.inputs], "param_groups.0.lr"
    assert copied_inputs(
        graph, [torch.empty((), device="cpu" if n == rate else "meta") for n in names], "meta"
    ) == [
        names.index("x"),
        names.index(rate),
    ]
    # Here the state is on the device of the graph. As on a GPU, the rate must be copied in at every call all the same.
    monkeypatch.setattr(
        "ztrans.runtime.cuda.graph_capture.copied_inputs",
        lambda *_: [names.index("x"), names.index(rate)],
    )
    compiled = lowered.compile()
    capture = Capture(executable(graph, None), graph, cuda, "cpu")
    compiled.binding.local_program = LocalProgram(lowered, capture, Writes())
    state_after, losses = run(optimizer, compiled, state)
    optimizer, function, truth = lifted()
    plain = zt.Step.of(function).lower(truth, batch_of(0)[1][0]).compile()
    wanted, expected = run(optimizer, plain, truth)
    assert same(losses, expected) and same(state_after["params"], wanted["params"])
    assert [e.op for e in graph.eqns].count(torch.ops.aten._to_copy.default) == 1
    assert {e.kwargs["lr"].dtype for e in graph.eqns if "lr" in e.kwargs} == {torch.float32}
    assert cuda.graphs[0].replays == 4


def test_a_capture_has_the_state_of_its_call_even_if_that_call_fails(monkeypatch):
    data = [(batch_of(k),) for k in range(3)]
    compiled, cuda, _ = captured(step, state_of(), data[0])
    state, _ = compiled(state_of(), *data[0])

    def interrupt(tensors):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.autograd.graph, "increment_version", interrupt)
        compiled(state_of(1), *data[1])
    assert cuda.graphs[0].replays == 1
    with pytest.raises(ValueError, match="is not where it was when the step was captured"):
        compiled(state, *data[2])


@pytest.mark.slow
def test_a_number_that_a_kernel_takes_by_value_stays_what_it_was():
    """Here a beta of a fused optimizer: another one is refused, until the step is captured again."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def loop(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    function, state = zt.lift(loop, model, optimizer)
    x = torch.ones(2, 3)
    lowered = zt.Step.of(function).lower(state, x)
    graph = with_rates(lowered.graph)
    check_values(graph)
    compiled = lowered.compile()
    writes = Writes()
    program = executable(graph, None)
    capture = Capture(program, graph, FakeCuda(), "cpu", on_write=writes.begin)
    compiled.binding.local_program = LocalProgram(lowered, capture, writes)
    state = zt.Step.of(function).shard(state)
    for rate in (0.1, 0.2, 0.3):
        optimizer.param_groups[0]["lr"] = rate
        state, _ = compiled(state, x)
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)
    with pytest.raises(
        ValueError,
        match=r"param_groups.0.betas.0 was 0.9 when the step was captured, and is 0.5(?s:.)*cycle_momentum=False",
    ):
        compiled(state, x)
    check_whole(
        pytree.tree_leaves(state), "the refused call"
    )  # nothing was launched, so the state is whole
    capture.close()
    for _ in range(3):
        state, _ = compiled(state, x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the error without a GPU")
def test_without_a_gpu_the_error_says_what_is_missing():
    lowered = zt.Step.of(step).lower(state_of(), batch_of(0))
    with pytest.raises(
        ValueError, match="cuda_graph=True needs a CUDA device and a PyTorch built for it"
    ):
        lowered.compile(cuda_graph=True)
    with pytest.raises(
        ValueError, match=r"this step's mesh is of 'cpu' devices\.\nMake the mesh of GPUs"
    ):
        check_device("cpu")


def test_tables_of_kernels_take_memory_that_is_allocated_before_the_capture(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    rows, device = torch.arange(3), torch.device("cuda", 0)
    with pytest.raises(
        RuntimeError, match="run the step once on them, then capture it, or capture it in"
    ):
        on_device(rows, device)
    more = torch.arange(10, 18).view(2, 4)
    monkeypatch.setattr(FakeTensor, "copy_", lambda self, x: self, raising=False)
    with FakeTensorMode(allow_non_fake_inputs=True), ops.filled_after_capture(room=12):
        with Called() as called:
            device_tables = [on_device(x, device) for x in (rows, more)]
        # A graph reuses its own memory while it runs, so a table that stays must not be allocated during the capture.
        assert not any(x.device.type == "cuda" for x in called.allocated) and called.allocated
        assert {x.untyped_storage()._cdata for x in device_tables} == {
            device_tables[0].untyped_storage()._cdata
        }
        assert [x.storage_offset() for x in device_tables] == [0, 4] and device_tables[
            1
        ].shape == more.shape
        with pytest.raises(
            RuntimeError,
            match="take more than 12 integers: run the step once before, or give them more",
        ):
            on_device(rows, device)


@pytest.mark.slow
def test_a_failed_capture_restores_the_stream_and_the_garbage_collector():
    cuda = FakeCuda()
    graph = zt.Step.of(step).lower(state_of(), batch_of(0)).graph

    @contextlib.contextmanager
    def leaves(graph, stream, capture_error_mode):
        """Fails at its end, and leaves the stream of the capture current, as torch does."""
        cuda.now = stream
        assert not gc.isenabled()
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    here, cuda.graph = cuda.now, leaves
    capture = Capture(lambda inputs: list(inputs), graph, cuda, "cpu")
    inputs = [torch.ones(v.shape) for v in graph.inputs]
    capture(inputs)
    with pytest.raises(RuntimeError, match="cannot be captured as a CUDA graph: operation failed"):
        capture(inputs)
    assert cuda.now is here and gc.isenabled()


def test_tables_of_kernels_are_filled_after_the_capture(monkeypatch):
    """In memory of the CPU, whose contents can be read here."""
    memory = torch.full((8,), -1)
    monkeypatch.setattr("torch.empty", lambda *size, dtype, device: memory)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with ops.filled_after_capture("cpu"):
        a, b = (
            on_device(x, torch.device("cuda"))
            for x in (torch.arange(3), torch.arange(4, 6).view(1, 2))
        )
        assert memory.eq(-1).all()
    assert a.tolist() == [0, 1, 2] and b.tolist() == [[4, 5]] and memory[6:].eq(-1).all()


class Called(TorchDispatchMode):
    """Records the tensors that are allocated while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.allocated.append(result)
        return result


def test_tables_of_addresses_are_cached_for_each_stream(monkeypatch):
    """The least recently used table is dropped. A capture may use the table of any stream, and keeps it for good."""
    cuda = FakeCuda()
    monkeypatch.setattr("torch.cuda.current_stream", cuda.current_stream)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", cuda.is_current_stream_capturing)
    monkeypatch.setattr(tables, "on_device", lambda rows, device, shared: rows)
    monkeypatch.setattr(tables, "_by_addresses", OrderedDict())
    monkeypatch.setattr(tables, "_captured", [])
    monkeypatch.setattr(tables, "_MOST", 2)
    x, y, z = (torch.empty(k + 1) for k in range(3))
    of = lambda t: tables.addresses([t], torch.device("cuda"))
    first = of(x)
    assert first.tolist() == [x.data_ptr()] and of(x) is first
    with cuda.stream(cuda.Stream()):
        assert of(x) is not first, (
            "another stream might read it before it is written, or after it is freed"
        )
    with cuda.graph(cuda.CUDAGraph(), cuda.Stream(), "thread_local"):
        assert of(x) is first and tables._captured == [first]
    of(y)
    of(x)
    of(z)  # drops the table of y, the least recently used one
    assert [key[0] for key in tables._by_addresses] == [(x.data_ptr(),), (z.data_ptr(),)]


@pytest.fixture
def compared(monkeypatch) -> list[str]:
    """What ranks have compared, as messages name it."""
    compared: list[str] = []
    monkeypatch.setattr("ztrans.compiled.agree", lambda mesh, what, *rest: compared.append(what))
    return compared


def captured_on_a_mesh(steps: int, cuda: FakeCuda, **options):
    """A step of a mesh that is captured on a simulated GPU, its capture, its state, and batches for some steps."""
    mesh = zt.make_mesh("cpu", dp=1)
    case = CASES["adamw_fused"]
    sharded = zt.shard_params(mesh)(case.step)
    state = sharded.shard(case.state())
    data = batches(case, steps)
    lowered = sharded.lower(state, *data[0])
    run = executable(lowered.graph, mesh)
    capture = Capture(run, lowered.graph, cuda, "cpu", **options)
    compiled = lowered.compile()
    compiled.binding.local_program = LocalProgram(
        lowered, capture, Writes(), session_of(mesh), Contract(lowered.graph, "")
    )
    return compiled, capture, state, data


@pytest.mark.slow
def test_ranks_compare_the_run_and_the_capture_and_no_replay(compared, monkeypatch):
    """A replay neither sends nor waits on the host. A rank that is alone compares nothing, so this one is not."""
    compiled, capture, state, data = captured_on_a_mesh(5, FakeCuda())
    monkeypatch.setattr(compiled.binding.local_program.session, "is_alone", False)
    trained(compiled, state, data)
    assert len(compared) == 2
    assert capture.captured.replays == 4


@pytest.mark.slow
def test_closing_waits_for_the_gpu_of_the_step(monkeypatch):
    """Another GPU may be the current one."""
    data = [(batch_of(k),) for k in range(2)]
    compiled, cuda, _ = captured(step, state_of(), data[0])
    trained(compiled, state_of(), data)
    monkeypatch.setattr(graph_capture, "device_of", lambda inputs: "cuda:1")
    compiled.close()
    assert cuda.synchronized == ["cuda:1"]


@pytest.mark.slow
def test_closing_waits_for_no_gpu_after_a_step_has_failed(compared):
    """The last replay may wait for a rank that does not come."""
    cuda = FakeCuda()
    compiled, capture, state, data = captured_on_a_mesh(3, cuda, has_failed=lambda: True)
    trained(compiled, state, data)
    compiled.close()
    assert cuda.synchronized == [] and not capture.replays
