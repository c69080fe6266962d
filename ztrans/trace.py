"""trace(fn, state, *batch): a train step as a `Graph`, forward, backward and update.

`make_fx` records the step on fake tensors, functional from end to end (see `functional`), and each
operation keeps the user's line and its region (see `watch`).

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
import torch._decomp
import torch.fx.traceback as fx_traceback
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from .ambient import refuse_inside, without_autocast
from .captured import Captured, Key
from .functional import import_fx
from .graph import Graph, Var, dce
from .marks import Marks
from .refusals import no_argument, no_state, seeds
from .regions import label_regions
from .versions import check_torch
from .watch import Watch


@dataclass(frozen=True)
class Program:
    """A traced graph with the trees that its inputs and outputs flatten from."""

    graph: Graph
    in_tree: pytree.TreeSpec
    out_tree: pytree.TreeSpec
    paths: tuple[str, ...]  # of all input leaves
    static: tuple[tuple[int, Any], ...]  # input leaves that are no tensors and no numbers: (index, value)
    captured: Captured  # what the step reads besides its arguments
    made_for: Key  # what that was


@dataclass(frozen=True)
class Abstract:
    """What a program is specialised on for one leaf: shape, dtype, stride, device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: str

    @staticmethod
    def of(leaf: Any, is_state: bool) -> Abstract | Any:
        """The abstract value of a tensor or number; anything else stands for itself."""
        if is_number(leaf):
            return Abstract((), torch.int64 if isinstance(leaf, Integral) else torch.float64, (), "cpu")
        if not isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, Hashable):
                raise no_argument(leaf)
            return leaf
        if is_state:  # state is kept contiguous, whatever it came as
            stride = torch.empty(leaf.shape, device="meta").stride()
            return Abstract(tuple(leaf.shape), leaf.dtype, stride, _device(leaf))
        return Abstract(tuple(leaf.shape), leaf.dtype, leaf.stride(), _device(leaf))


def is_number(leaf: Any) -> bool:
    """Python's numbers and NumPy's; truth values say which program is meant."""
    return isinstance(leaf, Real) and not isinstance(leaf, bool)


