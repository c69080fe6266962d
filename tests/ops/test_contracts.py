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
from tests.support.shared_files import over_files
from ztrans import ops
from ztrans.ops import symmetric

T = torch.ops.ztrans


def cast_pack(device):
    parts = [torch.randn(5, device=device), torch.randn(2, 3, device=device)]
    return (
        T.cast_pack.default,
        (parts, [3, 4], 2, torch.zeros(14, dtype=torch.bfloat16, device=device)),
        {},
    )


def unpack(device):
    outs = [torch.zeros(5, device=device), torch.zeros(8, device=device)]
    return T.unpack.default, (torch.randn(14, device=device), [3, 4], 2, outs), {}


def barrier(device):
    memory, _ = tables(device)
    return T.barrier.default, (*memory, 0, 10), {}


def all_gather(device):
    memory, buffers = tables(device)
    outs = [torch.zeros(3, device=device), torch.zeros(4, device=device)]
    return T.all_gather.default, (buffers, *memory, outs, [3, 4], 0, 4, 10), {}


def reduce_scatter(device):
    memory, buffers = tables(device)
    outs = [torch.zeros(3, device=device), torch.zeros(4, device=device)]
    return (
        T.reduce_scatter.default,
        (buffers, *memory, outs, [3, 4], "sum", torch.float32, 0, 4, 10),
        {},
    )


def sum_terms(device):
    outs = [torch.zeros(3, device=device), torch.zeros(4, device=device)]
    terms = torch.randn(2, 7, device=device).bfloat16()
    return T.sum_terms.default, (terms, outs, [3, 4], "mean", 2), {}


def encode(device):
    parts = [torch.randn(5, device=device), torch.randn(2, 3, device=device)]
    out = torch.zeros(2, 16, dtype=torch.uint8, device=device)
    return T.encode.default, (parts, [3, 4], 2, 8, 4, "int", out), {}


def decode(device):
    outs = [torch.zeros(5, device=device), torch.zeros(8, device=device)]
    buffer = torch.zeros(2, 16, dtype=torch.uint8, device=device)
    return T.decode.default, (buffer, [3, 4], 8, 4, "fp8", outs), {}


def sum_coded(device):
    outs = [torch.zeros(3, device=device), torch.zeros(4, device=device)]
    terms = [torch.zeros(12, dtype=torch.uint8, device=device) for _ in range(2)]
    return T.sum_coded.default, (terms, outs, [3, 4], "mean", 2, 4, 4, "int"), {}


def fused_adamw(device):
    return (
        T.fused_adamw_.default,
        adam_lists(device),
        ADAM | {"lr": torch.tensor(0.1, device=device)},
    )


def stochastic_round(device):
    key = torch.ones((), dtype=torch.int32, device=device)
    old = torch.zeros(2, 3, dtype=torch.bfloat16, device=device)
    x = torch.randn(2, 3, device=device)
    return T.stochastic_round.default, (old, x, key, [5, 3], [2, 0]), {}


def widened(device):
    return T.widened.default, (torch.arange(6, dtype=torch.uint8, device=device).view(2, 3),), {}


def narrowed(device):
    return T.narrowed.default, (torch.linspace(-3, 3, 6, device=device).view(2, 3), torch.int8), {}


def leaf_keys(device):
    return T.leaf_keys.default, (torch.ones((), device=device), [3, 2**32 - 1]), {}


ADAM = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6}


def adam_lists(device):
    lists = [[torch.rand(5, device=device), torch.rand(2, 3, device=device)] for _ in range(4)]
    lists[1] = [g.bfloat16() for g in lists[1]]
    return (*lists, [torch.ones((), device=device) for _ in range(2)])


MEMORY = symmetric.in_one_process(1, 1024)[0]


def tables(device):
    if device == "cpu":
        return (MEMORY.pads, MEMORY.error), MEMORY.buffers
    pads, buffers = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    return (pads, torch.zeros(1, dtype=torch.int32)), buffers


