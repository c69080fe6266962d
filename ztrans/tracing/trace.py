"""Trace a call of a train step into a `Recording`: its forward, backward and update in one graph.

make_fx traces the step into an FX graph (see `fx_trace`), whose nodes have the user's lines and the facts for regions
(see `annotate`). The graph is imported as functional equations (see `import_fx`). A step that changes the Python values
that it reads is refused (see `purity`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..calling.call import BoundCall, StepFunction
from ..calling.inputs import check_state
from ..calling.purity import trace_without_side_effects
from ..calling.signature import Abstract, Constant, Signature, device_of_program
from ..calling.trees import leaf_names, named_outputs, opened
from ..ir.ambient import refuse_inside, without_autocast
from ..ir.graph import Eqn, Graph, Var, dce
from ..ir.layout import LeafSharding
from ..ir.user_sharding import UserSharding
from ..rewrites.flex_attention import with_kernels_chosen
from ..rewrites.recompute import checkpointed
from .dtensors import as_dtensor, in_layout, refuse_wrappers, spec_of
from .errors import divided_batch, reads_changed, unequal_parts
from .fx_trace import FxTrace, check_torch, trace_by_make_fx
from .import_fx import import_fx
from .recording import Recording
from .regions import Fact, label_regions


def trace(
    fn: Callable,
    call: BoundCall,
    function: StepFunction,
    *,
    micro: int = 1,
    device: str | None = None,
    shardings: Sequence[LeafSharding] = (),
) -> Recording:
    """Record a call of a train step, `fn(state, *batch) -> (state, output)`, as a `Recording`.

    Args:
        fn: the train step.
        call: the arguments of the call. Leaves may be real, fake or meta tensors, DTensors, and numbers. Numbers become
            inputs too, never constants.
        function: the parameters, reads and extra argument of `fn`.
        micro: the number of equal parts of the batch; the program is for one of them.
        device: the device on which meta leaves are traced; by default the device of the other leaves.
        shardings: for each leaf, its sharding by transforms; by default none has axes. Over these axes a DTensor is
            traced whole. Over its other axes the step sees a DTensor, and the program has the local part. The step sees
            all leaves on the device.

    Raises:
        ValueError: the step reads a value while it is traced, closes over a tensor, changes Python values that it
            reads, or returns a state of another structure.
        RuntimeError: ztrans does not support this version of torch.
        TypeError: `trace` is called inside of a transform of torch.func or of another trace.
    """
    check_torch()
    name = function.name if function.name.isidentifier() else "step"
    refuse_inside(f"trace: {name}", call)
    part = call.micro_batch(function, micro) if micro > 1 else call
    step = _FlatStep(fn, name, part, _leaves_of(part, function, shardings))

    def record() -> Recording:
        graph, traced = _traced_graph(step, device)
        if function.extra is not None:
            changed = {old.name for old, new in graph.leaves if new is not old}
            function.extra.check_changed(changed)
        return Recording(
            graph=graph,
            fx=traced.module,
            out_tree=traced.out_tree,
            # A trace may change the values that the step reads. The program is for the values after the trace.
            signature=Signature.of(call, function).stored_as([leaf.stored for leaf in step.leaves]),
            function=function,
            axes=tuple(leaf.axes for leaf in step.inputs),
            user_shardings=tuple(leaf.user_sharding for leaf in step.inputs),
            known=tuple(traced.known),
        )

    return trace_without_side_effects(record, function.reads, name)


class _Leaf(NamedTuple):
    """A leaf of the arguments of a call.

    Attributes:
        value: the leaf as the caller passes it.
        name: its name in the program.
        path: its name in messages.
        abstract: an `Abstract` for an input of the program, or a `Constant`.
        axes: the mesh axes over which transforms distribute it.
        user_sharding: its sharding by the step itself.
        spec: the layout of the DTensor that the step sees, if the step itself divides the leaf.
        stored: its dtype between steps, if that is another one than the step computes it in.
        is_state: whether it belongs to the state.
        in_batch: whether it is a tensor of the batch, which differs from rank to rank.
        known: a tensor with its value, if the step may read that value while it is traced.
    """

    value: Any
    name: str
    path: str
    abstract: Any
    axes: tuple[str, ...]
    user_sharding: UserSharding | None
    spec: Any
    stored: torch.dtype | None
    is_state: bool
    in_batch: bool
    known: torch.Tensor | None


@dataclass(frozen=True)
class _FlatStep:
    """A step as a function of flat tensors, one for each input of the program. make_fx traces it."""

    fn: Callable
    name: str
    call: BoundCall
    leaves: Sequence[_Leaf]

    @property
    def inputs(self) -> list[_Leaf]:
        """The leaves that are inputs of the program. Other leaves are constants."""
        return [leaf for leaf in self.leaves if isinstance(leaf.abstract, Abstract)]

    @property
    def state(self) -> list[_Leaf]:
        """The leaves of the state."""
        return [leaf for leaf in self.leaves if leaf.is_state]

    def empty_inputs(self, device: str) -> list[torch.Tensor]:
        """A new tensor for each input, on its own device; for a meta leaf on `device`."""
        tensors = []
        for leaf in self.inputs:
            requires_grad = getattr(leaf.value, "requires_grad", False)
            tensors.append(leaf.abstract.empty(device, requires_grad))
        return tensors

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        tree = pytree.tree_structure(self.call.tree())
        arguments = pytree.tree_unflatten(_seen_by_step(self.leaves, tensors), tree)
        result = self.call.of_tree(arguments).run(self.fn)
        check_result(self.name, result, self.call.state)
        return _local_results(self.state, *result)


def _traced_graph(step: _FlatStep, device_of_meta: str | None) -> tuple[Graph, FxTrace]:
    """The program of a step, and the FX trace that it comes from."""
    device = device_of_program(leaf.abstract for leaf in step.inputs)
    # The other leaves may be on one GPU of several, such as "cuda:1": "cuda" for meta leaves means the same GPU.
    is_same_type = device != "meta" and device_of_meta == torch.device(device).type
    if device_of_meta is None or is_same_type:
        # A program without tensors on a device is planned for GPUs, but this machine may have none to trace on.
        device_of_meta = "cpu" if device == "meta" else device
    names = [leaf.name for leaf in step.inputs]
    known = {i: leaf.known for i, leaf in enumerate(step.inputs) if leaf.known is not None}
    make_inputs = functools.partial(step.empty_inputs, device_of_meta)
    traced = trace_by_make_fx(step, make_inputs, names, step.name, known)

    variables: list[Var] = []
    batch: set[Var] = set()
    for leaf in step.inputs:
        variable = Var(leaf.name, leaf.abstract.dtype, leaf.abstract.shape)
        variables.append(variable)
        if leaf.in_batch:
            batch.add(variable)
    # The FX graph already has the casts of the caller's autocast. The importer runs operations on meta tensors to find
    # the types of results; autocast would cast these again.
    with without_autocast():
        eqns, fx_outputs, facts = import_fx(traced.module, variables, batch)

    # The FX graph returns only tensors. Other results of the step are constants.
    remaining_tensors = iter(fx_outputs)
    outputs: list[Any] = []
    for x in traced.leaves:
        outputs.append(next(remaining_tensors) if isinstance(x, torch.Tensor) else x)

    graph = Graph(
        step.name,
        tuple(variables),
        tuple(eqns),
        tuple(outputs),
        len(step.state),
        frozenset(batch),
        # The shapes of whole leaves. If the step itself divides a leaf, its input has the shape of a part.
        leaf_shapes=tuple(tuple(getattr(leaf.value, "shape", ())) for leaf in step.state),
    )
    _check_state(graph, step.state)
    for value in traced.known:
        old, new = graph.leaves[value.position]
        if new is not old:
            raise reads_changed(step.inputs[value.position].path, value.source, step.name)
    graph = _annotated(graph, facts)
    graph = with_kernels_chosen(graph, device == "cpu")
    return graph, traced


def _leaves_of(
    call: BoundCall,
    function: StepFunction,
    shardings: Sequence[LeafSharding],
) -> list[_Leaf]:
    """The leaves of a call: the state, the batch, and the extra argument, in this order.

    Raises: TypeError or ValueError for a leaf that a program cannot have.
    """
    values = pytree.tree_leaves(call.tree())
    names, paths = leaf_names(call.parameters(function), call.tree())
    num_state = len(pytree.tree_leaves(call.state))
    end_of_batch = len(values) - len(pytree.tree_leaves(call.extra))
    known: Mapping[int, torch.Tensor] = {}
    if function.extra is not None:
        known = function.extra.known_tensors(call.state)
    refuse_wrappers(zip(paths, values))
    check_state(paths, values[:num_state])
    leaves = []
    for i, (value, name, path) in enumerate(zip(values, names, paths)):
        is_state = i < num_state
        sharding = shardings[i] if shardings else LeafSharding()
        user_sharding = UserSharding.of(value, sharding.axes)
        if user_sharding is not None and user_sharding.problem is not None:
            raise unequal_parts(path, user_sharding.problem)
        if not is_state and UserSharding.axes_of(value, sharding.axes):
            raise divided_batch(path)
        abstract: Any = Abstract.of(value, is_state, user_sharding)
        # A leaf in another memory is traced like a meta leaf, on the device of the other leaves.
        if sharding.memory != "device":
            abstract = abstract._replace(device="meta")
        if sharding.dtype is not None:
            abstract = abstract._replace(dtype=torch.float32)
        leaf = _Leaf(
            value=value,
            name=name,
            path=path,
            abstract=abstract,
            axes=sharding.axes,
            user_sharding=user_sharding,
            spec=spec_of(value, user_sharding, abstract.dtype) if user_sharding else None,
            stored=sharding.dtype,
            is_state=is_state,
            in_batch=num_state <= i < end_of_batch and isinstance(value, torch.Tensor),
            known=known.get(id(value)) if is_state else None,
        )
        leaves.append(leaf)
    return leaves


def _seen_by_step(leaves: Sequence[_Leaf], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The leaves as the step sees them, with these tensors for the inputs of the program."""
    remaining_tensors = iter(tensors)
    arguments = []
    for leaf in leaves:
        if isinstance(leaf.abstract, Constant):
            arguments.append(leaf.abstract.value)
        else:
            arguments.append(as_dtensor(next(remaining_tensors), leaf.spec))
    return arguments


