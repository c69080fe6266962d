"""Kernels compiled for a card that is not there: their PTX and what they need of it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel: its PTX, and registers and bytes of stack a thread."""

    ptx: str
    registers: int
    stack: int

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.ptx))


def compiled(kernel: Any, capability: int, folder: Path, types: dict, constants: dict, **options: Any) -> Compiled:
    """Compile `kernel` for sm_`capability`; arguments of `types` that are pointers lie on 16 bytes."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.jit.arg_names)
    aligned = {(names.index(name),): ALIGNED for name, type_ in types.items() if type_.startswith("*")}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(fn=kernel.jit, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False, **options})
    cubin = folder / f"{kernel.__name__}.{capability}.cubin"
    cubin.write_bytes(made.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return Compiled(made.asm["ptx"], int(registers), int(stack))
