"""Every operation passes torch's checks, is traced as one node for a GPU that is not there, and refuses wrong inputs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.ops.processes import run_ranks
from ztrans import ops
from ztrans.ops import symmetric

T = torch.ops.ztrans


def cast_pack(device):
    parts = [torch.randn(5, device=device), torch.randn(2, 3, device=device)]
    return T.cast_pack.default, (parts, [3, 4], torch.bfloat16, 2), {}


def cast_pack_out(device):
    parts = [torch.randn(5, device=device), torch.randn(2, 3, device=device)]
    return T.cast_pack.out, (parts, [3, 4], 2), {"out": torch.zeros(14, dtype=torch.bfloat16, device=device)}


def unpack(device):
    return T.unpack.default, (torch.randn(14, device=device), [3, 4], [5, 8], 2), {}


def unpack_out(device):
    outs = [torch.zeros(5, device=device), torch.zeros(8, device=device)]
    return T.unpack.out, (torch.randn(14, device=device), [3, 4], 2), {"out": outs}


def stochastic_round(device):
    return T.stochastic_round.default, (torch.randn(3, 4, device=device), torch.tensor(3, device=device)), {}


def quantise(device):
    return T.quantise.default, ([torch.randn(5, device=device), torch.randn(200, device=device)], [7, 200], "int8"), {}


def dequantise(device):
    buffer = torch.zeros(2 * 224, dtype=torch.uint8, device=device)
    return T.dequantise.default, (buffer, [7, 200], [14, 399], 2, "fp8", torch.bfloat16), {}


def adamw_pack(device):
    ps, gs, ms, vs = ([torch.rand(n, device=device) for n in (5, 3)] for _ in range(4))
    one = torch.ones((), device=device)
    out = torch.zeros(9, dtype=torch.bfloat16, device=device)
    seed = torch.zeros((), dtype=torch.int64, device=device)
    return T.adamw_pack.default, (ps, gs, ms, vs, one, one, one, 0.9, 0.99, 1e-8, 0.1, [5, 4], out, seed), {}


def barrier(device):
    memory, _ = tables(device)
    return T.barrier.default, (*memory, 0, 10), {}


def all_gather(device):
    memory, buffers = tables(device)
    outs = [torch.zeros(3, device=device), torch.zeros(4, device=device)]
    return T.all_gather.default, (buffers, *memory, outs, [3, 4], 0, 0, 4, 10), {}


def reduce_scatter(device):
    memory, buffers = tables(device)
    outs = [torch.zeros(3, device=device), torch.zeros(4, device=device)]
    return T.reduce_scatter.default, (buffers, *memory, outs, [3, 4], "sum", torch.float32, 0, 0, 4, 10), {}


MEMORY = symmetric.in_one_process(1, 1024)[0]


def tables(device):
    if device == "cpu":
        return (MEMORY.pads, MEMORY.error), MEMORY.buffers
    pads, buffers = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    return (pads, torch.zeros(1, dtype=torch.int32)), buffers


SAMPLES = [
    cast_pack, cast_pack_out, unpack, unpack_out, stochastic_round, quantise, dequantise, adamw_pack, barrier,
    all_gather, reduce_scatter,
]  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.__name__)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_opcheck(sample):
    op, args, kwargs = sample("cpu")
    torch.library.opcheck(op, args, kwargs)


def test_a_mean_on_a_gpu_divides():
    """If the divisor were a number on the host, PyTorch would multiply by its reciprocal, which rounds twice."""
    with FakeTensorMode():
        term = torch.empty(4, device="cuda")
        graph = make_fx(lambda x: ops.reduce([x, x, x], "mean", torch.float32))(term).graph
    (division,) = [n for n in graph.nodes if "div" in str(n.target)]
    assert division.args[1].meta["val"].device.type == "cuda"


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.__name__)
def test_one_node_for_a_gpu_that_is_not_there(sample):
    with FakeTensorMode():
        op, args, kwargs = sample("cuda")
        graph = make_fx(lambda *args: op(*args, **kwargs))(*args).graph
    nodes = [n for n in graph.nodes if n.op == "call_function" and n.target.__class__ is not type(iter)]
    assert [n.target for n in nodes if "getitem" not in str(n.target)] == [op]


def test_import_needs_no_triton_and_touches_no_gpu():
    code = """