def _local_results(state: Sequence[_Leaf], new_state: Any, output: Any) -> tuple[Any, Any]:
    """The new state, with local tensors for DTensors, and the output of a step, with whole tensors for DTensors.

    Raises:
        TraceError: a leaf of the state was a DTensor and is a full tensor now, or the other way round.
        TypeError: an object among the outputs is neither a tensor nor a constant.
    """
    new, tree = pytree.tree_flatten(new_state)
    with torch.no_grad():
        new = [in_layout(x, leaf.spec, leaf.path) for x, leaf in zip(new, state)]
        output = pytree.tree_map_only(DTensor, DTensor.full_tensor, opened(output))
    # The map over an opened tree has rebuilt the user's containers.
    output = opened(output)
    paths = [leaf.path for leaf in state]
    refuse_wrappers((*zip(paths, new), *named_outputs(output)))
    return pytree.tree_unflatten(new, tree), output


def _annotated(graph: Graph, facts: Mapping[Eqn, Fact]) -> Graph:
    """The program with regions for its equations, and with recomputation of the results that checkpoints drop."""
    graph = dce(label_regions(graph, facts))
    checkpoint: dict[Var, int | None] = {}
    dropped: set[Var] = set()
    for e, fact in facts.items():
        checkpoint.update(dict.fromkeys(e.results, fact.checkpoint))
        if fact.dropped:
            dropped.update(e.results)
    return checkpointed(graph, checkpoint, dropped) if dropped else graph


