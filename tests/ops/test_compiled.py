"""Every kernel, compiled for sm_80 and sm_90 on a machine without a GPU, moves 16 bytes at a time and spills nothing."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from tests.ops.compiled import compiled

pytest.importorskip("triton", reason="kernels need Triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from ztrans.ops.kernel import element

module = {
    name: importlib.import_module(f"ztrans.ops.{name}")
    for name in (
        "all_gather",
        "barrier",
        "move",
        "reduce_scatter",
        "fused_adamw",
        "stochastic_round",
        "encode",
        "decode",
    )
}

LOAD, STORE = r"ld\.global\S*\.v4", r"st\.global\S*\.v4"
TABLES = {"rows": "*i64", "bases": "*i64"}
RANKS = {
    "buffers": "*i64",
    "pads": "*i64",
    "error": "*i32",
    "first": "i32",
    "spins": "i32",
    "count": "i32",
}
pytestmark = pytest.mark.parametrize("capability", [80, 90])


def check(kernel, loads: int, stores: int, registers: int) -> None:
    """The fast path has as many 16-byte loads and stores as the elements of a thread need, and uses no stack."""
    assert kernel.stack == 0
    assert kernel.count(LOAD) >= loads and kernel.count(STORE) >= stores
    assert kernel.registers <= registers


@pytest.mark.slow
@pytest.mark.parametrize(
    "src, dst, loads, stores",
    [
        (torch.float32, torch.bfloat16, 4, 2),
        (torch.bfloat16, torch.bfloat16, 2, 2),
        (torch.float32, torch.float32, 4, 4),
    ],
    ids=str,
)
def test_move(capability, tmp_path, src, dst, loads, stores):
    same = src == dst
    constants = {"SRC": element(src, same), "DST": element(dst, same), "BLOCK": 4096}
    kernel = compiled(module["move"]._move, capability, tmp_path, TABLES, constants, num_warps=8)
    check(kernel, loads, stores, 40)
    # The instruction converts two elements at a time, and rounds to nearest even.
    assert kernel.count(r"cvt\.rn\.bf16x2\.f32") >= (0 if same else 8)


def test_stochastic_round(capability, tmp_path):
    types = dict.fromkeys(("count", "start", "inner", "skipped"), "i32")
    types |= {"x": "*fp32", "key": "*i32", "out": "*bf16"}
    kernel = compiled(
        module["stochastic_round"]._round, capability, tmp_path, types, {"BLOCK": 2048}, num_warps=8
    )
    assert kernel.stack == 0 and kernel.registers <= 40


@pytest.mark.parametrize("world", [2, 8])
def test_all_gather(capability, tmp_path, world):
    types = TABLES | RANKS | {"values": "i32"}
    constants = {
        "WORLD": world,
        "SYNC": True,
        "ITEM": element(torch.bfloat16, bits=True),
        "BLOCK": 8192,
    }
    options = {"num_warps": 8, "maxnreg": 128}
    kernel = compiled(
        module["all_gather"]._gather, capability, tmp_path, types, constants, **options
    )
    check(kernel, 4, 4, 128)
    synchronises(kernel)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
def test_reduce_scatter(capability, tmp_path, world, mean):
    types = TABLES | RANKS | {"values": "i32", "total": "i32"}
    constants = {
        "TERM": element(torch.bfloat16), "OUT": element(torch.float32), "DIVISOR": world if mean else 1, "WORLD": world,
        "ALIGNED": True, "SYNC": True, "BLOCK": 2048,
    }  # fmt: skip
    options = {"num_warps": 8, "maxnreg": 128}
    kernel = compiled(
        module["reduce_scatter"].sum_rows, capability, tmp_path, types, constants, **options
    )
    check(kernel, world, 2, 128)
    synchronises(kernel)
    if mean and world == 3:
        assert kernel.count(r"\bdiv\.rn\.f32") >= 8 and not kernel.count(
            r"\bdiv\.\S*(approx|full|ftz)"
        )


@pytest.mark.parametrize("world", [1, 3, 8, 64])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
def test_sum_terms(capability, tmp_path, world, aligned):
    """Without a barrier; subnormal numbers are kept, and no product is fused with a sum."""
    types = TABLES | RANKS | {"error": "*i64", "values": "i32", "total": "i32"}
    constants = {
        "TERM": element(torch.bfloat16), "OUT": element(torch.float32), "DIVISOR": world, "WORLD": world,
        "ALIGNED": aligned, "SYNC": False, "BLOCK": 2048,
    }  # fmt: skip
    options = {"num_warps": 8, "maxnreg": 128}
    kernel = compiled(
        module["reduce_scatter"].sum_rows, capability, tmp_path, types, constants, **options
    )
    check(kernel, world if aligned else 0, 2 if aligned else 0, 128)
    assert aligned or not kernel.count(LOAD)
    assert not kernel.count(r"\batom\.|\bfma\.|\.ftz")


@pytest.mark.parametrize("world", [2, 3, 8])
def test_terms_in_bf16_are_summed_in_fp32_for_a_result_in_fp16(capability, tmp_path, world):
    """LLVM adds two bf16 numbers in fp16 if the sum is rounded to fp16: it compares digits, and not exponents."""
    types = TABLES | RANKS | {"error": "*i64", "values": "i32", "total": "i32"}
    constants = {
        "TERM": element(torch.bfloat16), "OUT": element(torch.float16), "DIVISOR": 1, "WORLD": world,
        "ALIGNED": True, "SYNC": False, "BLOCK": 2048,
    }  # fmt: skip
    options = {"num_warps": 8, "maxnreg": 128}
    kernel = compiled(
        module["reduce_scatter"].sum_rows, capability, tmp_path, types, constants, **options
    )
    assert not kernel.count(r"\badd\S*\.f16")


NUMBERS = {name: "fp32" for name in ("beta1", "beta2", "weight_decay", "eps")}
SCALARS = {
    "powers": "*fp32",
    "rate": "*fp32",
    "scale": "*fp32",
    "count": "i32",
    "keys": "*i32",
    "places": "*i64",
}
UPDATE = TABLES | NUMBERS | SCALARS


@pytest.mark.parametrize(
    "dtype, loads", [(torch.bfloat16, 7), (torch.float16, 7), (torch.float32, 8)], ids=str
)
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
def test_adamw(capability, tmp_path, dtype, loads, halves):
    """A thread has 8 elements. Each is decayed, and has two moments, a root and two divisions, all rounded exactly."""
    constants = {
        "PARAM": element(torch.float32), "GRAD": element(dtype), "HALF": element(torch.bfloat16), "HALVES": halves,
        "SCALES": True, "LOADS_RATE": True, "DECAYS": True, "ROUNDS": False, "BLOCK": 2048,
    }  # fmt: skip
    kernel = compiled(
        module["fused_adamw"]._adam, capability, tmp_path, UPDATE, constants, num_warps=8
    )
    check(kernel, loads, 7 if halves else 6, 80)
    rounds_exactly(kernel)
    both_paths = 2 * 8
    assert kernel.count(r"\bfma\.rn\.f32") == 5 * both_paths
    assert kernel.count(r"\bsqrt\.rn\.f32") == both_paths + 1
    assert kernel.count(r"\bdiv\.rn\.f32") == 2 * both_paths + 1


def test_adamw_of_state_in_bf16(capability, tmp_path):
    """A thread loads and stores 8 elements of 2 bytes at once. Nothing but the update is computed twice."""
    constants = {
        "PARAM": element(torch.bfloat16), "GRAD": element(torch.bfloat16), "HALF": element(torch.bfloat16),
        "HALVES": False, "SCALES": True, "LOADS_RATE": True, "DECAYS": True, "ROUNDS": True, "BLOCK": 2048,
    }  # fmt: skip
    kernel = compiled(
        module["fused_adamw"]._adam, capability, tmp_path, UPDATE, constants, num_warps=8
    )
    check(kernel, 4, 3, 128)
    rounds_exactly(kernel)


def rounds_exactly(kernel) -> None:
    """Nothing is approximate, and small numbers are not taken for zero."""
    assert not kernel.count(r"\.(approx|full|ftz)\b")


def test_barrier(capability, tmp_path):
    types = {name: RANKS[name] for name in ("pads", "error", "first", "spins")}
    kernel = compiled(
        module["barrier"]._barrier, capability, tmp_path, types, {"WORLD": 8}, num_warps=1
    )
    check(kernel, 0, 0, 48)
    synchronises(kernel)


def synchronises(kernel) -> None:
    """Signals are written with release and read with acquire, and are visible to the whole system.

    The error word is read by atomic operations of the system too.
    """
    assert (
        kernel.count(r"atom\.global\S*sys\S*release\S*exch|atom\.global\S*release\S*sys\S*exch")
        >= 1
    )
    assert kernel.count(r"(ld|atom)\.global\S*acquire") >= 1
    assert kernel.count(r"\batom\.global") == kernel.count(r"\batom\.global\S*\.sys\.")


CODES = [(8, 256, False), (4, 64, False), (8, 256, True)]
NAMES = ["i8", "i4", "e4m3"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "block", "fp8"), CODES, ids=NAMES)
def test_encode(capability, tmp_path, dtype, bits, block, fp8):
    """A thread has 32 elements. Scales and their reciprocals are divided exactly."""
    if fp8 and capability < 90:
        pytest.skip("torch casts to floats of 8 bits")
    encode = module["encode"]
    constants = encode.constants(bits, block)
    constants |= {
        "SRC": element(dtype),
        "FP8": fp8,
        "LEAST": encode.LEAST,
        "MOST": encode.MOST,
        "GREATEST": 127.0,
    }
    types = TABLES | {"out": "*i8"}
    options = {"num_warps": constants.pop("num_warps")}
    kernel = compiled(encode._encode, capability, tmp_path, types, constants, **options)
    check(kernel, 128 // 16 if dtype == torch.float32 else 4, 2 if bits == 8 else 1, 128)
    rounds_exactly(kernel)
    assert kernel.count(r"\bdiv\.rn\.f32") >= 2 and not kernel.count(r"\bfma\.")


@pytest.mark.parametrize(("world", "dtype"), [(1, torch.bfloat16), (8, torch.float32)], ids=str)
@pytest.mark.parametrize(("bits", "block", "fp8"), CODES, ids=NAMES)
def test_decode(capability, tmp_path, dtype, bits, block, fp8, world):
    """Terms are added in fp32, and no product is fused with a sum."""
    if fp8 and capability < 90:
        pytest.skip("torch casts from floats of 8 bits")
    constants = module["encode"].constants(bits, block)
    constants |= {"OUT": element(dtype), "FP8": fp8, "WORLD": world, "DIVISOR": world}
    types = TABLES | {"terms": "*i64"}
    options = {"num_warps": constants.pop("num_warps")}
    kernel = compiled(
        module["decode"].decode_rows_of, capability, tmp_path, types, constants, **options
    )
    check(kernel, 1, 4 if dtype == torch.float32 else 2, 128)
    assert not kernel.count(r"\bfma\.|\.ftz")
