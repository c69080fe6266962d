"""trace: record a call of a train step as a `Program`, whose graph has its forward, backward and update.

make_fx traces the step into an FX graph (see `fx_trace`), in which each node has the user's line and the facts for its
region (see `annotate`). The graph is imported as functional equations (see `import_fx`). A step that changes the Python
values that it reads is refused (see `purity`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..calling.call import BoundCall, StepFunction
from ..calling.inputs import Inputs, check_fits, check_state, local_inputs, shape_of
from ..calling.purity import trace_without_side_effects
from ..calling.signature import Abstract, Constant, Signature
from ..calling.trees import leaf_names, named_outputs, opened
from ..ir.ambient import refuse_inside, without_autocast
from ..ir.graph import Eqn, Graph, Memory, Var, dce
from ..ir.higher_order import with_chosen_backend
from ..ir.layout import UserSharding
from ..ir.recompute import checkpointed
from .dtensors import around, cut_batch, local_results, refuse_wrappers, spec_of
from .errors import no_parts
from .fx_trace import check_torch, trace_by_make_fx
from .import_fx import import_fx
from .regions import Fact, label_regions


@dataclass(frozen=True)
class Program:
    """A traced graph, and what it was traced for.

    `fx` is the FX graph that make_fx has traced: it takes the inputs of `graph`, and returns the tensors among its
    outputs.
    """

    graph: Graph
    fx: fx.GraphModule = field(compare=False, repr=False)
    out_tree: pytree.TreeSpec  # the tree of the result
    signature: Signature  # of the calls that it is for
    function: StepFunction = field(compare=False, repr=False)
    # For each input, the mesh axes over which transforms distribute it, and how the step itself divides it.
    axes: tuple[tuple[str, ...], ...] = ()
    user_shardings: tuple[UserSharding | None, ...] = ()

    @property
    def paths_of_inputs(self) -> list[str]:
        """The paths of the leaves that are inputs of the program."""
        return [self.signature.paths[i] for i in self.signature.inputs]

    @property
    def device_type(self) -> str:
        """The device of the tensors that it was traced for: an accelerator if one is there, "cpu", or "meta"."""
        of_leaves = [leaf.value for leaf in self.signature.leaves]
        tensors = [x for x in of_leaves if isinstance(x, Abstract) and x.shape]
        if _are_on_cpus(tensors):
            return "cpu"
        device = _device_of(tensors)
        return "meta" if device == "cpu" else device

    def local_inputs(self, call: BoundCall, name: str = "") -> Inputs:
        """The inputs of this program in a call that fits it (see `inputs.local_inputs`)."""
        name = name or self.graph.name
        return local_inputs(name, self.signature, self.axes, self.user_shardings, call)

    def check_fits(self, call: BoundCall, name: str = "") -> None:
        """Raises: TypeError for a call for which this program was not traced."""
        check_fits(name or self.graph.name, self.signature, call, self.function)

    def returned(self, added_outputs: Sequence[str]) -> pytree.TreeSpec:
        """The tree of what a step returns: `(state, output)`, or `(state, (output, added))` with a dict of outputs that
        transforms have added."""
        if not added_outputs:
            return self.out_tree
        state, output = pytree.tree_unflatten([0] * self.out_tree.num_leaves, self.out_tree)
        output = opened(output)
        return pytree.tree_structure((state, (output, dict.fromkeys(added_outputs, 0))))


def _device_of(leaves: Iterable[Abstract]) -> str:
    """The first device of the leaves other than the CPU, or the CPU."""
    return next((leaf.device for leaf in leaves if leaf.device not in ("cpu", "meta")), "cpu")


def _are_on_cpus(leaves: Sequence[Abstract]) -> bool:
    """Whether a program runs on CPUs. One that is traced from meta tensors alone is planned for GPUs.

    Scalars, such as the counters of an optimizer, may be on CPUs beside a GPU.
    """
    has_tensor_on_cpu = any(leaf.device == "cpu" and leaf.shape for leaf in leaves)
    return has_tensor_on_cpu and _device_of(leaves) == "cpu"


def trace(
    fn: Callable,
    call: BoundCall,
    function: StepFunction,
    *,
    micro: int = 1,
    device: str | None = None,
    axes: Sequence[tuple[str, ...]] = (),
    memories: Sequence[Memory] = (),
) -> Program:
    """Record a call of a train step, `fn(state, *batch) -> (state, output)`, as a `Program`.

    Args:
        fn: the train step.
        call: its arguments. Leaves may be real, fake or meta tensors, DTensors, and numbers, which become inputs, never
            constants.
        function: what is known of `fn`.
        micro: the number of equal parts of the batch; the program is for one of them.
        device: the device on which meta leaves are traced; by default the device of the other leaves.
        axes: for each leaf, the mesh axes over which transforms distribute it; by default none. On these a DTensor is
            traced whole. Along other axes the step sees a DTensor, and the program has its local part.
        memories: for each leaf of the state, the memory that transforms keep it in. The step sees all on the device.

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
    leaves = _leaves_of(part, function, axes, memories)
    step = _FlatStep(fn, name, part, leaves)
    state = [leaf for leaf in leaves if leaf.is_state]
    inputs = step.inputs
    abstract = [leaf.abstract for leaf in inputs]
    variables = tuple(Var(leaf.name, x.dtype, x.shape) for leaf, x in zip(inputs, abstract))
    batch = frozenset(v for v, leaf in zip(variables, inputs) if leaf.in_batch)
    device = device or _device_of(abstract)

    def record_program() -> Program:
        traced = trace_by_make_fx(
            step, lambda: step.empty_inputs(device), [leaf.name for leaf in inputs], name
        )
        # The FX graph has the casts of the caller's autocast. The importer runs operations on meta tensors, to find
        # their types, and these must not be cast again.
        with without_autocast():
            eqns, tensors, facts = import_fx(traced.module, variables, batch)
        computed = iter(tensors)
        outputs = tuple(next(computed) if isinstance(x, torch.Tensor) else x for x in traced.leaves)
        shapes = tuple(shape_of(leaf.value) for leaf in state)
        graph = Graph(name, variables, tuple(eqns), outputs, len(state), batch, leaf_shapes=shapes)
        _check_state(graph, state)
        graph = _annotated(graph, facts)
        graph = with_chosen_backend(graph, _are_on_cpus(abstract))
        return Program(
            graph,
            traced.module,
            traced.out_tree,
            Signature.of(call, function),  # what the step reads after the trace
            function,
            axes=tuple(leaf.axes for leaf in inputs),
            user_shardings=tuple(leaf.user_sharding for leaf in inputs),
        )

    return trace_without_side_effects(record_program, function.reads, name)


