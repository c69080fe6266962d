"""A step as a CUDA graph, on a GPU that is not there: what is captured is replayed on the same memory."""

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
from ztrans.compiled import Bound
from ztrans.ops import tables
from ztrans.ops.tables import on_device
from ztrans.runtime.cuda.graph_capture import Capture, check_device, copied_inputs, placed, with_rates
from ztrans.runtime.executable import executable


def step(state, batch):
    """Numbers and tensors in the batch; values beside the state that show it, the batch, or neither."""
    lr, (x, y) = batch
    grads, loss = grad_and_value(lambda w: (x @ w - y).square().mean())(state["w"])
    new = {"w": state["w"] - lr * grads, "steps": state["steps"] + 1}
    return new, {"loss": loss, "w": new["w"], "x": x, "none": None, "twice": lr * 2}


def state_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(3, 2, generator=generator), "steps": torch.zeros(())}


def batch_of(k):
    generator = torch.Generator().manual_seed(100 + k)
    return 0.1 * (k + 1), (torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator))


def captured(fn, state, batch):
    """A compiled step whose runs are captured by the double."""
    cuda = FakeCuda()
    lowered = zt.Step.of(fn).lower(state, *batch)
    run = executable(lowered.graph, None)
    calls = []

    def counted(inputs):
        calls.append(1)
        return run(inputs)

    compiled = lowered.compile()
    compiled._bound.append(Bound(lowered, Capture(counted, lowered.graph, cuda, "cpu")))
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


def test_replays_compute_what_the_step_computes():
    data = [(batch_of(k),) for k in range(5)]
    compiled, cuda, calls = captured(step, state_of(), data[0])
    state = state_of()
    found, outputs = trained(compiled, state, data)
    truth, wanted = trained(zt.Step.of(step).lower(state_of(), *data[0]).compile(), state_of(), data)
    assert same(found, truth) and same(outputs, wanted), "numbers are read anew, and outputs kept are not overwritten"
    assert found["w"] is state["w"], "the state is updated where it lies"
    assert len(calls) == 2 and cuda.graphs[0].replays == 4
    side, here, again = cuda.entered
    assert side is again is not here is cuda.now, "run once and captured on one side stream"
    assert cuda.capture_modes == ["thread_local"]


@pytest.mark.parametrize("name", ["gpt_adam", "adamw_fused", "muon"])
def test_whole_training_steps_are_captured(name):
    case = CASES[name]
    data = batches(case, 4)
    compiled, cuda, _ = captured(case.step, case.state(), data[0])
    found, outputs = trained(compiled, pytree.tree_map(clone, case.state()), data)
    truth, wanted = trained(
        zt.Step.of(case.step).lower(case.state(), *data[0]).compile(), pytree.tree_map(clone, case.state()), data
    )
    assert same(found, truth) and same(outputs, wanted) and cuda.graphs[0].replays == 3


def clone(x):
    return x.clone() if isinstance(x, torch.Tensor) else torch.as_tensor(x)


def test_another_state_is_refused_until_the_graph_is_closed():
    data = [(batch_of(k),) for k in range(3)]
    compiled, cuda, calls = captured(step, state_of(), data[0])
    trained(compiled, state_of(), data[:1])
    state, _ = trained(compiled, state_of(1), data[:2])  # the state of the capture is that of the second call
    with pytest.raises(ValueError) as refused:
        compiled(state_of(2), *data[2])
    assert str(refused.value).startswith("step: state leaf w is not where it was when the step was captured")
    assert "Pass the state that the step returned" in str(refused.value) and "close()" in str(refused.value)
    compiled(state, *data[2])
    compiled.close()
    assert cuda.graphs[0].resets == 1 and cuda.synchronized == 1
    compiled.close()
    assert cuda.graphs[0].resets == 1, "closed once"
    found, _ = trained(compiled, state_of(2), data)
    truth, _ = trained(zt.Step.of(step).lower(state_of(), *data[0]).compile(), state_of(2), data)
    assert same(found, truth) and len(cuda.graphs) == 2
    assert calls == [1] * 4


def test_a_step_that_cannot_be_captured_says_why_and_leaves_the_state_alone():
    data = [(batch_of(k),) for k in range(2)]
    compiled, cuda, _ = captured(step, state_of(), data[0])
    capture = compiled._bound[0][1]
    inner = capture.run

    def reads(inputs):
        made = inner(inputs)
        if cuda.graphs:
            inputs[0].sum().item()
        return made

    capture.run = reads
    state, _ = trained(compiled, state_of(), data[:1])
    before = pytree.tree_map(torch.clone, state)
    with pytest.raises(RuntimeError, match="step: the step cannot be captured as a CUDA graph: operation not permitted"):
        compiled(state, *data[1])
    assert same(before, state) and capture.captured is None


def test_the_graph_goes_before_the_process_group_when_the_process_ends(monkeypatch):
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
    close(*args)  # what is gone already is let be


def test_state_on_the_cpu_is_refused_by_name_where_it_changes():
    lowered = zt.Step.of(step).lower(state_of(), batch_of(0))
    there, here = torch.empty(3, 2, device="meta"), torch.zeros(())
    given = [there if v.name == "w" else here for v in lowered.graph.inputs[:2]]
    with pytest.raises(ValueError) as refused:
        placed(lowered.graph, [*given, here], "meta")
    said = str(refused.value)
    assert said.startswith("step: state leaf steps lies on cpu, and a CUDA graph would not see it change.\n")
    assert "capturable=True or fused=True" in said
    placed_ = placed(lowered.graph, [there, there, here], "meta")
    assert [x.device.type for x in placed_] == ["meta"] * 3, "numbers go to the device"


