"""The Triton kernels that Inductor writes for an H100, on a machine without a GPU, and what Triton compiles of them."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from triton.runtime.driver import driver

from ztrans.runtime.inductor.compiler import fake

SIZES = {
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
}
H100 = DeviceProperties(type="cuda", index=0, cc=90, major=9, warp_size=32, **SIZES)


@contextlib.contextmanager
def _as_on_an_h100() -> Iterator[None]:
    from triton.backends.compiler import GPUTarget

    attention: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0
    )

    def permuted(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
        """`_permute_strides`, whose copy of a fake tensor needs a GPU."""
        last = x.ndim - 1
        order = [last, *sorted(range(last), key=strides.__getitem__)]
        return x.new_empty_strided(x.shape, attention._construct_strides(x.shape, order))

    patches = [
        mock.patch.object(DeviceProperties, "create", lambda device: H100),
        mock.patch.object(attention, "_permute_strides", permuted),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        mock.patch.object(driver, "_active", gpu),
        mock.patch(
            "torch.cuda.get_device_properties",
            lambda *_: SimpleNamespace(name="NVIDIA H100", major=9, gcnArchName="", **SIZES),
        ),
        mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
        mock.patch("torch.cuda.current_device", lambda: 0),
        mock.patch("torch._inductor.scheduler.has_triton", lambda *_: True),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def sources(
    function: Callable, shapes: Sequence[tuple[torch.dtype, tuple[int, ...]]]
) -> dict[str, str]:
    """The sources of the kernels of a function of tensors on a GPU, by their names."""
    with _as_on_an_h100():
        with fake() as mode:
            fakes = [torch.empty(shape, dtype=dtype, device="cuda:0") for dtype, shape in shapes]
            module = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
        module.graph.eliminate_dead_code()
        with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), torch.no_grad():
            graph = GraphLowering(module, shape_env=mode.shape_env)
            with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
                graph.run(*fakes)
                code = graph.codegen()[0].value
    return dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL))


def compiled(name: str, source: str, folder: Path) -> str:
    """The PTX that Triton compiles of a kernel for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launched: dict[str, Any] = {}

    def heuristic(*_: Any, triton_meta: dict, **options: Any) -> Callable:
        launched.update(triton_meta, **options)
        return lambda kernel: kernel

    path = folder / f"{name}.py"
    path.write_text(source)
    kinds = ("template", "pointwise", "reduction", "persistent_reduction")
    with (
        _as_on_an_h100(),
        mock.patch.multiple(triton_heuristics, **dict.fromkeys(kinds, heuristic)),
    ):
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        signature = launched["signature"]
        constants = {
            n: launched["constants"].get(n, 128)
            for n, kind in signature.items()
            if kind == "constexpr"
        }
        ast = ASTSource(fn=getattr(module, name), signature=signature, constexprs=constants)
        options = {k: launched[k] for k in ("num_warps", "num_stages") if k in launched}
        return triton.compile(ast, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