class _Leaf(NamedTuple):
    """A leaf of the arguments of a call, as its trace sees it."""

    value: Any  # as the caller passes it
    name: str  # in the program
    path: str  # in messages
    abstract: Any  # an `Abstract` for an input of the program, or a `Constant`
    axes: tuple[str, ...]  # the mesh axes over which transforms distribute it
    user_sharding: UserSharding | None  # how the step itself divides it
    spec: Any  # the layout in which the step sees it, if the step itself divides it
    is_state: bool
    in_batch: bool  # whether it is a tensor of the batch, which differs from rank to rank

    def empty(self, otherwise: str) -> torch.Tensor:
        """An uninitialised tensor for an input. That of a meta leaf is on the device `otherwise`."""
        return self.abstract.empty(otherwise, getattr(self.value, "requires_grad", False))


@dataclass(frozen=True)
class _FlatStep:
    """A step as a function of flat tensors, one for each input of the program. make_fx traces it."""

    fn: Callable
    name: str
    call: BoundCall
    leaves: Sequence[_Leaf]

    @property
    def inputs(self) -> list[_Leaf]:
        """The leaves that are inputs of the program. The others are constants."""
        return [leaf for leaf in self.leaves if isinstance(leaf.abstract, Abstract)]

    def empty_inputs(self, device: str) -> list[torch.Tensor]:
        """A new tensor for each input. Those of meta leaves are on this device."""
        return [leaf.empty(device) for leaf in self.inputs]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        tree = pytree.tree_structure(self.call.tree())
        arguments = pytree.tree_unflatten(_seen_by_step(self.leaves, tensors), tree)
        result = self.call.of_tree(arguments).run(self.fn)
        _check_result(self.name, result, self.call.state)
        return _local_results([leaf for leaf in self.leaves if leaf.is_state], *result)