SAMPLES = [
    *(cast_pack, unpack, barrier, all_gather, reduce_scatter, sum_terms),
    *(encode, decode, sum_coded, fused_adamw, stochastic_round, leaf_keys, widened, narrowed),
]


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.__name__)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [2, 8, 64])
def test_a_mean_of_a_power_of_two_of_ranks_has_the_bits_of_a_division(dtype, count):
    """Subnormal quotients too, which are rounded. There is one launch, and no tensor for the divisor."""
    draw = torch.Generator().manual_seed(count)
    total = torch.randint(0, 256, (1 << 18,), generator=draw, dtype=torch.uint8).view(dtype)
    total = total[~total.isnan()]
    divided = total / torch.full((), count)
    assert torch.equal(ops.mean(total.clone(), count), divided)
    with FakeTensorMode():
        graph = make_fx(lambda x: ops.mean(x, count))(torch.empty(4, dtype=dtype)).graph
    calls = [n.target for n in graph.nodes if n.op == "call_function"]
    assert calls == [torch.ops.aten.mul_.Tensor]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.__name__)
def test_one_node_for_a_gpu_that_is_not_there(sample):
    with FakeTensorMode():
        op, args, kwargs = sample("cuda")
        graph = make_fx(lambda *args: op(*args, **kwargs))(*args).graph
    nodes = [
        n for n in graph.nodes if n.op == "call_function" and n.target.__class__ is not type(iter)
    ]
    assert [n.target for n in nodes if "getitem" not in str(n.target)] == [op]


@pytest.mark.slow
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
    with pytest.raises(
        RuntimeError, match=r"the kernel double needs Triton, .*: pip install triton"
    ):
        kernel.kernel(_double)[(1,)]
    with pytest.raises(RuntimeError, match="needs Triton"):
        kernel.element(torch.float32)


def _double(x): ...


def test_files_of_slower_ranks_do_not_write_over_data(tmp_path, monkeypatch):
    """When torch extends a file, it writes a zero at the start, so each file must have its full size before."""
    true, seen = torch.from_file, []

    def late(file, **options):
        seen.append((Path(file).stat().st_size, options["size"]))
        return true(file, **options)

    monkeypatch.setattr(torch, "from_file", late)
    over_files(tmp_path, 0, 2, 100).mine.fill_(7)
    assert over_files(tmp_path, 1, 2, 100).mapping[0][:100].eq(7).all()
    assert len(seen) == 4 and all(size >= wanted for size, wanted in seen)


@pytest.mark.slow
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


def test_a_value_gathered_alone_is_a_view():
    buffer = torch.arange(6.0)
    (value,) = ops.unpack(buffer, [3], [(5,)], 2)
    assert value.data_ptr() == buffer.data_ptr() and value.tolist() == [0, 1, 2, 3, 4]