import sys
sys.modules["triton"] = None
import torch
from ztrans import ops
assert not torch.cuda.is_initialized()
assert ops.cast_pack([torch.ones(2)], [2], torch.bfloat16).tolist() == [1, 1]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_triton_a_kernel_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    kernel = importlib.import_module("ztrans.ops.kernel")
    with pytest.raises(RuntimeError, match=r"the kernel double needs Triton, .*: pip install triton"):
        kernel.kernel(_double)[(1,)]
    with pytest.raises(RuntimeError, match="needs Triton"):
        kernel.element(torch.float32)


def _double(x): ...


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_symmetric_memory_needs_gpus():
    with pytest.raises(RuntimeError, match="needs CUDA devices"):
        ops.rendezvous(1024)


def test_files_of_slower_ranks_do_not_write_over_data(tmp_path, monkeypatch):
    """When torch extends a file, it writes a zero at the start, so each file must have its full size before."""
    true, seen = torch.from_file, []

    def late(file, **options):
        seen.append((Path(file).stat().st_size, options["size"]))
        return true(file, **options)

    monkeypatch.setattr(torch, "from_file", late)
    symmetric.over_files(tmp_path, 0, 2, 100).mine.fill_(7)
    assert symmetric.over_files(tmp_path, 1, 2, 100).held[0][:100].eq(7).all()
    assert len(seen) == 4 and all(size >= wanted for size, wanted in seen)


def test_processes_over_shared_memory():
    """On the CPU, barrier, all_gather and reduce_scatter work between processes."""
    run_ranks(2, TRITON_INTERPRET="0")


def test_a_rank_that_never_comes_is_an_error():
    late, _ = symmetric.in_one_process(2, 0)
    with pytest.raises(RuntimeError, match=r"rank 0 waited in vain for rank 1: .* make a new one"):
        ops.barrier(late, spins=5)
    with pytest.raises(RuntimeError, match="in vain"):
        late.check()


def test_empty_inputs():
    empty = torch.empty(0)
    assert ops.cast_pack([empty, empty], [0, 0], torch.bfloat16).shape == (0,)
    assert ops.cast_pack([empty], [3], torch.bfloat16, ranks=2).tolist() == [0] * 6
    assert [v.shape for v in ops.unpack(empty, [0, 0], [(0,), (0, 3)], 2)] == [(0,), (0, 3)]
    assert ops.stochastic_round(empty, 0).shape == (0,)
    assert ops.quantise([empty], [0], "int8").shape == (0,)
    assert ops.dequantise(torch.empty(0, dtype=torch.uint8), [0], [(0,)], 2, "int8", torch.float32)[0].shape == (0,)
    ops.adamw_pack([empty], [empty], [empty], [empty], step=1)


def test_a_value_gathered_alone_is_a_view():
    buffer = torch.arange(6.0)
    (value,) = ops.unpack(buffer, [3], [(5,)], 2)
    assert value.data_ptr() == buffer.data_ptr() and value.tolist() == [0, 1, 2, 3, 4]


