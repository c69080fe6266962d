"""Capture: a whole step, update included, as one CUDA graph that each call replays.

The first call runs the step as it is, on a stream of its own: communicators come up, kernels are
compiled, libraries take their workspaces. The second is captured, and replayed as every call after it.
A graph knows addresses, so

- the batch is copied into buffers that stay, numbers such as lr too: they are read on the device;
- the state is updated where it lies, and each call must bring the state that was captured;
- what the step gives beside the state is copied out of the graph's memory, which the next call overwrites.

NCCL lets go of a communicator only when no graph holds one of its collectives: `close` comes before
`destroy_process_group`. When the process ends it comes by itself.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import ops
from .graph import Graph


def check_device(device: str | None) -> None:
    """Raises: ValueError unless there is a GPU to capture on; `device` is the type of the mesh's devices, if any."""
    if device not in (None, "cuda"):
        raise ValueError(
            f"compile: cuda_graph=True captures the work of CUDA devices; this step's mesh is of {device!r} devices.\n"
            f"Make the mesh of GPUs: zt.make_mesh('cuda', ...), or compile without cuda_graph."
        )
    if not torch.cuda.is_available():
        raise ValueError(
            "compile: cuda_graph=True needs a CUDA device and a PyTorch built for it, and torch sees none here.\n"
            "Compile without cuda_graph."
        )


def placed(graph: Graph, inputs: Sequence[torch.Tensor], device: str = "cuda") -> list[torch.Tensor]:
    """The inputs of a step as its capture reads them: the batch on the device of the state.

    Raises: ValueError naming a state leaf that lies elsewhere.
    """
    state, batch = inputs[: graph.num_state], inputs[graph.num_state :]
    for v, x in zip(graph.inputs, state):
        if x.device.type != device:
            raise ValueError(
                f"{graph.name}: state leaf {v.name} lies on {x.device}, and a CUDA graph would not see it change.\n"
                f"All state of a captured step is on the GPU: move it there. An optimizer of PyTorch keeps its step "
                f"counter there with capturable=True or fused=True."
            )
    return [*state, *(x.to(state[0].device if state else device) for x in batch)]


class Capture:
    """A step that is run once, then captured, then replayed; `run` is a function of flat inputs.

    `cuda` is `torch.cuda`, or what stands in for it on a machine without a GPU, with its `device`.
    """

    def __init__(
        self,
        run: Callable[[Sequence[torch.Tensor]], list[Any]],
        graph: Graph,
        cuda: Any = torch.cuda,
        device: str = "cuda",
    ) -> None:
        self.run, self.graph, self.cuda, self.device = run, graph, cuda, device
        self.stream: Any = None
        self.batch: list[torch.Tensor] = []
        self.captured: Any = None
        self.state: list[torch.Tensor] = []
        self.outputs: list[Any] = []

    @property
    def program(self) -> torch.fx.GraphModule:
        return self.run.program

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        n = self.graph.num_state
        state, batch = list(inputs[:n]), inputs[n:]
        if self.stream is None:
            self.stream = self.cuda.Stream()
            self.batch = [torch.empty_like(x) for x in placed(self.graph, inputs, self.device)[n:]]
            self._fill(batch)
            return self._first(state)
        if self.captured is not None:
            self._check_same(state)
        self._fill(batch)
        if self.captured is None:
            self._capture(state)
        self.captured.replay()
        return [*state, *map(_copy, self.outputs[n:])]

    def close(self) -> None:
        """Let go of the graph and its memory; a later call begins anew, with any state."""
        if self.captured is not None:
            self.cuda.synchronize()
            self.captured.reset()
        self.captured = self.stream = None
        self.batch, self.state, self.outputs = [], [], []

    def _fill(self, batch: Sequence[torch.Tensor]) -> None:
        for buffer, x in zip(self.batch, batch, strict=True):
            if x.ndim == 0 and x.device.type == "cpu":
                buffer.fill_(x.item())  # the number goes with the launch: no copy from the host to wait for
            else:
                buffer.copy_(x, non_blocking=True)

    def _first(self, state: list[torch.Tensor]) -> list[Any]:
        here = self.cuda.current_stream()
        self.stream.wait_stream(here)
        with self.cuda.stream(self.stream):
            outputs = self.run([*state, *self.batch])
        here.wait_stream(self.stream)
        return [*state, *map(_copy, outputs[len(state) :])]

    def _capture(self, state: list[torch.Tensor]) -> None:
        captured = self.cuda.CUDAGraph()
        try:
            # Only this thread is captured: those that load data or watch NCCL may go on.
            with (
                ops.filled_after_capture(),
                self.cuda.graph(captured, stream=self.stream, capture_error_mode="thread_local"),
            ):
                self.outputs = self.run([*state, *self.batch])
        except Exception as error:
            cause = error.__context__ or error
            raise RuntimeError(
                f"{self.graph.name}: the step cannot be captured as a CUDA graph: {cause}\n"
                f"A graph holds launches alone: nothing that waits for the device, reads a value, or copies from "
                f"pageable memory. Without cuda_graph the step runs as it did before."
            ) from error
        self.captured, self.state = captured, state
        atexit.register(_close, weakref.ref(self))

    def _check_same(self, state: Sequence[torch.Tensor]) -> None:
        for v, old, x in zip(self.graph.inputs, self.state, state):
            if old.data_ptr() != x.data_ptr():
                raise ValueError(
                    f"{self.graph.name}: state leaf {v.name} is not where it was when the step was captured, and a "
                    f"CUDA graph works on what lies there.\n"
                    f"Pass the state that the step returned. To go on with another, call close() on the compiled step: "
                    f"it is then captured anew; or copy the other into this one, leaf by leaf."
                )


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _close(capture: weakref.ref[Capture]) -> None:
    alive = capture()
    if alive is not None:
        alive.close()