X, META = torch.ones(4), torch.ones(4, device="meta")
ONE = torch.ones(())
BF16 = torch.bfloat16
BYTES = torch.zeros(8, dtype=torch.uint8)
WRONG = {
    "no parts": (lambda: ops.cast_pack([], [], BF16), "no parts"),
    "sizes": (lambda: ops.cast_pack([X], [4, 4], BF16), "1 parts, but 2 sizes"),
    "small": (
        lambda: ops.cast_pack([X], [3], BF16),
        "part 0 has 4 elements, room is for 1 times 3",
    ),
    "devices": (
        lambda: T.cast_pack([X, META], [4, 4], 1, torch.ones(8, dtype=BF16)),
        "one device, got cpu and meta",
    ),
    "out dtype": (
        lambda: ops.cast_pack([X], [4], BF16, out=torch.ones(4)),
        "out is torch.float32, not torch.bfloat16",
    ),
    "out size": (
        lambda: ops.cast_pack([X], [4], BF16, out=torch.ones(5, dtype=BF16)),
        "contiguous and hold 4",
    ),
    "out stride": (
        lambda: ops.cast_pack([X], [4], BF16, out=torch.ones(8, dtype=BF16)[::2]),
        "must be contiguous",
    ),
    "buffer": (lambda: ops.unpack(X, [1, 2], [(1,), (2,)], 2), "hold 2 times 3 elements"),
    "shape": (
        lambda: ops.unpack(X, [1, 1], [(3,), (1,)], 2),
        "value 0 has 3 elements, the buffer 2 times 1",
    ),
    "unpacked dtype": (
        lambda: T.unpack(X, [2], 2, [X.half()]),
        "value 0 must be contiguous, torch.float32 and on cpu",
    ),
    "unpacked gaps": (
        lambda: T.unpack(X, [1, 1], 2, [X[:2], X[::2]]),
        "value 1 must be contiguous",
    ),
    "gather": (
        lambda: ops.all_gather(MEMORY, [torch.ones(300)], [300]),
        "reads 1200 bytes from a buffer of 1024",
    ),
    "gather dtypes": (
        lambda: ops.all_gather(MEMORY, [X, X.half()], [4, 4]),
        "value 1 must be contiguous, torch.float32",
    ),
    "gather size": (
        lambda: ops.all_gather(MEMORY, [X], [3]),
        "value 0 has 4 elements, 1 ranks send 3 each",
    ),
    "gather width": (
        lambda: ops.all_gather(MEMORY, [X.to(torch.complex128)], [4]),
        "values of torch.complex128 cannot",
    ),
    "scatter": (
        lambda: ops.reduce_scatter(MEMORY, [X], [4], "max", BF16),
        "unknown operation 'max'; use sum or mean",
    ),
    "scatter size": (
        lambda: ops.reduce_scatter(MEMORY, [X], [3], "sum", BF16),
        "part 0 has 4 elements, room is for 3",
    ),
    "sum": (lambda: ops.sum_terms(X.view(2, 2), [X[:2]], [2], "max", 2), "use sum or mean"),
    "sum rows": (
        lambda: ops.sum_terms(X.view(2, 2), [X[:1]], [1], "sum", 2),
        r"contiguous rows of 1 elements, not \(2, 2\)",
    ),
    "sum dtype": (
        lambda: ops.sum_terms(X.view(2, 2).long(), [X[:2]], [2], "sum", 2),
        "torch.int64 to torch.float32 cannot be summed",
    ),
    "sum size": (
        lambda: ops.sum_terms(X.view(2, 2), [X], [2], "sum", 2),
        "out 0 has 4 elements, room is for 2",
    ),
    "sum outs": (
        lambda: ops.sum_terms(X.view(2, 2), [X[:1], X[:1].half()], [1, 1], "sum", 2),
        "out 1 must be contiguous, torch.float32",
    ),
    "no coded parts": (lambda: ops.encode_pack([], [], 8, 4), "encode: no parts"),
    "code": (
        lambda: ops.encode(X.view(2, 2), 4, 4, "fp8"),
        "encode: no codes of 4 bits and kind 'fp8'",
    ),
    "block": (lambda: ops.encode(X.view(2, 2), 8, 3), "encode: a block must be even, got 3"),
    "coded sizes": (lambda: ops.encode_pack([X], [4, 4], 8, 4), "1 parts, but 2 sizes"),
    "coded dtype": (
        lambda: ops.encode_pack([X.long()], [4], 8, 4),
        "part 0 is torch.int64; codes are of fp32",
    ),
    "coded size": (
        lambda: ops.encode_pack([X], [3], 8, 4),
        "part 0 has 4 elements, room is for 1 times 3",
    ),
    "coded out": (
        lambda: ops.encode(X.view(2, 2), 8, 4, out=X.byte()),
        r"the buffer must be uint8\[2, 8\] with contiguous rows, not uint8\[4\]",
    ),
    "coded devices": (
        lambda: T.encode([META], [4], 1, 8, 4, "int", torch.zeros(1, 8, dtype=torch.uint8)),
        "one device, got meta and cpu",
    ),
    "codes": (
        lambda: ops.decode(X.byte().view(1, 4), 4, BF16, 8, 4),
        r"decode: the buffer must be uint8\[1, 8\]",
    ),
    "decoded dtype": (
        lambda: ops.decode(BYTES.view(1, 8), 4, torch.int64, 8, 4),
        "decode: torch.int64 is not fp32, bf16 or fp16",
    ),
    "decoded out": (
        lambda: ops.decode(BYTES.view(1, 8), 4, BF16, 8, 4, out=X),
        "decode: out is torch.float32, not torch.bfloat16",
    ),
    "decoded values": (
        lambda: T.decode(BYTES.view(1, 8), [], 8, 4, "int", [X]),
        "0 sizes, but 1 values",
    ),
    "decoded shape": (
        lambda: T.decode(BYTES.view(1, 8), [3], 8, 4, "int", [X]),
        "value 0 has 4 elements, the buffer 1 times 3",
    ),
    "coded sum": (lambda: ops.sum_coded([BYTES], [X], [4], "max", 1, 8, 4), "use sum or mean"),
    "coded terms": (
        lambda: ops.sum_coded([], [X], [4], "sum", 1, 8, 4),
        "0 terms, 1 outs, 1 sizes",
    ),
    "coded row": (
        lambda: ops.sum_coded([BYTES[:4]], [X], [4], "sum", 1, 8, 4),
        r"sum_coded: the buffer must be uint8\[1, 8\]",
    ),
    "coded sum size": (
        lambda: ops.sum_coded([BYTES], [X], [3], "sum", 1, 8, 4),
        "out 0 has 4 elements, room is for 3",
    ),
    "coded sum dtype": (
        lambda: ops.sum_coded([BYTES], [X.long()], [4], "sum", 1, 8, 4),
        "sum_coded: torch.int64 is not fp32, bf16 or fp16",
    ),
    "moments": (
        lambda: T.fused_adamw([X], [X], [], [X], [ONE], **ADAM, lr=ONE),
        "update: 1 parameters, but 0 tensors in exp_avgs",
    ),
    "steps": (
        lambda: T.fused_adamw([X], [X], [X], [X], [], **ADAM, lr=ONE),
        "1 parameters, but 0 numbers of steps",
    ),
    "scale": (
        lambda: T.fused_adamw([X], [X], [X], [X], [ONE], **ADAM, lr=ONE, scale=ONE.double()),
        r"scale must be an fp32 scalar on cpu; got torch.float64\[\] on cpu",
    ),
    "step dtype": (
        lambda: T.fused_adamw([X], [X], [X], [X], [ONE.double()], **ADAM, lr=ONE),
        "state_steps must be fp32 on the device of the parameters",
    ),
    "gradient shape": (
        lambda: T.fused_adamw([X], [X[:2]], [X], [X], [ONE], **ADAM, lr=ONE),
        r"grads\[0\] must have the shape \[4\] of its parameter; got \[2\]",
    ),
    "gradient dtypes": (
        lambda: T.fused_adamw([X, X], [X, X.half()], [X, X], [X, X], [ONE, ONE], **ADAM, lr=ONE),
        "gradients must be all fp32, all bf16 or all fp16; got torch.float16, torch.float32",
    ),
    "parameters": (
        lambda: T.fused_adamw([X.half()], [X], [X], [X], [ONE], **ADAM, lr=ONE),
        "self must be fp32; got torch.float16",
    ),
    "gaps": (
        lambda: T.fused_adamw_([torch.ones(8)[::2]], [X], [X], [X], [ONE], **ADAM, lr=ONE),
        "self must be contiguous",
    ),
    "halves": (
        lambda: T.fused_adamw([X], [X], [X], [X], [ONE], [X], **ADAM, lr=ONE),
        "update: halves must be all bf16 or all fp16; got torch.float32",
    ),
    "halves with gaps": (
        lambda: T.fused_adamw_(
            [X], [X], [X], [X], [ONE], [torch.ones(8).half()[::2]], **ADAM, lr=ONE
        ),
        "update: halves must be contiguous",
    ),
    "too few halves": (
        lambda: T.fused_adamw(
            [X, X], [X, X], [X, X], [X, X], [ONE, ONE], [X.half()], **ADAM, lr=ONE
        ),
        "update: 2 parameters, but 1 tensors in halves",
    ),
    "update devices": (
        lambda: T.fused_adamw_([X], [META], [X], [X], [ONE], **ADAM, lr=ONE),
        "all tensors must be on one device; got cpu, meta",
    ),
    "channels": (
        lambda: ops.all_gather(MEMORY, [X], [4], channels=200),
        "channels must be 1 to 128",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_clear_errors(name):
    call, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