X, META = torch.ones(4), torch.ones(4, device="meta")
BF16 = torch.bfloat16
ADAMW = {"step": 1}
WRONG = {
    "no parts": (lambda: ops.cast_pack([], [], BF16), "no parts"),
    "sizes": (lambda: ops.cast_pack([X], [4, 4], BF16), "1 parts, but 2 sizes"),
    "small": (lambda: ops.cast_pack([X], [3], BF16), "part 0 has 4 elements, room is for 1 times 3"),
    "devices": (lambda: T.cast_pack.out([X, META], [4, 4], out=torch.ones(8, dtype=BF16)), "one device, got cpu and meta"),
    "out dtype": (lambda: ops.cast_pack([X], [4], BF16, out=torch.ones(4)), "out is torch.float32, not torch.bfloat16"),
    "out size": (lambda: ops.cast_pack([X], [4], BF16, out=torch.ones(5, dtype=BF16)), "contiguous and hold 4"),
    "out stride": (lambda: ops.cast_pack([X], [4], BF16, out=torch.ones(8, dtype=BF16)[::2]), "must be contiguous"),
    "buffer": (lambda: ops.unpack(X, [1, 2], [(1,), (2,)], 2), "hold 2 times 3 elements"),
    "shape": (lambda: ops.unpack(X, [1, 1], [(3,), (1,)], 2), "value 0 has 3 elements, the buffer 2 times 1"),
    "integers": (lambda: ops.stochastic_round(torch.ones(4).int(), 0), "x must be float32"),
    "seed": (lambda: ops.stochastic_round(X, torch.ones(())), "the seed one integer"),
    "kind": (lambda: ops.quantise([X], [4], "int4"), "unknown kind 'int4'; use 'int8' or 'fp8'"),
    "mixed": (lambda: ops.quantise([X, X.half()], [4, 4], "fp8"), "one dtype"),
    "bytes": (lambda: ops.dequantise(torch.ones(3).byte(), [4], [(4,)], 1, "int8", BF16), "32 bytes"),
    "moments": (lambda: ops.adamw_pack([X], [X], [X.half()], [X], **ADAMW), "moments 0 must be float32"),
    "numel": (lambda: ops.adamw_pack([X], [X[:3]], [X], [X], **ADAMW), "tensors 0 are of different sizes"),
    "strides": (lambda: ops.adamw_pack([torch.ones(8)[::2]], [X], [X], [X], **ADAMW), "must be contiguous"),
    "step": (lambda: ops.adamw_pack([X], [X], [X], [X], step=torch.ones(2)), "step, lr and scale must be float32"),
    "out half": (lambda: ops.adamw_pack([X], [X], [X], [X], out=X, **ADAMW), "out must be bfloat16 or float16"),
    "gather": (lambda: ops.all_gather(MEMORY, [torch.ones(300)], [300]), "1200 bytes are read of a buffer of 1024"),
    "gather dtypes": (lambda: ops.all_gather(MEMORY, [X, X.half()], [4, 4]), "value 1 must be contiguous, torch.float32"),
    "gather size": (lambda: ops.all_gather(MEMORY, [X], [3]), "value 0 has 4 elements, 1 ranks send 3 each"),
    "gather offset": (lambda: ops.all_gather(MEMORY, [X], [4], offset=2), "at byte 2 cannot be moved"),
    "scatter": (lambda: ops.reduce_scatter(MEMORY, [X], [4], "max", BF16), "unknown operation 'max'; use sum or mean"),
    "scatter size": (lambda: ops.reduce_scatter(MEMORY, [X], [3], "sum", BF16), "part 0 has 4 elements, room is for 3"),
    "channels": (lambda: ops.all_gather(MEMORY, [X], [4], channels=200), "channels must be 1 to 128"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_clear_errors(name):
    call, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_stochastic_rounding_keeps_the_mean():
    x = torch.rand(20_000) + 1.0
    total = sum(ops.stochastic_round(x, seed).double() for seed in range(20))
    assert abs((total / 20 - x.double()).mean()) < 2e-5  # to nearest it would be as small, but not here:
    small = torch.full((20_000,), 1 + 2**-10)
    assert abs(ops.stochastic_round(small, 1).double().mean() - small[0].double()) < 3e-4
    assert torch.equal(small.bfloat16().float(), torch.ones(20_000))
    exact = torch.tensor([0.0, -0.0, 1.5, torch.inf, -torch.inf])
    assert torch.equal(ops.stochastic_round(exact, 3), exact.bfloat16())
    assert ops.stochastic_round(torch.tensor([torch.nan]), 3).isnan()


@pytest.mark.parametrize("kind, tolerance", [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_quantised_gather(kind, tolerance):
    """quantise, gather the bytes, dequantise: what every rank ends up with, and how far off."""
    ranks, whole = 2, [torch.randn(1000), torch.randn(30, 7)]
    sizes = [-(-w.numel() // ranks) for w in whole]
    rows = [
        ops.quantise([w.view(-1)[r * s : (r + 1) * s] for w, s in zip(whole, sizes)], sizes, kind) for r in range(ranks)
    ]
    back = ops.dequantise(torch.cat(rows), sizes, [w.shape for w in whole], ranks, kind, torch.float32)
    for b, w in zip(back, whole):
        bound = w.abs().max() * tolerance if kind == "int8" else w.abs() * tolerance + w.abs().max() * 2.0**-18
        assert ((b - w).abs() <= bound * 1.001).all()
    wild = [torch.tensor([1.0, torch.nan]), torch.full((4,), 2.0**-120)]
    nan, zero = ops.dequantise(ops.quantise(wild, [2, 4], kind), [2, 4], [(2,), (4,)], 1, kind, torch.float32)
    assert nan.isnan().all() and torch.equal(zero, torch.zeros(4))