def _device(leaf: torch.Tensor) -> str:
    # A fake cuda tensor aborts the process on a CPU build.
    return leaf.device.type if leaf.device.type == "meta" or torch.accelerator.is_available() else "cpu"


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage: each collection would walk the whole growing graph, which makes tracing quadratic."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@no_collection()
def trace(
    fn: Callable, state: Any, *batch: Any, device: str | None = None, captured: Captured | None = None
) -> Program:
    """Record `fn(state, *batch) -> (state, output)` as a `Program`.

    Leaves may be real, fake or meta tensors, DTensors (traced at their global shape) and numbers,
    which become inputs, never constants. Meta leaves are traced as lying on `device`, by default
    where other leaves lie. `captured` is what `fn` reads besides, if that is known already.

    Raises: ValueError when the step reads a value while it is traced, closes over a tensor, or
    returns a state of another structure. RuntimeError for a torch that ztrans does not know.
    """
    check_torch()
    refuse_inside(f"trace: {_name(fn)}", (state, batch))
    captured = captured or Captured(fn)
    made_for = captured.key()
    leaves, in_tree = pytree.tree_flatten((state, *batch))
    num_state = len(pytree.tree_leaves(state))
    names, paths = leaf_names(fn, (state, *batch))
    abstract = [Abstract.of(leaf, i < num_state) for i, leaf in enumerate(leaves)]
    dynamic = [i for i, a in enumerate(abstract) if isinstance(a, Abstract)]
    used = [abstract[i].device for i in dynamic]
    device = device or next((d for d in used if d not in ("cpu", "meta")), "cpu")
    outside: list[Any] = []

    def flat(*tensors: torch.Tensor) -> list[Any]:
        full = list(abstract)
        for i, tensor in zip(dynamic, tensors):
            full[i] = tensor.requires_grad_() if _wants_grad(leaves[i]) else tensor
        with Watch(_name(fn)), Marks():
            result = fn(*pytree.tree_unflatten(full, in_tree))
        flat_result, out_tree = pytree.tree_flatten(result)
        outside.extend([_check_result(fn, result, state), out_tree])
        return flat_result

    with _Fakes(allow_non_fake_inputs=True) as mode, _quiet():
        fakes = [
            torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=device if a.device == "meta" else a.device)
            for a in map(abstract.__getitem__, dynamic)
        ]
    generator = torch.random.get_rng_state()
    with mode, _quiet(), _without_onednn():
        gm = make_fx(flat, _declared(), "fake", _allow_non_fake_inputs=True)(*fakes)
    if not torch.equal(generator, torch.random.get_rng_state()):
        torch.random.set_rng_state(generator)
        raise seeds("torch.manual_seed", None, _name(fn))
    inputs = [Var(names[i], f.dtype, tuple(f.shape)) for i, f in zip(dynamic, fakes)]
    numbers = {i for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    batch_vars = frozenset(v for i, v in zip(dynamic, inputs) if i >= num_state and i not in numbers)
    with without_autocast():
        eqns, outputs, facts = import_fx(gm.graph, inputs)
    static = tuple((i, a) for i, a in enumerate(abstract) if not isinstance(a, Abstract))
    if any(i < num_state for i, _ in static):
        i, a = static[0]
        raise no_state(paths[i], a)
    graph = Graph(_name(fn), tuple(inputs), tuple(eqns), tuple(outputs), num_state, batch_vars)
    _check_state(graph, paths)
    graph = dce(label_regions(graph, facts))
    return Program(graph, in_tree, outside[1], tuple(paths), static, captured, made_for)


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Its recurrent layers keep what backward needs under autograd alone, and a program runs without; what is chosen
    when a program runs is not touched."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@functools.cache
def _declared() -> dict:
    """cuDNN's batch norm writes statistics that it does not declare to write: as what it is, which does."""
    aten = torch.ops.aten
    return torch._decomp.get_decompositions([aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward])


class _Fakes(FakeTensorMode):
    """Tensors without elements, also for fused optimizers that write over what they are given: PyTorch would run
    those on real ones, as large as the model, to see what they make."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("aten::_fused_") and not func._schema.returns:
            return None
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _wants_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _name(fn: Callable) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    return name if name.isidentifier() else "step"


def leaf_names(fn: Callable, args: tuple) -> tuple[list[str], list[str]]:
    """A short name for each leaf (`params.fc1.weight`, `batch.x`) and its path in messages (`state.params...`)."""
    try:
        given = [p.name for p in inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):
        given = []
    given += [f"arg{i}" for i in range(len(given), len(args))]
    names: list[str] = []
    paths: list[str] = []
    for i, (head, arg) in enumerate(zip(given, args)):
        for keys, _ in pytree.tree_flatten_with_path(arg)[0]:
            parts = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys]
            path = ".".join([head, *parts])
            paths.append(path)
            short = ".".join(parts) if i == 0 and parts and not parts[0][0].isdigit() else path
            names.append(short if short not in names else path)
    return names, paths


def _check_result(fn: Callable, result: Any, state: Any) -> None:
    if not (isinstance(result, tuple) and len(result) == 2):
        kind = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise ValueError(
            f"trace: {_name(fn)} returned {kind}; a train step returns (state, output).\n"
            f"Return the new state first, in the structure of the old one, then one output."
        )
    old, new = pytree.tree_structure(state), pytree.tree_structure(result[0])
    if old != new:
        had = {pytree.keystr(p) for p, _ in pytree.tree_flatten_with_path(state)[0]}
        has = {pytree.keystr(p) for p, _ in pytree.tree_flatten_with_path(result[0])[0]}
        lost, gained = sorted(had - has), sorted(has - had)
        what = [f"missing: {', '.join(lost[:4])}"] * bool(lost) + [f"new: {', '.join(gained[:4])}"] * bool(gained)
        raise ValueError(
            f"trace: {_name(fn)} returned a state of another structure than it was given"
            f" ({'; '.join(what) or f'{new} for {old}'}).\n"
            f"Return every leaf of the state, in the same containers; keep anything else in the output."
        )


def _check_state(graph: Graph, paths: list[str]) -> None:
    for old, new, path in zip(graph.inputs[: graph.num_state], graph.outputs, paths):
        if not isinstance(new, Var) or (old.dtype, old.shape) != (new.dtype, new.shape):
            got = new.type if isinstance(new, Var) else repr(new)
            raise ValueError(
                f"trace: {graph.name} was given {path}: {old.type} and returned {got} in its place.\n"
                f"State keeps its shapes and dtypes from step to step; cast it back before returning it."
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """One deterministic order of autograd nodes; optimizers as under compilation, with steps as tensors."""
    before = torch.compiler._is_compiling_flag
    with fx_traceback.preserve_node_meta(), torch.autograd.set_multithreading_enabled(False):
        torch.compiler._is_compiling_flag = True  # its context manager is younger than torch 2.11
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before