def check_result(name: str, result: Any, state: Any) -> None:
    """Check that a step has returned `(state, output)`, with the structure of the state that it was given.

    Raises: ValueError if it has not.
    """
    if not (isinstance(result, tuple) and len(result) == 2):
        kind = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise ValueError(
            f"trace: {name} returned {kind}; a train step returns (state, output).\n"
            f"Return the new state first, in the structure of the old one, then one output."
        )
    old, old_tree = pytree.tree_flatten_with_path(state)
    new, new_tree = pytree.tree_flatten_with_path(result[0])
    if old_tree == new_tree:
        return
    old_keys = {pytree.keystr(keys) for keys, _ in old}
    new_keys = {pytree.keystr(keys) for keys, _ in new}
    changes = []
    if old_keys - new_keys:
        changes.append(f"missing: {', '.join(sorted(old_keys - new_keys)[:4])}")
    if new_keys - old_keys:
        changes.append(f"new: {', '.join(sorted(new_keys - old_keys)[:4])}")
    if not changes:
        changes.append(f"{new_tree} for {old_tree}")
    raise ValueError(
        f"trace: {name} returned a state of another structure than it was given"
        f" ({'; '.join(changes)}).\n"
        f"Return every leaf of the state, in the same containers; keep anything else in the output."
    )


def _check_state(graph: Graph, state: Sequence[_Leaf]) -> None:
    for (old, new), leaf in zip(graph.leaves, state):
        if not isinstance(new, Var) or (old.dtype, old.shape) != (new.dtype, new.shape):
            got = new.type if isinstance(new, Var) else repr(new)
            raise ValueError(
                f"trace: {graph.name} was given {leaf.path}: {old.type} and returned {got} in its place.\n"
                f"State keeps its shapes and dtypes from step to step; cast it back before returning it."
            )
