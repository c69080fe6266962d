"""Graph capture: a whole step, update included, as one CUDA graph that each call replays.

The first call runs the step as it is, on a stream of its own: communicators come up, kernels are
compiled, libraries take their workspaces. The second is captured, and replayed as every call after it.
A graph knows addresses, so

- the batch is copied into buffers that stay, and numbers such as lr too: they are read on the device, by
  fused optimizers in fp32;
- the state is updated where it lies, and each call must bring the state that was captured;
- what the step gives beside the state is copied out of the graph's memory, which the next call overwrites.

NCCL lets go of a communicator only when no graph holds one of its collectives: `close` comes before
`destroy_process_group`. When the process ends it comes by itself.
"""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import ops
from ...ir.ambient import no_collection
from ...ir.graph import Eqn, Graph, Var
from ..inductor.fusion import is_update


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


def fed(graph: Graph, inputs: Sequence[torch.Tensor], device: str = "cuda") -> list[int]:
    """Which inputs come anew with every call of a captured step: the batch, and what of the state the step leaves
    as it is and keeps elsewhere, such as a learning rate.

    Raises: ValueError naming a state leaf that lies elsewhere and changes.
    """
    found = []
    for i, (v, x) in enumerate(zip(graph.inputs, inputs)):
        if i >= graph.num_state or (x.device.type != device and graph.outputs[i] is v):
            found.append(i)
        elif x.device.type != device:
            raise ValueError(
                f"{graph.name}: state leaf {v.name} lies on {x.device}, and a CUDA graph would not see it change.\n"
                f"All that a captured step changes is on the GPU: move it there. An optimizer of PyTorch keeps its "
                f"step counter there with capturable=True or fused=True."
            )
    return found


def placed(graph: Graph, inputs: Sequence[torch.Tensor], device: str = "cuda") -> list[torch.Tensor]:
    """The inputs of a step as its capture reads them: all on one device."""
    given, to = set(fed(graph, inputs, device)), next((x.device for x in inputs if x.device.type == device), device)
    return [x.to(to) if i in given else x for i, x in enumerate(inputs)]


def with_rates(graph: Graph) -> Graph:
    """The program with the learning rates of fused optimizers in fp32, which is all that these read on a GPU."""
    narrow: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for e in graph.eqns:
        rate = e.kwargs.get("lr")
        if is_update(e) and isinstance(rate, Var) and rate.dtype != torch.float32:
            if rate not in narrow:
                narrow[rate] = Var(f"{rate.name}.f32", torch.float32, rate.shape, rate.layout)
                cast = {"dtype": torch.float32}
                eqns.append(Eqn(torch.ops.aten._to_copy.default, (rate,), (narrow[rate],), cast, e.region, e.source))
            e = e.replace(kwargs={**e.kwargs, "lr": narrow[rate]})
        eqns.append(e)
    return graph.replace(eqns=tuple(eqns))


class Capture:
    """A step that is run once, then captured, then replayed; `run` is a function of flat inputs.

    `check` raises before a replay if the one before has failed. `cuda` is `torch.cuda`, or what stands in for it
    on a machine without a GPU, with its `device`.
    """

    def __init__(
        self,
        run: Callable[[Sequence[torch.Tensor]], list[Any]],
        graph: Graph,
        cuda: Any = torch.cuda,
        device: str = "cuda",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.run, self.graph, self.cuda, self.device, self.check = run, graph, cuda, device, check
        self.stream: Any = None
        self.buffers: dict[int, torch.Tensor] = {}  # of what comes anew with every call
        self.captured: Any = None
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[Any] = []

    @property
    def program(self) -> torch.fx.GraphModule:
        """The FX module that is captured."""
        return self.run.program

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        n, first = self.graph.num_state, self.stream is None
        if first:
            there = placed(self.graph, inputs, self.device)
            self.buffers = {i: torch.empty_like(there[i]) for i in fed(self.graph, inputs, self.device)}
            self.stream = self.cuda.Stream()
        elif self.captured is not None:
            self._check_same(inputs)
        for i, buffer in self.buffers.items():
            _fill(buffer, inputs[i])
        read = [self.buffers.get(i, x) for i, x in enumerate(inputs)]
        if first:
            outputs = self._beside(read)
        else:
            if self.captured is None:
                self._capture(read)
            self.check()
            self.captured.replay()
            outputs = self.outputs
        return [*inputs[:n], *(x.clone() if isinstance(x, torch.Tensor) else x for x in outputs[n:])]

    def close(self) -> None:
        """Let go of the graph and its memory; a later call begins anew, with any state."""
        if self.captured is not None:
            self.cuda.synchronize()
            self.captured.reset()
        self.captured = self.stream = None
        self.buffers, self.inputs, self.outputs = {}, [], []

    def _beside(self, inputs: list[torch.Tensor]) -> list[Any]:
        here = self.cuda.current_stream()
        self.stream.wait_stream(here)
        with self.cuda.stream(self.stream):
            outputs = self.run(inputs)
        here.wait_stream(self.stream)
        return outputs

    def _capture(self, inputs: list[torch.Tensor]) -> None:
        captured = self.cuda.CUDAGraph()
        gc.collect()  # memory, or a module of kernels, that is let go meanwhile would end the capture
        try:
            # Only this thread is captured: those that load data or watch NCCL may go on.
            with (
                self.cuda.stream(self.cuda.current_stream()),  # the one that is current again if it fails
                ops.filled_after_capture(self.device),
                no_collection(),
                self.cuda.graph(captured, stream=self.stream, capture_error_mode="thread_local"),
            ):
                self.outputs = self.run(inputs)
        except Exception as error:
            cause = error.__context__ or error
            raise RuntimeError(
                f"{self.graph.name}: the step cannot be captured as a CUDA graph: {cause}\n"
                f"A graph holds launches alone: nothing that waits for the device, reads a value, or copies from "
                f"pageable memory. Without cuda_graph the step runs as it did before."
            ) from error
        self.captured, self.inputs = captured, inputs
        atexit.register(_close, weakref.ref(self))

    def _check_same(self, inputs: Sequence[torch.Tensor]) -> None:
        for i, (v, old, x) in enumerate(zip(self.graph.inputs, self.inputs, inputs)):
            if i not in self.buffers and old.data_ptr() != x.data_ptr():
                raise ValueError(
                    f"{self.graph.name}: state leaf {v.name} is not where it was when the step was captured, and a "
                    f"CUDA graph works on what lies there.\n"
                    f"Pass the state that the step returned. To go on with another, call close() on the compiled step: "
                    f"it is then captured anew; or copy the other into this one, leaf by leaf."
                )


def _fill(buffer: torch.Tensor, x: torch.Tensor) -> None:
    if x.ndim == 0 and x.device.type == "cpu":
        buffer.fill_(x.item())  # the number goes with the launch: no copy from the host to wait for
    else:
        buffer.copy_(x, non_blocking=True)


def _close(capture: weakref.ref[Capture]) -> None:
    alive = capture()
    if alive is not None:
        alive.close()
