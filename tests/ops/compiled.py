"""Compile kernels for a GPU on a machine without one, and read their PTX, registers and stack."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: its PTX, and the registers and bytes of stack that each thread uses."""

    ptx: str
    registers: int
    stack: int

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.ptx))


def compiled(
    kernel: Any, capability: int, folder: Path, types: dict, constants: dict, **options: Any
) -> Compiled:
    """Compile `kernel` for sm_`capability`. Arguments whose type is a pointer are aligned to 16 bytes."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.jit.arg_names)
    aligned = {
        (names.index(name),): ALIGNED for name, type_ in types.items() if type_.startswith("*")
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(fn=kernel.jit, signature=signature, constexprs=constants, attrs=aligned)
    target, options = GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False, **options}
    kernel_binary = triton.compile(source, target=target, options=options)
    cubin = folder / f"{kernel.__name__}.{capability}.cubin"
    cubin.write_bytes(kernel_binary.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    usage = subprocess.run(
        [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return Compiled(kernel_binary.asm["ptx"], int(registers), int(stack))