def test_a_learning_rate_in_the_state_is_read_at_every_call(monkeypatch):
    """As `lift` keeps it; a fused optimizer on a GPU reads it in fp32."""

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

        return zt.lift(loop, model, optimizer)

    def run(compiled, state):
        losses = []
        for k in range(5):
            state["lr"][0] = 2.0 ** -(7 - k)
            state, loss = compiled(state, batch_of(k)[1][0])
            losses.append(loss)
        return state, losses

    function, state = lifted()
    lowered = zt.Step.of(function).lower(state, batch_of(0)[1][0])
    graph, cuda = with_rates(lowered.graph), FakeCuda()
    names = [v.name for v in graph.inputs]
    assert copied_inputs(graph, [torch.empty((), device="cpu" if n == "lr.0" else "meta") for n in names], "meta") == [
        names.index("lr.0"),
        names.index("x"),
    ]
    # Here the state lies where the graph is; the rate is to come with every call all the same, as on a GPU.
    monkeypatch.setattr("ztrans.runtime.cuda.graph_capture.copied_inputs", lambda *_: [names.index("lr.0"), names.index("x")])
    compiled = lowered.compile()
    compiled._bound.append(Bound(lowered, Capture(executable(graph, None), graph, cuda, "cpu")))
    found, losses = run(compiled, state)
    function, truth = lifted()
    plain = zt.Step.of(function).lower(truth, batch_of(0)[1][0]).compile()
    wanted, expected = run(plain, truth)
    assert same(losses, expected) and same(found["params"], wanted["params"])
    assert [e.op for e in graph.eqns].count(torch.ops.aten._to_copy.default) == 1
    assert {e.kwargs["lr"].dtype for e in graph.eqns if "lr" in e.kwargs} == {torch.float32}
    assert cuda.graphs[0].replays == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said without a GPU")
def test_without_a_gpu_it_is_an_error_that_says_what_is_missing():
    lowered = zt.Step.of(step).lower(state_of(), batch_of(0))
    with pytest.raises(ValueError, match="cuda_graph=True needs a CUDA device and a PyTorch built for it"):
        lowered.compile(cuda_graph=True)
    with pytest.raises(ValueError, match=r"this step's mesh is of 'cpu' devices\.\nMake the mesh of GPUs"):
        check_device("cpu")


def test_tables_of_kernels_are_filled_when_the_capture_is_over(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    rows, device = torch.arange(3), torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="run the step once on them, then capture it, or capture it in"):
        on_device(rows, device)
    more = torch.arange(10, 18).view(2, 4)
    monkeypatch.setattr(FakeTensor, "copy_", lambda self, x: self, raising=False)
    with FakeTensorMode(allow_non_fake_inputs=True), ops.filled_after_capture(room=12):
        with Called() as called:
            made = [on_device(x, device) for x in (rows, more)]
        # Memory of the graph is used again while it runs, so nothing that stays may be allocated there.
        assert not any(x.device.type == "cuda" for x in called.made) and called.made
        assert {x.untyped_storage()._cdata for x in made} == {made[0].untyped_storage()._cdata}
        assert [x.storage_offset() for x in made] == [0, 4] and made[1].shape == more.shape
        with pytest.raises(RuntimeError, match="take more than 12 integers: run the step once before, or give them more"):
            on_device(rows, device)


def test_a_capture_that_fails_leaves_the_stream_and_the_collector_as_they_were():
    cuda = FakeCuda()
    graph = zt.Step.of(step).lower(state_of(), batch_of(0)).graph

    @contextlib.contextmanager
    def leaves(graph, stream, capture_error_mode):
        """As torch does when the end of the capture fails: the stream of the capture stays current."""
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


def test_tables_are_filled(monkeypatch):
    """The same on memory that is there: the CPU's."""
    memory = torch.full((8,), -1)
    monkeypatch.setattr("torch.empty", lambda *size, dtype, device: memory)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with ops.filled_after_capture("cpu"):
        a, b = (on_device(x, torch.device("cuda")) for x in (torch.arange(3), torch.arange(4, 6).view(1, 2)))
        assert memory.eq(-1).all()
    assert a.tolist() == [0, 1, 2] and b.tolist() == [[4, 5]] and memory[6:].eq(-1).all()


class Called(TorchDispatchMode):
    """What is allocated meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.made.append(made)
        return made


def test_tables_of_addresses(monkeypatch):
    """Made for each stream and let go in turn; a capture takes what any stream has, and keeps it for good."""
    cuda = FakeCuda()
    monkeypatch.setattr("torch.cuda.current_stream", cuda.current_stream)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", cuda.is_current_stream_capturing)
    monkeypatch.setattr(tables, "on_device", lambda rows, device, shared: rows)
    monkeypatch.setattr(tables, "_kept", OrderedDict())
    monkeypatch.setattr(tables, "_captured", [])
    monkeypatch.setattr(tables, "_MOST", 2)
    x, y, z = (torch.empty(k + 1) for k in range(3))
    of = lambda t: tables.addresses([t], torch.device("cuda"))
    first = of(x)
    assert first.tolist() == [x.data_ptr()] and of(x) is first
    with cuda.stream(cuda.Stream()):
        assert of(x) is not first, "another stream might read it before it is there, or after it is let go"
    with cuda.graph(cuda.CUDAGraph(), cuda.Stream(), "thread_local"):
        assert of(x) is first and tables._captured == [first]
    of(y)
    of(x)
    of(z)  # y has not been asked for the longest, and is let go
    assert [key[0] for key in tables._kept] == [(x.data_ptr(),), (z.data_ptr(),)]
