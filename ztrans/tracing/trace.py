"""trace(fn, state, *batch): record a train step as a `Graph` of its forward, backward and update.

make_fx traces the step into an FX graph (see `fx_trace`), in which each node has the user's line and the facts for its
region (see `annotate`). The graph is imported as functional equations (see `import_fx`). A step that changes the Python
values that it reads is refused (see `purity`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..calling.call import BoundCall, StepFunction
from ..calling.inputs import Inputs, check_state, local_inputs, shape_of
from ..calling.purity import trace_without_side_effects
from ..calling.signature import Abstract, Constant, Signature, Surroundings
from ..calling.trees import leaf_names, named_outputs, none_as_empty, opened, state_leaves
from ..ir.ambient import refuse_inside, without_autocast
from ..ir.graph import Eqn, Graph, Var, dce
from ..ir.higher_order import with_chosen_backend
from ..ir.layout import UserSharding
from ..ir.recompute import checkpointed
from .dtensors import around, cut_batch, local_results, refuse_wrappers, spec_of
from .errors import no_parts
from .fx_trace import check_torch, trace_by_make_fx
from .import_fx import import_fx
from .regions import Fact, label_regions


class Imported(NamedTuple):
    """A run of a step as a program."""

    graph: Graph
    out_tree: pytree.TreeSpec  # the tree of the result
    module: fx.GraphModule  # the FX graph of the run


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
    axes: tuple[
        tuple[str, ...], ...
    ] = ()  # for each input, the mesh axes over which transforms distribute it
    owns: tuple[
        UserSharding | None, ...
    ] = ()  # how the step itself divides each input of the program

    @property
    def paths_of_inputs(self) -> list[str]:
        """The paths of the leaves that are inputs of the program."""
        return [self.signature.paths[i] for i in self.signature.inputs]

    def local_inputs(self, graph: Graph, call: BoundCall, caller: str | None = None) -> Inputs:
        """The inputs of `graph`, which transforms have made of this program, in a call (see `inputs.local_inputs`)."""
        return local_inputs(
            graph, self.signature, self.axes, self.owns, call, self.function, caller
        )

    def returned(self, added: Sequence[str]) -> pytree.TreeSpec:
        """The tree of what a step returns: `(state, output)`, or `(state, (output, added))` with a dict of outputs that
        transforms have added."""
        if not added:
            return self.out_tree
        state, output = pytree.tree_unflatten([0] * self.out_tree.num_leaves, self.out_tree)
        output = opened(output)
        return pytree.tree_structure((none_as_empty(state), (output, dict.fromkeys(added, 0))))


def _device_of(leaves: Iterable[Abstract]) -> str:
    """The first device of the leaves other than the CPU, or the CPU."""
    return next((leaf.device for leaf in leaves if leaf.device not in ("cpu", "meta")), "cpu")


def _are_on_cpus(leaves: Sequence[Abstract]) -> bool:
    """Whether a program runs on CPUs. One that is traced from meta tensors alone is planned for GPUs.

    Scalars, such as the counters of an optimizer, may be on CPUs beside a GPU.
    """
    return (
        any(leaf.device == "cpu" and leaf.shape for leaf in leaves) and _device_of(leaves) == "cpu"
    )


def trace(
    fn: Callable,
    call: BoundCall,
    function: StepFunction,
    *,
    micro: int = 1,
    device: str | None = None,
    axes: Sequence[tuple[str, ...]] = (),
) -> Program:
    """Record a call of a train step, `fn(state, *batch) -> (state, output)`, as a `Program`.

    Args:
        fn: the train step.
        call: its arguments. Leaves may be real, fake or meta tensors, DTensors, and numbers, which become inputs, never
            constants.
        function: what is known of `fn`.
        micro: the number of equal parts of the batch; the program is for one of them.
        device: the device on which meta leaves are traced; by default that of the other leaves.
        axes: for each leaf, the mesh axes over which transforms distribute it; by default none. On these a DTensor is
            traced whole. Along other axes the step sees a DTensor, and the program has its local part.

    Raises:
        ValueError: the step reads a value while it is traced, closes over a tensor, changes Python values that it
            reads, or returns a state of another structure.
        RuntimeError: ztrans does not support this version of torch.
        TypeError: `trace` is called inside of a transform of torch.func or of another trace.
    """
    check_torch()
    name = _name(fn)
    refuse_inside(f"trace: {name}", call)
    part = call.micro_batch(function, micro) if micro > 1 else call
    arguments = _Arguments.of(part, part.parameters(function), axes)
    inputs = arguments.inputs()

    def make_inputs() -> list[torch.Tensor]:
        return arguments.empty(device or _device_of(arguments.described))

    def call_fn(tensors: Sequence[torch.Tensor]) -> Any:
        result = part.of_tree(arguments.around(tensors)).run(fn)
        _check_result(fn, result, part.state)
        return arguments.local_results(result)

    def record_program() -> Imported:
        traced = trace_by_make_fx(call_fn, make_inputs, [v.name for v in inputs], name)
        batch = arguments.in_batch(inputs)
        with without_autocast():
            eqns, tensors, facts = import_fx(traced.module, inputs, batch)
        outputs = _with_constants(tensors, traced.constants)
        num_state = arguments.num_state
        shapes = tuple(map(shape_of, arguments.leaves[:num_state]))
        graph = Graph(name, inputs, tuple(eqns), outputs, num_state, batch, leaf_shapes=shapes)
        _check_state(graph, arguments.paths)
        graph = _annotated(graph, facts)
        graph = with_chosen_backend(graph, _are_on_cpus(arguments.described))
        return Imported(graph, traced.out_tree, traced.module)

    traced, reads = trace_without_side_effects(record_program, function.reads, name)
    signature = Signature.of(call, function, Surroundings.of(function)._replace(reads=reads))
    of_inputs = arguments.of_inputs(arguments.axes), arguments.of_inputs(arguments.owns)
    return Program(traced.graph, traced.module, traced.out_tree, signature, function, *of_inputs)


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a call, as its trace sees them.

    Attributes:
        leaves, tree: the leaves of all arguments, those of the state first, and their tree.
        names, paths: for each leaf, its short name, and its path in messages.
        abstract: for each leaf, its properties, or the constant that it is.
        num_state, num_extra: how many leaves belong to the state, and how many to the extra inputs, which come last.
        axes: for each leaf, the mesh axes over which transforms distribute it.
        owns: for each leaf, how the step itself divides it.
    """

    leaves: Sequence[Any]
    tree: pytree.TreeSpec
    names: Sequence[str]
    paths: Sequence[str]
    abstract: Sequence[Abstract | Constant]
    num_state: int
    num_extra: int
    axes: Sequence[tuple[str, ...]]
    owns: Sequence[UserSharding | None]

    @staticmethod
    def of(
        call: BoundCall, parameters: Sequence[str], axes: Sequence[tuple[str, ...]]
    ) -> _Arguments:
        """The arguments of a call.

        Raises: TypeError or ValueError for a leaf that a program cannot have.
        """
        leaves, tree = pytree.tree_flatten(call.tree())
        names, paths = leaf_names(parameters, (call.state, *call.batch, *call.extra))
        num_state = len(state_leaves(call.state))
        refuse_wrappers(zip(paths, leaves))
        check_state(paths, leaves[:num_state])
        axes = axes or [()] * len(leaves)
        owns = _owns(leaves, paths, axes, num_state)
        abstract = [Abstract.of(leaf, i < num_state, owns[i]) for i, leaf in enumerate(leaves)]
        num_extra = len(pytree.tree_leaves(call.extra))
        return _Arguments(leaves, tree, names, paths, abstract, num_state, num_extra, axes, owns)

    def of_inputs(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Of values for all leaves, those for the inputs of the program. The other leaves are constants."""
        return tuple(x for x, leaf in zip(values, self.abstract) if isinstance(leaf, Abstract))

    @property
    def described(self) -> tuple[Abstract, ...]:
        """The properties of the inputs."""
        return self.of_inputs(self.abstract)

    def inputs(self) -> tuple[Var, ...]:
        """The inputs of the program."""
        return tuple(
            Var(name, x.dtype, x.shape)
            for name, x in zip(self.of_inputs(self.names), self.described)
        )

    def in_batch(self, inputs: Sequence[Var]) -> frozenset[Var]:
        """The inputs that are tensors of the batch, which differ from rank to rank."""
        end = len(self.leaves) - self.num_extra
        is_batch = [
            self.num_state <= i < end and isinstance(x, torch.Tensor)
            for i, x in enumerate(self.leaves)
        ]
        return frozenset(itertools.compress(inputs, self.of_inputs(is_batch)))

    def empty(self, otherwise: str) -> list[torch.Tensor]:
        """An uninitialised tensor for each input. That of a meta leaf is on the device `otherwise`."""
        trained = self.of_inputs([getattr(leaf, "requires_grad", False) for leaf in self.leaves])
        return [x.empty(otherwise, trains) for x, trains in zip(self.described, trained)]

    @functools.cached_property
    def _specs(self) -> list[Any]:
        """For each leaf, the layout in which the step sees it, if it divides the leaf itself."""
        return list(map(spec_of, self.leaves, self.owns))

    def around(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The tree of the arguments with these tensors for the inputs."""
        rest = iter(tensors)
        full: list[Any] = []
        for leaf, spec in zip(self.abstract, self._specs):
            full.append(leaf.value if isinstance(leaf, Constant) else around(next(rest), spec))
        return pytree.tree_unflatten(full, self.tree)

    def local_results(self, result: tuple[Any, Any]) -> tuple[Any, Any]:
        """The new state and the output of a step, with local tensors for DTensors.

        Raises: TypeError for an output that holds tensors, and is no tree of them.
        """
        new, tree = pytree.tree_flatten(none_as_empty(result[0]))
        new, output = local_results(new, self._specs, self.paths, opened(result[1]))
        refuse_wrappers((*zip(self.paths, new), *named_outputs(output)))
        return none_as_empty(pytree.tree_unflatten(new, tree)), opened(output)


def _with_constants(tensors: Sequence[Any], constants: Mapping[int, Any]) -> tuple[Any, ...]:
    """The leaves of a result: its tensors in order, and constants at their positions."""
    rest = iter(tensors)
    count = len(tensors) + len(constants)
    return tuple(constants[i] if i in constants else next(rest) for i in range(count))


def _owns(
    leaves: Sequence, paths: Sequence[str], axes: Sequence[Sequence[str]], num_state: int
) -> list[UserSharding | None]:
    """How the step itself divides each leaf, over mesh axes other than those of the leaf."""
    owns = list(map(UserSharding.of, leaves, axes))
    if cut := [
        path
        for x, path, over in [*zip(leaves, paths, axes)][num_state:]
        if UserSharding.cut_over(x, over)
    ]:
        raise cut_batch(cut[0])
    for path, own in zip(paths, owns):
        if own is not None and own.problem is not None:
            raise no_parts(path, own.problem)
    return owns


def _annotated(graph: Graph, facts: Mapping[Eqn, Fact]) -> Graph:
    """The program with regions for its equations, and with recomputation of the results that checkpoints drop."""
    graph = dce(label_regions(graph, facts))
    of_values = {v: fact for e, fact in facts.items() for v in e.results}
    checkpoint = {v: fact.checkpoint for v, fact in of_values.items()}
    drops = {v for v, fact in of_values.items() if fact.dropped}
    return checkpointed(graph, checkpoint, drops) if drops else graph


def _name(fn: Callable) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    return name if name.isidentifier() else "step"


def _check_result(fn: Callable, result: Any, state: Any) -> None:
    if not (isinstance(result, tuple) and len(result) == 2):
        kind = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise ValueError(
            f"trace: {_name(fn)} returned {kind}; a train step returns (state, output).\n"
            f"Return the new state first, in the structure of the old one, then one output."
        )
    before, after = none_as_empty(state), none_as_empty(result[0])
    old, new = pytree.tree_structure(before), pytree.tree_structure(after)
    if old != new:
        had = {pytree.keystr(p) for p, _ in pytree.tree_flatten_with_path(before)[0]}
        has = {pytree.keystr(p) for p, _ in pytree.tree_flatten_with_path(after)[0]}
        lost, gained = sorted(had - has), sorted(has - had)
        changes = [f"missing: {', '.join(lost[:4])}"] * bool(lost) + [
            f"new: {', '.join(gained[:4])}"
        ] * bool(gained)
        raise ValueError(
            f"trace: {_name(fn)} returned a state of another structure than it was given"
            f" ({'; '.join(changes) or f'{new} for {old}'}).\n"
            f"Return every leaf of the state, in the same containers; keep anything else in the output."
        )


def _check_state(graph: Graph, paths: Sequence[str]) -> None:
    for old, new, path in zip(graph.inputs[: graph.num_state], graph.outputs, paths):
        if not isinstance(new, Var) or (old.dtype, old.shape) != (new.dtype, new.shape):
            got = new.type if isinstance(new, Var) else repr(new)
            raise ValueError(
                f"trace: {graph.name} was given {path}: {old.type} and returned {got} in its place.\n"
                f"State keeps its shapes and dtypes from step to step; cast it back before returning it."
            )
