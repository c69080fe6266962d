"""Capture a whole step, with its update, as one CUDA graph, which later calls replay.

The first call runs the step without a graph, on a stream of its own: it sets up communicators, compiles kernels, and
lets libraries allocate their workspaces. The second call captures the step and replays it; later calls only replay it.
A graph contains addresses, so

- the batch is copied into buffers that stay in place, and so are numbers such as lr, which are then read on the device,
  by fused optimizers in fp32;
- the state is updated in place, and each call must pass the state that was captured;
- numbers that a kernel takes by value keep their captured values, and a call with other values is an error. Fused
  optimizers take all numbers but the learning rate by value;
- outputs other than the state are copied out of the graph's memory, which the next call overwrites;
- the workspaces of cuBLAS are in the graph's memory.

NCCL destroys a communicator only when no graph holds one of its collectives, so `close` must be called before
`destroy_process_group`. It is called at the end of the process if the user has not called it.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ... import ops
from ...calling.global_state import no_collection
from ...calling.inputs import device_of
from ...ir.copies import is_copy
from ...ir.graph import Eqn, Graph, Var
from ...ir.op_facts import CAST
from ...rewrites.update_groups import is_fused_update
from ..runner import Runner

if TYPE_CHECKING:
    from ..executable import StepExecutable

# The arguments that kernels of fused optimizers read on the device. They take all others by value.
_READ_ON_DEVICE = ("lr", "scale", "grad_scale", "found_inf")


def check_device(device: str | None) -> None:
    """Check that there is a GPU to capture on. `device` is the type of the mesh's devices, or None without a mesh.

    Raises: ValueError if there is none.
    """
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


def check_on_device(graph: Graph) -> None:
    """Check that a program keeps no values in the memory of the host.

    Raises: ValueError if it does.
    """
    copies = next(filter(is_copy, graph.eqns), None)
    if copies is not None:
        raise ValueError(
            f"{graph.name}: cuda_graph=True captures no copies between a GPU and its host, and zt.offload copies "
            f"{copies.ins[0].name} between them in this step.\n"
            f"Compile without cuda_graph, or leave out offload."
        )


def copied_inputs(graph: Graph, inputs: Sequence[torch.Tensor], device: str = "cuda") -> list[int]:
    """The positions of the inputs that every call of a captured step copies into a buffer.

    These are the batch, and the leaves of the state that do not change and are not on the GPU, such as a learning rate.
    Numbers that a kernel takes by value are excluded.

    Raises: ValueError, with the name of the leaf, if a leaf of the state changes and is not on the GPU.
    """
    copied = []
    by_value = taken_by_value(graph)
    new_leaves = dict(graph.leaves)
    for i, (v, x) in enumerate(zip(graph.inputs, inputs)):
        if i in by_value:
            continue
        is_elsewhere = x.device.type != device
        if v not in new_leaves or (is_elsewhere and new_leaves[v] is v):
            copied.append(i)
        elif is_elsewhere:
            raise ValueError(
                f"{graph.name}: state leaf {v.name} is on {x.device}, and a CUDA graph would not see it change.\n"
                f"Everything that a captured step changes must be on the GPU: move it there. An optimizer of PyTorch "
                f"keeps its step counter there with capturable=True or fused=True."
            )
    return copied


def placed(
    graph: Graph, inputs: Sequence[torch.Tensor], device: str = "cuda"
) -> list[torch.Tensor]:
    """The inputs of a step, with the inputs that a capture copies moved to the device of the others."""
    copied = set(copied_inputs(graph, inputs, device))
    target = next((x.device for x in inputs if x.device.type == device), torch.device(device))
    return [x.to(target) if i in copied else x for i, x in enumerate(inputs)]


def with_rates(graph: Graph) -> Graph:
    """The program with learning rates in fp32: on a GPU, fused optimizers read no other dtype."""
    fp32_rates: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        rate = eqn.kwargs.get("lr")
        if is_fused_update(eqn) and isinstance(rate, Var) and rate.dtype != torch.float32:
            if rate not in fp32_rates:
                fp32_rate = Var(f"{rate.name}.f32", torch.float32, rate.shape, rate.layout)
                cast = Eqn(CAST, (rate,), (fp32_rate,), {"dtype": torch.float32})
                eqns.append(cast.like(eqn))
                fp32_rates[rate] = fp32_rate
            eqn = eqn.replace(kwargs={**eqn.kwargs, "lr": fp32_rates[rate]})
        eqns.append(eqn)
    return graph.replace(eqns=tuple(eqns))


def _by_value(graph: Graph) -> Iterator[tuple[str, Var]]:
    """The arguments that kernels of fused optimizers take by value: their names, and their values in the program."""
    for eqn in filter(is_fused_update, graph.eqns):
        for key, x in eqn.kwargs.items():
            if isinstance(x, Var) and key not in _READ_ON_DEVICE:
                yield key, x


def taken_by_value(graph: Graph) -> set[int]:
    """The positions of the inputs that kernels take by value. A captured graph keeps their values."""
    values = {v for _, v in _by_value(graph)}
    return {i for i, v in enumerate(graph.inputs) if v in values}


def check_values(graph: Graph) -> None:
    """Check that no kernel takes by value a number that the program computes.

    Raises: ValueError, with the name of the number, if one does: a graph would keep its value from the capture.
    """
    inputs = set(graph.inputs)
    for key, x in _by_value(graph):
        if x not in inputs:
            raise ValueError(
                f"{graph.name}: the kernel of a fused optimizer takes {key}={x.name} by value, and a CUDA graph would "
                f"keep that value although the program computes it in every step.\n"
                f"Use the optimizer with fused=False, or compile without cuda_graph."
            )


class Capture(Runner):
    """A step that runs at the first call, is captured at the second, and is replayed from then on.

    Args:
        run: a function of flat inputs.
        graph: its program.
        cuda: `torch.cuda`, or a test double.
        device: the type of its device.
        on_write: a function to call before each run: a replay runs no Python, so the program cannot say when it begins
            to write the state.
        has_failed: returns whether a step of the mesh has failed. The last replay may then wait forever.
    """

    def __init__(
        self,
        run: StepExecutable,
        graph: Graph,
        cuda: Any = torch.cuda,
        device: str = "cuda",
        on_write: Callable[[], None] = lambda: None,
        has_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run = run
        self.graph = graph
        self.cuda = cuda
        self.device = device
        self.on_write = on_write
        self.has_failed = has_failed
        self.stream: Any = None
        self.buffers: dict[int, torch.Tensor] = {}  # the copied inputs, by position
        self.captured: Any = None
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[Any] = []
        self.captured_values: dict[int, float] = {}  # the numbers that kernels took by value
        self.taken_by_value = taken_by_value(graph)

    @property
    def executable(self) -> StepExecutable:
        """The code that is captured."""
        return self.run

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        self.on_write()
        is_first = self.stream is None
        if is_first:
            self._allocate(inputs)
        for i, buffer in self.buffers.items():
            _fill(buffer, inputs[i])
        run_inputs = [self.buffers.get(i, x) for i, x in enumerate(inputs)]

        if is_first:
            outputs = self._run_on_side_stream(run_inputs)
        else:
            if self.captured is None:
                self._capture(run_inputs)
            self.captured.replay()
            outputs = self.outputs

        # The next call overwrites the graph's memory.
        n = self.graph.num_state
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in outputs[n:]]
        return [*inputs[:n], *copies]

    @property
    def replays(self) -> bool:
        """Whether the next call replays a graph."""
        return self.captured is not None

    def close(self) -> None:
        """Release the graph and its memory. The next call is a first call again, with any state.

        After a failed step this does not wait for the device, where the last replay may wait for a lost rank. The
        graph's memory is private, and nothing else gets it before the device has ended all work.
        """
        if self.captured is not None:
            if not self.has_failed():
                self.cuda.synchronize(device_of(self.inputs))
            self.captured.reset()
        self.captured = None
        self.stream = None
        self.buffers = {}
        self.inputs = []
        self.outputs = []

    def placed(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """These inputs, with the inputs that a capture copies on its device."""
        return placed(self.graph, inputs, self.device)

    def _allocate(self, inputs: Sequence[torch.Tensor]) -> None:
        on_device = self.placed(inputs)
        self.buffers = {}
        for i in copied_inputs(self.graph, inputs, self.device):
            self.buffers[i] = torch.empty_like(on_device[i])
        self.stream = self.cuda.Stream()

    def _run_on_side_stream(self, inputs: list[torch.Tensor]) -> list[Any]:
        stream = self.stream
        current = self.cuda.current_stream()
        stream.wait_stream(current)
        try:
            with self.cuda.stream(stream):
                return self.run(inputs)
        except BaseException:
            self.close()  # the next call is the first one again
            raise
        finally:
            current.wait_stream(stream)

    def _capture(self, inputs: list[torch.Tensor]) -> None:
        captured = self.cuda.CUDAGraph()
        gc.collect()  # freeing memory, or a module of kernels, during the capture would end it
        try:
            # The first context restores the current stream if the capture fails. Only this thread is captured, so that
            # threads that load data or watch NCCL may go on.
            with (
                self.cuda.stream(self.cuda.current_stream()),
                ops.filled_after_capture(self.device),
                no_collection(),
                new_workspaces(),
                self.cuda.graph(captured, stream=self.stream, capture_error_mode="thread_local"),
            ):
                self.outputs = self.run(inputs)
            # A capture begins with launches that reset the random generators, and each replay with launches that set
            # them. The first replay is on another stream, and must not overtake the reset.
            self.cuda.current_stream().wait_stream(self.stream)
        except Exception as error:
            cause = error.__context__ or error
            raise RuntimeError(
                f"{self.graph.name}: the step cannot be captured as a CUDA graph: {cause}\n"
                f"A graph holds only launches: the step must not wait for the device, read a value, or copy from "
                f"pageable memory. Without cuda_graph, the step runs as before."
            ) from error
        self.captured = captured
        self.inputs = inputs
        self.captured_values = {i: inputs[i].item() for i in self.taken_by_value}
        atexit.register(_close, weakref.ref(self))

    def check_numbers(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raises: ValueError if a number that a kernel takes by value is not what it was when the step was captured."""
        for i, captured_value in self.captured_values.items():
            value = inputs[i].item()
            if captured_value != value:
                name = self.graph.inputs[i].name
                raise ValueError(
                    f"{self.graph.name}: {name} was {captured_value} when the step was captured, and is {value}. The "
                    f"kernel of a fused optimizer takes it by value, so the CUDA graph has the old one.\n"
                    f"Keep it constant, as a scheduler does with cycle_momentum=False; or call close() on the compiled "
                    f"step, which is then captured again; or use the optimizer with fused=False, or compile without "
                    f"cuda_graph."
                )

    def check_state(self, state: Sequence[torch.Tensor]) -> None:
        """Raises: ValueError if a leaf is not where it was when the step was captured."""
        for i, (v, old, x) in enumerate(zip(self.graph.inputs, self.inputs, state)):
            if i in self.buffers or i in self.taken_by_value:
                continue
            if old.data_ptr() != x.data_ptr():
                raise ValueError(
                    f"{self.graph.name}: state leaf {v.name} is not where it was when the step was captured, and a "
                    f"CUDA graph reads and writes that memory.\n"
                    f"Pass the state that the step returned. To continue with another state, call close() on the "
                    f"compiled step, which is then captured again, or copy that state into this one, leaf by leaf."
                )


@contextlib.contextmanager
def new_workspaces() -> Iterator[None]:
    """Make cuBLAS allocate new workspaces inside, which belong to the graph that is captured there.

    PyTorch keeps a workspace for each stream. Any capture of another graph may release all of them, for example by
    `torch.compile(mode="reduce-overhead")`. A graph with the address of a released workspace would then write to
    memory that others use, or that is no longer mapped.

    Source: PyTorch's cudagraph trees, which do the same.
    """
    release = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)  # a CPU build has none
    release()
    try:
        yield
    finally:
        release()  # the graph keeps its memory, and the next product on this stream gets another workspace


def _fill(buffer: torch.Tensor, x: torch.Tensor) -> None:
    """Copy an input into its buffer."""
    if x.ndim == 0 and x.device.type == "cpu":
        # The launch carries the number, so nothing waits for a copy from the host.
        buffer.fill_(x.item())
    else:
        buffer.copy_(x, non_blocking=True)


def _close(capture: weakref.ref[Capture]) -> None:
    alive = capture()
    if alive is not None:
        alive.close()
