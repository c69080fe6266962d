"""Processors as the cost model sees them, and the figures of the ones that ztrans ships.

A shipped figure is the dense one of the data sheet times the share that kernels reach, with its source beside it.
Nothing is fitted to runs of whole steps: `python -m benchmarks.published` compares the model with them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

# The share of its speed that a matrix product loses while a message moves, by the carrier of the message: NCCL's ring
# with 24 blocks, a kernel with 32 blocks that reads symmetric memory, or copy engines (`contention` in gpu.md, on an
# H200). Two blocks cost half as much as 24, so other numbers of blocks change little. Kernels that wait for memory lose
# bandwidth instead (see `contention.py`).
LOST_BESIDE = (("nccl", 0.30), ("kernel", 0.38), ("copies", 0.07))

# Bytes of a GPU's memory that the live values of a step cannot use: the CUDA context with its kernels, the workspaces
# of cuBLAS and cuDNN, NCCL's buffers, and rounding and gaps in PyTorch's allocator. On small GPUs it is a share of the
# memory, because their steps are small too.
GPU_RESERVE = 4e9
RESERVED_SHARE = 0.1


@dataclass(frozen=True)
class Device:
    """The processor of one rank.

    `flops` has rates of products by dtype. "tf32" is for fp32 products that PyTorch runs in TF32, "f32" for all other
    fp32 products. PyTorch runs matmuls in TF32 if torch.get_float32_matmul_precision() is "high" or "medium" when the
    step is planned (by default it is not), and convolutions if torch.backends.cudnn.allow_tf32 is set (by default it
    is).

    The rates "attention" and "attention backward" are for fused attention in half precision, with heads of 128 and long
    sequences (see `roofline`); "cudnn attention" and "cudnn attention backward" are for the kernels of cuDNN. A missing
    rate is replaced: backward by forward, cuDNN by the other kernels, and attention by the rate of matmuls.
    """

    name: str
    flops: tuple[tuple[str, float], ...]  # (dtype, FLOP/s of matmuls)
    bandwidth: float  # bytes/s of memory that a copy reaches
    kernel_gap: float  # seconds of the processor between two kernels
    memory: float = float("inf")  # bytes
    # Seconds of the host for a call that launches no kernel, such as a view.
    call_overhead: float = 1e-6
    # Bytes of memory that a step may not use; by default `GPU_RESERVE`, or `RESERVED_SHARE` of the memory if less.
    reserve: float | None = None
    # Whether gloo carries its collectives, not NCCL. Compute then packs and unpacks them; a GPU does so beside compute.
    gloo: bool = dataclasses.field(default=False, repr=False)
    host_link: str = "pcie5"  # the name of the link between its memory and its host's
    # (carrier of a message, the share of its speed that a product loses while the message moves)
    lost_beside: tuple[tuple[str, float], ...] = dataclasses.field(default=(), repr=False)
    # Seconds of the host to launch a kernel. A GPU runs one while its host launches the next.
    launch_overhead: float = dataclasses.field(default=0.0, repr=False)
    # A matmul takes as long as one with all three sizes larger by this many elements.
    edge: float = dataclasses.field(default=0.0, repr=False)
    # The share of `bandwidth` that kernels other than copies reach.
    streaming: float = dataclasses.field(default=1.0, repr=False)
    # How many times as long as a copy it takes to encode or decode, for each byte that is read and written.
    coding: float = dataclasses.field(default=1.0, repr=False)

    @property
    def limit(self) -> int | None:
        """The bytes that a step may have live; None if unknown.

        A CPU has no limit: it shares its memory with everything else on the host.

        >>> H100.limit == H100.memory - GPU_RESERVE, CPU.limit
        (True, None)
        """
        if self.gloo or self.memory == float("inf"):
            return None
        reserve = self.reserve
        if reserve is None:
            reserve = min(GPU_RESERVE, RESERVED_SHARE * self.memory)
        return int(self.memory - reserve)

    def rate(self, dtype: str) -> float:
        """The FLOP/s of matmuls in `dtype`; a dtype without a rate has the rate of f32.

        >>> H100.rate("bf16") > H100.rate("tf32") > H100.rate("f32") == H100.rate("i64")
        True
        """
        rates = dict(self.flops)
        return rates.get(dtype, rates["f32"])

    def with_power(self, share: float) -> Device:
        """This device limited to a share of its power.

        A processor that reaches its power limit lowers its clock. Its power grows as the clock times the square of the
        voltage, and the voltage about as the clock, so the clock follows the cube root of the power. The memory has a
        clock of its own.

        >>> H100.with_power(0.5).rate("bf16") / H100.rate("bf16") > 0.79
        True
        """
        return self.with_clock(share ** (1 / 3))

    def with_clock(self, share: float) -> Device:
        """This device with its rates of products and attention scaled by `share`.

        >>> H100.with_clock(0.5).rate("bf16") / H100.rate("bf16")
        0.5
        """
        return dataclasses.replace(
            self, flops=tuple((name, rate * share) for name, rate in self.flops)
        )


GIB = 2**30
_ATTENTION = (
    "attention",
    "attention backward",
    "cudnn attention",
    "cudnn attention backward",
)


def _rates(
    matmuls: float, attention: tuple[float, ...], **sheet: float
) -> tuple[tuple[str, float], ...]:
    """The rates of a device in FLOP/s: products reach the share `matmuls` of the TFLOP/s in its data sheet.

    `attention` has TFLOP/s in the order of `_ATTENTION`, as far as they are known.
    """
    rates = {dtype: matmuls * tera * 1e12 for dtype, tera in sheet.items()}
    rates["f16"] = rates["bf16"]
    for name, tera in zip(_ATTENTION, attention):
        rates[name] = tera * 1e12
    return tuple(rates.items())


# The share of the data sheet that large matmuls reach on Hopper. Products of 8,192 tokens with width 2,048, alone on
# the GPU, reach 738 TFLOP/s (`contention` in gpu.md), which is 0.746; their edges cost 0.09 of that.
HOPPER_MATMULS = 0.82
# What GPUs have in common. Two kernels of a stream are 2 us apart: PyTorch's Kineto traces show 1 to 3. The host needs
# 10 us for an operation of eager PyTorch, forward or backward: 4 for an addition in a loop, and 22 to 30 for GPT-2 on
# the slow host of benchmarks/results/gpu_h100.md. Kernels that compute while they stream reach 0.82 to 0.87 of a copy
# (torch._foreach_copy_ in gpu_h100.md); those that encode and decode stream too, so they count as much.
GPU = Device(
    "GPU",
    (("f32", 1e12),),
    bandwidth=1e12,
    kernel_gap=2e-6,
    launch_overhead=10e-6,
    lost_beside=LOST_BESIDE,
    streaming=0.85,
    coding=1 / 0.85,
)


# Memory is the total capacity that PyTorch reports, for instance in its out-of-memory errors. It is more than the
# number on the box in GB, and less than that number in GiB.
#
# Data sheet of the H100 SXM5: 989 TFLOP/s in bf16, 3.35 TB/s (a copy reaches 3.0), and 79.2 GiB (gpu_h100.md).
# Attention: FlashAttention-2 with heads of 128, causal, where long sequences reach 335 TFLOP/s in forward and 322 in
# backward, and with cuDNN 539 and 516 (figures 5 and 6 of the FlashAttention-3 paper). A tile of a Hopper matmul has
# 128 rows.
H100 = dataclasses.replace(
    GPU,
    name="H100",
    flops=_rates(
        HOPPER_MATMULS, (340, 325, 550, 520), bf16=989, tf32=495, f32=67, f64=67, f8e4m3=1979
    ),
    bandwidth=3.0e12,
    memory=int(79.2 * GIB),
    edge=128,
)
# Data sheet: the processor of the H100 with memory of 4.8 TB/s. A copy reaches the same share of it (gpu.md).
H200 = dataclasses.replace(H100, name="H200", bandwidth=4.3e12, memory=int(139.8 * GIB))
# The Grand Teton hosts of torchtitan's benchmarks: 96 GB of HBM2e at 2.4 TB/s, limited to 500 of 700 W. Its page says
# that the peak of this card is between those of the SXM and of the NVL, 989 and 835 TFLOP/s; this is their mean.
H100_96GB_500W = dataclasses.replace(
    H100.with_clock((989 + 835) / 2 / 989).with_power(500 / 700),
    name="H100 96GB 500W",
    bandwidth=2.4e12 * 3.0 / 3.35,
    memory=int(95.0 * GIB),
)
# Data sheet of the A100 SXM 80GB: 312 TFLOP/s, 2.04 TB/s. cuBLAS reaches 0.8 to 0.85 of it in large matmuls, and
# FlashAttention-2 up to 0.73 in forward and 0.63 in backward (its paper); a causal mask costs forward a tenth of that.
# Tiles of 128 x 128.
A100 = dataclasses.replace(
    GPU,
    name="A100",
    flops=_rates(0.82, (205, 196), bf16=312, tf32=156, f32=19.5, f64=19.5),
    bandwidth=1.8e12,
    memory=int(79.15 * GIB),
    host_link="pcie4",
    edge=64,
)
# Data sheet of the HGX B200: 2,250 TFLOP/s dense, 8 TB/s, 1,000 W. The shares are Hopper's, where power limits matmuls
# too; attention by cuDNN reaches 0.5 of the sheet.
B200 = dataclasses.replace(
    GPU,
    name="B200",
    flops=_rates(HOPPER_MATMULS, (1100,), bf16=2250, tf32=1125, f32=75, f64=37, f8e4m3=4500),
    bandwidth=7.2e12,
    memory=int(178.35 * GIB),
    edge=128,
)
# Data sheet: 1,307 TFLOP/s dense, 5.3 TB/s. AMD measures 708 TFLOP/s in bf16 (ROCm blogs, Measuring
# Max-Achievable FLOPs, part 2), which is 0.54. Matmul tiles have 256 rows. Copies reach 0.8 (BabelStream: 4.2 TB/s).
MI300X = dataclasses.replace(
    GPU,
    name="MI300X",
    flops=_rates(0.54, (350,), bf16=1307, tf32=653, f32=163, f64=163, f8e4m3=2615),
    bandwidth=4.2e12,
    memory=int(191.98 * GIB),
    edge=128,
)
# Ada white paper: 165 TFLOP/s in bf16 with sums in fp32, 1,008 GB/s. cuBLAS reaches nearly all of it, since the
# tensor cores, not the power, are the limit.
RTX4090 = dataclasses.replace(
    GPU,
    name="RTX 4090",
    flops=_rates(0.92, (140,), bf16=165.2, tf32=82.6, f32=82.6, f64=1.3, f8e4m3=330.3),
    bandwidth=0.93e12,
    memory=int(23.64 * GIB),
    host_link="pcie4",
    edge=64,
)
# A core of a server of 2024, as `zt.calibrate` measures it. For a MiB of fp32 it takes 0.50 ms to encode 8 bits in
# blocks of 256, and 0.25 ms to decode them, where copies move 8.4 GB/s.
CPU = Device(
    "one CPU core",
    (("f32", 1.0e11), ("f64", 5e10), ("bf16", 2.5e10)),
    bandwidth=1.0e10,
    kernel_gap=5e-6,
    gloo=True,
    host_link="memory",
    coding=2.4,
)
DEVICES = {
    "h100": H100,
    "h200": H200,
    "a100": A100,
    "cpu": CPU,
    "h100_96gb_500w": H100_96GB_500W,
    "b200": B200,
    "mi300x": MI300X,
    "rtx4090": RTX4090,
}
