"""Let updates on a GPU read half-precision gradients, without casts to fp32.

    g0 = mm(a, b)                                     g0 = mm(a, b)
    g = cast(g0, f32)                                 n = norm(g0, dtype=f32)
    n = norm(g)                                -->    ...
    ...                                               p1, m1, v1 = fused_adamw([p], [g0], [m], [v], ..., scale=s)
    c = mul(g, s)
    p1, m1, v1 = _fused_adamw([p], [c], [m], [v], ...)

PyTorch's fused optimizers take gradients of the dtype of the parameters, so backward under autocast ends with casts.
The kernel of `ops/fused_adamw.py` does not need them. It moves 26 bytes for each parameter instead of 34. With clipping
by the norm it is 28 instead of 46, because the norm reads the gradient in half precision and the update scales it.

Updates keep their bits; a norm may add its terms in another order. A gradient keeps its cast if anything else reads it,
or if its update has an option that the kernel lacks. Adam without an L2 penalty is AdamW without decay. Inductor fuses
a cast with the equation that computes its argument, without rounding the argument to half precision, unless that
equation is a matrix product. So for Inductor only the casts of products are dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from ...ir.dependencies import depending
from ...ir.graph import Eqn, Graph, Var, producers, users, variables
from ...ir.op_facts import CAST, is_matmul, op_facts, rearranges
from ...ir.pairing import pair
from ...ir.rewriter import Rewriter
from ...ir.verifier import check
from ...ops import HALF

aten = torch.ops.aten
_NORM = aten.linalg_vector_norm.default
FUSED_ADAMW = torch.ops.ztrans.fused_adamw.default
# The updates of PyTorch that our kernel can compute.
_UPDATES = ("_fused_adam", "_fused_adamw")
# The positions of the arguments that our kernel takes: all lists but max_exp_avg_sqs, which only amsgrad uses.
_LISTS = (0, 1, 2, 3, 5)
# The options that our kernel lacks.
_REFUSED = ("amsgrad", "maximize", "grad_scale", "found_inf")


def inputs_on_gpu(graph: Graph, inputs: Sequence[torch.Tensor]) -> set[Var]:
    """The inputs of a program that are contiguous on a GPU, and the copies of inputs in other memories."""
    values = {v for v, x in zip(graph.inputs, inputs) if x.is_cuda and x.is_contiguous()}
    if values:
        for wait, started in pair(graph, include_copies=True).waits.items():
            source = started.start.ins[0]
            if source.memory != "device" and source in graph.inputs:
                values.add(wait.out)
    return values


def half_gradients(graph: Graph, on_gpu: Set[Var], of_products: bool = False) -> Graph:
    """The program with updates that read half-precision gradients, if the parameter and its moments are `on_gpu`.

    With `of_products`, only gradients that are matrix products lose their casts. A program without such an update is
    returned unchanged.
    """
    updates = [eqn for eqn in graph.eqns if _has_kernel(eqn, on_gpu)]
    if not updates or _spans_devices(graph):
        return graph
    uses = _Uses.of(graph, on_gpu, of_products)
    new = Rewriter(graph)
    reads_half = False
    for update in updates:
        gradient = uses.gradient_of(update)
        if gradient is not None:
            gradient.let_update_read_half(update, new)
            reads_half = True
    return check(new.applied()) if reads_half else graph


@dataclass(frozen=True)
class _Gradient:
    """The equations between a half-precision gradient and its update.

    Attributes:
        cast: the cast of the half-precision gradient to fp32.
        scaling: the product of the gradient and a scalar, or None.
        norms: the norms that read the gradient.
    """

    cast: Eqn
    scaling: Eqn | None
    norms: tuple[Eqn, ...]

    @property
    def half(self) -> Var:
        return self.cast.ins[0]

    def let_update_read_half(self, update: Eqn, new: Rewriter) -> None:
        """Let the update and the norms read the half-precision gradient, and drop the cast and the scaling."""
        new.replace(update, _half_update(update, self))
        new.drop(self.cast)
        if self.scaling is not None:
            new.drop(self.scaling)
        for norm in self.norms:
            args = (self.half, *norm.args[1:])
            new.replace(norm, norm.replace(args=args, kwargs={"dtype": torch.float32}))


@dataclass(frozen=True)
class _Uses:
    """The makers and the readers of a program's values.

    Attributes:
        makers: the equation that computes each value.
        readers: the equations that read each value. None stands for the outputs of the program.
        on_gpu: the values on the GPU.
        halves: the half-precision values that updates may read.
    """

    makers: Mapping[Var, Eqn]
    readers: Mapping[Var | None, Sequence[Eqn | None]]
    on_gpu: Collection[Var]
    halves: Collection[Var]

    @staticmethod
    def of(graph: Graph, on_gpu: Set[Var], of_products: bool) -> _Uses:
        readers: dict[Var | None, list[Eqn | None]] = {}
        for v, eqns in users(graph).items():
            readers[v] = [*eqns]
        for v in variables(graph.outputs):
            readers.setdefault(v, []).append(None)
        makers = producers(graph.eqns)
        candidates = _products(graph) if of_products else makers
        halves = {v for v in candidates if v.dtype in HALF}
        return _Uses(makers, readers, depending(graph.eqns, on_gpu), halves)

    def gradient_of(self, update: Eqn) -> _Gradient | None:
        """The gradient of an update; None if it was not cast from half precision, or if something else reads it."""
        gradient = update.args[1][0]
        if not _is_ours(update) and update.outs[1] in self.readers:  # the gradient as it leaves it
            return None
        scaling = self._scaling(gradient, update)
        unscaled = scaling.args[0] if scaling is not None else gradient
        cast = self.makers.get(unscaled)
        if cast is None or not self._widens(cast):
            return None
        norms = []
        for reader in self._other_readers(cast.out, scaling or update):
            if reader is None or reader.op is not _NORM or reader.kwargs:
                return None
            norms.append(reader)
        return _Gradient(cast, scaling, tuple(norms))

    def _widens(self, eqn: Eqn) -> bool:
        """Whether an equation casts half precision to fp32."""
        return eqn.op is CAST and eqn.ins[0] in self.halves and eqn.out.dtype == torch.float32

    def _scaling(self, gradient: Var, update: Eqn) -> Eqn | None:
        """The product of a gradient and an fp32 scalar on the GPU that only this update reads, or None."""
        maker = self.makers.get(gradient)
        if maker is None or maker.op is not aten.mul.Tensor:
            return None
        if self._other_readers(gradient, update):
            return None
        factor = maker.args[1]
        is_scalar = isinstance(factor, Var) and not factor.shape and factor.dtype == torch.float32
        return maker if is_scalar and factor in self.on_gpu else None

    def _other_readers(self, v: Var, reader: Eqn) -> list[Eqn | None]:
        """The readers of a value other than `reader`."""
        return [eqn for eqn in self.readers.get(v, ()) if eqn is not reader]


def _products(graph: Graph) -> set[Var]:
    """The results of matrix products, and their views."""
    products: set[Var] = set()
    for eqn in graph.eqns:
        is_view = bool(eqn.ins) and eqn.ins[0] in products and rearranges(eqn)
        if is_matmul(eqn) or is_view:
            products.update(eqn.results)
    return products


def _spans_devices(graph: Graph) -> bool:
    """Whether casts move tensors between devices, so that a gradient may be elsewhere than its parameter."""
    devices = set()
    for eqn in graph.eqns:
        if eqn.op is CAST and eqn.out.shape and "device" in eqn.kwargs:
            devices.add(torch.device(eqn.kwargs["device"]).type)
    return len(devices) > 1


def _has_kernel(eqn: Eqn, on_gpu: Set[Var]) -> bool:
    """Whether the kernel can compute an update: the parameter and the moments are inputs on a GPU."""
    overwritten = [*variables(eqn.args[0]), *variables(eqn.args[2:4])] if eqn.args else []
    if _is_ours(eqn):
        return on_gpu >= set(overwritten)
    is_fp32 = all(v.dtype == torch.float32 for v in overwritten)
    return has_options_of_kernel(eqn) and is_fp32 and on_gpu >= set(overwritten)


def _is_ours(eqn: Eqn) -> bool:
    """Whether the kernel computes an update already, of state in half precision (see `stored_updates`)."""
    return eqn.op is FUSED_ADAMW


def has_options_of_kernel(eqn: Eqn) -> bool:
    """Whether an equation is an update by PyTorch with options that the kernel has."""
    name = op_facts(eqn.op).name
    if name not in _UPDATES or any(eqn.kwargs.get(option) for option in _REFUSED):
        return False
    if name == "_fused_adam" and eqn.kwargs["weight_decay"] != 0:
        # PyTorch's machine code rounds `grad + weight_decay * param` once for some elements of a thread, and twice for
        # others, so its bits cannot be kept.
        return False
    return isinstance(eqn.kwargs["lr"], Var)


def _half_update(eqn: Eqn, gradient: _Gradient) -> Eqn:
    """The update by our kernel, which reads the half-precision gradient."""
    update = eqn if _is_ours(eqn) else by_kernel(eqn)
    params, _, *others = update.args
    kwargs = dict(update.kwargs)
    if gradient.scaling is not None:
        kwargs["scale"] = gradient.scaling.args[1]
    return update.replace(args=(params, [gradient.half], *others), kwargs=kwargs)


def by_kernel(eqn: Eqn) -> Eqn:
    """The update by our kernel, of one by PyTorch."""
    args = tuple(eqn.args[k] for k in _LISTS)
    options = {argument.name for argument in FUSED_ADAMW._schema.arguments}
    kwargs = {name: x for name, x in eqn.kwargs.items() if name in options}
    outs = (eqn.outs[0], *eqn.outs[2:])
    return eqn.replace(op=FUSED_ADAMW, args=args, outs=outs, kwargs=kwargs)
