"""A traced step: its program, and the calls that the program is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..calling.call import BoundCall, StepFunction
from ..calling.inputs import Inputs, KnownValue, computed_local_part, local_part
from ..calling.signature import Abstract, Signature, device_of_program
from ..calling.trees import opened
from ..ir.graph import Graph
from ..ir.printer import first_names
from ..ir.source import Source, where
from ..ir.user_sharding import UserSharding


@dataclass(frozen=True)
class Recording:
    """A traced step, and the calls that it is for.

    Attributes:
        graph: the program as written.
        fx: the FX graph from make_fx. It takes the inputs of `graph`, and returns the tensors among its outputs. None
            in a compiled program, because it takes half of the memory of a program.
        out_tree: the tree of the step's result.
        signature: the signature of the calls that the program is for.
        function: the function of the step.
        axes: for each input, the mesh axes over which transforms distribute it.
        user_shardings: for each input, the sharding by the step itself; None if it does not divide the input.
        known: the leaves of the state whose values the step has read, with these values.
    """

    graph: Graph
    fx: fx.GraphModule | None = field(compare=False, repr=False)
    out_tree: pytree.TreeSpec
    signature: Signature
    function: StepFunction = field(compare=False, repr=False)
    axes: tuple[tuple[str, ...], ...]
    user_shardings: tuple[UserSharding | None, ...]
    known: tuple[KnownValue, ...] = field(compare=False, repr=False)

    @property
    def paths_of_inputs(self) -> list[str]:
        """The paths of the leaves that are inputs of the program."""
        return [self.signature.paths[i] for i in self.signature.inputs]

    @property
    def device_type(self) -> str:
        """The type of the program's device: an accelerator if a tensor is on one, else "cpu" or "meta"."""
        leaves = [leaf.abstract for leaf in self.signature.leaves]
        device = device_of_program(leaf for leaf in leaves if isinstance(leaf, Abstract))
        return torch.device(device).type

    def check_fits(self, call: BoundCall, name: str = "") -> None:
        """Check that a call has the signature of the program. The layouts of its leaves may differ.

        Raises: TypeError that calls the program `name` and says what differs.
        """
        expected = self.signature.without_layout()
        actual = Signature.of(call, self.function).without_layout()
        if actual == expected:
            return
        changes = expected.changes(actual)
        state = expected.parameters[0]
        lacking = [k.name for k in self.graph.kept if f"{state}.{k.name}" not in actual.paths]
        if lacking:
            hint = "which transforms keep: step.init(state) adds it"
            changes = [f"{state} lacks {first_names(lacking)}, {hint}"]
        raise _misfit(name or self.graph.name, changes)

    def local_inputs(self, call: BoundCall) -> Inputs:
        """The inputs of the program in a call that fits: this rank's part of each, as a tensor.

        Raises:
            TypeError: an input is sharded in another way than when the step was traced.
            ValueError: a leaf has another value than when the trace read it.
        """
        signature = self.signature
        leaves = pytree.tree_leaves(call.tree())
        tensors: list[torch.Tensor] = []
        for i, expected, leaf_axes in zip(
            signature.inputs, self.user_shardings, self.axes, strict=True
        ):
            leaf = leaves[i]
            sharding = UserSharding.of(leaf, leaf_axes)
            if sharding != expected:
                path = signature.paths[i]
                change = f"{path} was {expected or 'undivided'} and is {sharding or 'undivided'}"
                raise _misfit(self.graph.name, [change])
            # The program writes the state in place, so the state is never copied. Other inputs may be.
            is_state = i < signature.num_state
            tensors.append(local_part(leaf) if is_state else computed_local_part(leaf))
        state = leaves[: signature.num_state]
        for known in self.known:
            if not known.is_in(state[known.position]):
                path = signature.paths[known.position]
                raise _other_value(self.graph.name, path, known.source)
        return Inputs(state, tensors)

    def tree_of_results(self, added_outputs: Sequence[str]) -> pytree.TreeSpec:
        """The tree of a step's result: `(state, output)`, or `(state, (output, added))` with a dict of the outputs that
        transforms have added."""
        if not added_outputs:
            return self.out_tree
        state, output = pytree.tree_unflatten([0] * self.out_tree.num_leaves, self.out_tree)
        added: dict[str, Any] = dict.fromkeys(added_outputs, 0)
        return pytree.tree_structure((state, (opened(output), added)))


def _other_value(name: str, path: str, source: Source | None) -> ValueError:
    """A leaf has another value than when the trace read it."""
    return ValueError(
        f"{name}: {path} has other values than it had when the step was traced, which read them.\n"
        f"  at {where(source)}\n"
        f"Write the new values into the module too, as zt.write_back(model, optimizer, step.unshard(state)) does, and "
        f"call step.retrace(). Or let the step not depend on them: pass a bool."
    )


def _misfit(name: str, changes: Sequence[str]) -> TypeError:
    """A call that the program was not made for."""
    lines = "".join(f"  * {change}\n" for change in changes[:4])
    return TypeError(
        f"{name}: its program was made for another call:\n{lines}"
        f"Lower the step for such a call, or call the step itself, which makes a program for each."
    )
