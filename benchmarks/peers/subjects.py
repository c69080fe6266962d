"""The subjects, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

from .model import Task


class Skip(Exception):
    """Raised by a subject that cannot run here, with the reason."""


@dataclass(frozen=True)
class Subject:
    """One subject. `build` names a function of this package, "module:function", which turns a Task into a step."""

    name: str
    build: str
    options: dict = field(default_factory=dict)
    needs: str = "torch"
    precisions: tuple[str, ...] = ("fp32", "bf16")
    alone: bool = False  # there is no communication, so each rank trains on its own batch alone
    remark: str = ""
    checkout: Path | None = None  # another checkout, from which ztrans is imported

    @property
    def of_ztrans(self) -> bool:
        return self.build.startswith("ztrans:")

    @property
    def as_listed(self) -> str:
        """The name that the subject has in `SUBJECTS`."""
        return self.name.split(" [")[0]

    def make(self, task: Task) -> Callable:
        module, function = self.build.split(":")
        return getattr(import_module(f".{module}", __package__), function)(task, **self.options)


COMPILED = {"compile": True}
TUNED = "gathers start ahead; collectives are messages in both directions"

SUBJECTS = (
    Subject("compute alone", "native:plain", alone=True),
    Subject("compute alone, torch.compile", "native:plain", COMPILED, alone=True),
    Subject("DDP", "native:ddp"),
    Subject("DDP, torch.compile", "native:ddp", COMPILED),
    Subject(
        "DDP, PowerSGD",
        "native:ddp",
        {"rank": 4},
        precisions=("bf16",),
        remark="gradients as matrices of rank 4",
    ),
    Subject("FSDP2", "native:fsdp", remark="as documented"),
    Subject("FSDP2, torch.compile", "native:fsdp", COMPILED, remark="as documented"),
    Subject("FSDP2, tuned", "native:fsdp", {"tuned": True}, remark=TUNED),
    Subject(
        "FSDP2, tuned, torch.compile", "native:fsdp", {"tuned": True, "compile": True}, remark=TUNED
    ),
    Subject(
        "SimpleFSDP, torch.compile",
        "simple_fsdp:compiled",
        remark="Inductor's bucketing and overlap",
    ),
    *(
        Subject(
            f"DeepSpeed ZeRO-{stage}",
            "zero:deepspeed",
            {"stage": stage},
            "deepspeed",
            remark=remark,
        )
        for stage, remark in {1: "", 2: "", 3: "keeps small parameters gathered"}.items()
    ),
    Subject("JAX, jit", "jax:fsdp", needs="jax", precisions=("fp32",), remark="sharded as in FSDP"),
    Subject(
        "ZeRO-3 by hand",
        "by_hand:zero3",
        remark="gathers one layer ahead; messages in both directions",
    ),
    *(
        Subject(f"ztrans stage {stage}", "ztrans:lifted", {"stage": stage})
        for stage in (0, 1, 2, 3)
    ),
    *(
        Subject(
            f"ztrans stage {stage}, inductor",
            "ztrans:lifted",
            {"stage": stage, "backend": "inductor"},
        )
        for stage in (0, 1, 2, 3)
    ),
    *(
        Subject(
            f"ztrans stage {stage}, {name}",
            "ztrans:lifted",
            {"stage": stage, "gathers": gathers, "grads": grads},
            precisions=("bf16",),
        )
        for stage, name, gathers, grads in (
            (3, "int8", {}, {}),
            (3, "int8 or bf16", {"bits": "auto"}, {"bits": "auto"}),
            (3, "int8 and int4 gradients", {}, {"bits": 4}),
            (2, "int4 differences and gradients", {"bits": 4, "of": "differences"}, {"bits": 4}),
        )
    ),
    Subject("ztrans stage 3, remat", "ztrans:lifted", {"stage": 3, "remat": True}),
    Subject(
        "ztrans stage 3, remat, inductor",
        "ztrans:lifted",
        {"stage": 3, "remat": True, "backend": "inductor"},
    ),
)


def with_checkout(subject: Subject, checkout: Path) -> Subject:
    """The same subject with the ztrans of another checkout."""
    return replace(
        subject, name=f"{subject.name} [{checkout.resolve().name}]", checkout=checkout.resolve()
    )