def _leaves_of(
    call: BoundCall,
    function: StepFunction,
    axes: Sequence[tuple[str, ...]],
    memories: Sequence[Memory],
) -> list[_Leaf]:
    """The leaves of a call: first the state, then the batch, then the extra argument.

    Raises: TypeError or ValueError for a leaf that a program cannot have.
    """
    values = pytree.tree_leaves(call.tree())
    arguments = call.state, *call.batch, *call.extra
    names, paths = leaf_names(call.parameters(function), arguments)
    num_state = len(pytree.tree_leaves(call.state))
    end_of_batch = len(values) - len(pytree.tree_leaves(call.extra))
    refuse_wrappers(zip(paths, values))
    check_state(paths, values[:num_state])
    leaves = []
    for i, (value, name, path) in enumerate(zip(values, names, paths)):
        leaf_axes = axes[i] if axes else ()
        user_sharding = UserSharding.of(value, leaf_axes)
        if user_sharding is not None and user_sharding.problem is not None:
            raise no_parts(path, user_sharding.problem)
        is_state = i < num_state
        if not is_state and UserSharding.cut_over(value, leaf_axes):
            raise cut_batch(path)
        in_batch = num_state <= i < end_of_batch and isinstance(value, torch.Tensor)
        abstract: Any = Abstract.of(value, is_state, user_sharding)
        if is_state and memories and memories[i] == "host":
            abstract = abstract._replace(device="meta")
        spec = spec_of(value, user_sharding)
        leaves.append(
            _Leaf(value, name, path, abstract, leaf_axes, user_sharding, spec, is_state, in_batch)
        )
    return leaves


def _seen_by_step(leaves: Sequence[_Leaf], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The leaves that the step sees, with these tensors for the inputs of the program."""
    unread = iter(tensors)
    arguments = []
    for leaf in leaves:
        if isinstance(leaf.abstract, Constant):
            arguments.append(leaf.abstract.value)
        else:
            arguments.append(around(next(unread), leaf.spec))
    return arguments


def _local_results(state: Sequence[_Leaf], new_state: Any, output: Any) -> tuple[Any, Any]:
    """The new state and the output of a step, with local tensors for DTensors.

    Raises: TypeError for an object among the outputs that is neither a tensor nor a constant.
    """
    paths = [leaf.path for leaf in state]
    new, tree = pytree.tree_flatten(new_state)
    new, output = local_results(new, [leaf.spec for leaf in state], paths, opened(output))
    refuse_wrappers((*zip(paths, new), *named_outputs(output)))
    return pytree.tree_unflatten(new, tree), opened(output)


def _annotated(graph: Graph, facts: Mapping[Eqn, Fact]) -> Graph:
    """The program with regions for its equations, and with recomputation of the results that checkpoints drop."""
    graph = dce(label_regions(graph, facts))
    checkpoint: dict[Var, int | None] = {}
    drops: set[Var] = set()
    for e, fact in facts.items():
        for v in e.results:
            checkpoint[v] = fact.checkpoint
            if fact.dropped:
                drops.add(v)
    return checkpointed(graph, checkpoint, drops) if drops else graph


def _check_result(name: str, result: Any, state: Any) -> None:
    if not (isinstance(result, tuple) and len(result) == 2):
        kind = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise ValueError(
            f"trace: {name} returned {kind}; a train step returns (state, output).\n"
            f"Return the new state first, in the structure of the old one, then one output."
        )
    old, old_tree = pytree.tree_flatten_with_path(state)
    new, new_tree = pytree.tree_flatten_with_path(result[0])
    if old_tree != new_tree:
        old_keys = {pytree.keystr(keys) for keys, _ in old}
        new_keys = {pytree.keystr(keys) for keys, _ in new}
        changes = []
        if old_keys - new_keys:
            changes.append(f"missing: {', '.join(sorted(old_keys - new_keys)[:4])}")
        if new_keys - old_keys:
            changes.append(f"new: {', '.join(sorted(new_keys - old_keys)[:4])}")
        raise ValueError(
            f"trace: {name} returned a state of another structure than it was given"
            f" ({'; '.join(changes) or f'{new_tree} for {old_tree}'}).\n"
            f"Return every leaf of the state, in the same containers; keep anything else in the output."
        )


def _check_state(graph: Graph, state: Sequence[_Leaf]) -> None:
    for old, new, leaf in zip(graph.inputs, graph.outputs, state):
        if not isinstance(new, Var) or (old.dtype, old.shape) != (new.dtype, new.shape):
            got = new.type if isinstance(new, Var) else repr(new)
            raise ValueError(
                f"trace: {graph.name} was given {leaf.path}: {old.type} and returned {got} in its place.\n"
                f"State keeps its shapes and dtypes from step to step; cast it back before returning it."
            )
