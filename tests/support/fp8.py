"""Linear layers in fp8 with a scale for each tensor, in the forms in which people write them.

The products are those of the dequantised values, which every device computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

import ztrans as zt
from ztrans.runtime.channels import Channel

aten = torch.ops.aten
E4M3 = torch.float8_e4m3fn
Scale = Callable[[torch.Tensor], torch.Tensor]


def dynamic(w: torch.Tensor) -> torch.Tensor:
    """As torchao: the largest magnitude in fp64, the scale in fp32."""
    amax = torch.max(torch.abs(w)).to(torch.float64)
    return (torch.finfo(E4M3).max / torch.clamp(amax, min=1e-12)).to(torch.float32)


def power_of_two(w: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.floor(torch.log2(dynamic(w))))


def infinity_norm(w: torch.Tensor) -> torch.Tensor:
    return E4M3_MAX / torch.linalg.vector_norm(w, ord=float("inf")).float().clamp(min=1e-12)


def keeps_dims(w: torch.Tensor) -> torch.Tensor:
    return E4M3_MAX / w.abs().amax(dim=(0, 1), keepdim=True).float().clamp(min=1e-12)


def of_both_signs(w: torch.Tensor) -> torch.Tensor:
    return E4M3_MAX / torch.maximum(w.max(), -w.min()).float().clamp(min=1e-12)


E4M3_MAX = torch.finfo(E4M3).max
SCALES = {f.__name__: f for f in (dynamic, power_of_two, infinity_norm, keeps_dims, of_both_signs)}


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    most = torch.finfo(dtype).max
    return (x.to(torch.float32) * scale).clamp(min=-most, max=most).to(dtype)


def divided(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The same by a division."""
    return (x.float() / scale.reciprocal()).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a layer scales and casts its weight, and what it saves for backward."""

    scale: Scale = dynamic
    cast: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cast
    saves: str = "weight"  # or "fp8"


class Linear(torch.autograd.Function):
    """x @ w.t() in fp8. The gradient of the output is cast to e5m2."""

    @staticmethod
    def forward(ctx, x, w_t, recipe):
        sx, s = dynamic(x), recipe.scale(w_t)
        w8 = recipe.cast(w_t, s)
        ctx.recipe = recipe
        ctx.save_for_backward(x, *([w8, s] if recipe.saves == "fp8" else [w_t]))
        return (cast(x, sx).float() @ w8.float()) / (sx * s).reshape(())

    @staticmethod
    def backward(ctx, g):
        x, *saved = ctx.saved_tensors
        w8, s = (
            saved
            if ctx.recipe.saves == "fp8"
            else (ctx.recipe.cast(saved[0], (s := ctx.recipe.scale(saved[0]))), s)
        )
        sg = dynamic(g)
        dx = (cast(g, sg, torch.float8_e5m2).float() @ w8.float().t()) / (sg * s).reshape(())
        return dx, (x.t() @ g), None


def loss(params: dict, x: torch.Tensor, y: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    h = torch.relu(Linear.apply(x, params["up"].t(), recipe))
    return (Linear.apply(h, params["down"].t(), recipe).float() - y).square().mean()


def step_of(recipe: Recipe, frozen: tuple[str, ...] = ()) -> Callable:
    """A step of SGD with `recipe`."""

    def step(state, batch):
        params = {k: p.detach().requires_grad_(k not in frozen) for k, p in state["params"].items()}
        value = loss(params, *batch, recipe)
        trained = [k for k, p in params.items() if p.requires_grad]
        grads = dict(zip(trained, torch.autograd.grad(value, [params[k] for k in trained])))
        new = {
            k: p - 0.1 * grads[k].to(p.dtype) if k in grads else p
            for k, p in state["params"].items()
        }
        return {"params": new}, value

    return step


def state_of(
    up: int = 20, inner: int = 8, out: int = 10, dtype: torch.dtype = torch.float32
) -> dict:
    """Weights of very different magnitudes on the first and the last rank."""
    ramp = lambda rows: torch.linspace(0.1, 3, rows)[:, None]
    params = {"up": ramp(up) * torch.randn(up, inner), "down": ramp(out) * torch.randn(out, up)}
    return {"params": {k: p.to(dtype) for k, p in params.items()}}


def batch_of(rows: int = 4, inner: int = 8, out: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, inner), torch.randn(rows, out)


def lower(
    step: Callable, *transforms: zt.Transform, state=None, mesh=None, **options
) -> zt.stages.Lowered:
    """A step lowered over `mesh`, by default for two ranks."""
    shard = zt.shard_params(mesh or zt.AbstractMesh(dp=2), **options)
    return zt.chain(shard, *transforms)(step).lower(state or state_of(), batch_of())


class Scaled(torch.Tensor):
    """An fp8 tensor with its scale, which dequantises its factors when it is multiplied, as that of torchao."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=torch.float32
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data8, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return Scaled(tensors["data8"], tensors["scale"])

    @classmethod
    def __torch_dispatch__(cls, op, types, args, kwargs=None):
        if op in (
            aten.t.default,
            aten.view.default,
            aten.detach.default,
            aten._unsafe_view.default,
        ):
            return cls(op(args[0].data8, *args[1:]), args[0].scale)
        if op is not aten.mm.default:
            raise NotImplementedError(f"{op} of fp8")
        a, b = args
        return op(a.data8.float(), b.data8.float()) / (a.scale * b.scale)


class ToScaled(torch.autograd.Function):
    """The gradient of the cast is that of the identity."""

    @staticmethod
    def forward(ctx, x):
        s = dynamic(x)
        return Scaled(cast(x, s), s)

    @staticmethod
    def backward(ctx, g):
        return g


class ScaledMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_t):
        ctx.save_for_backward(x, w_t)
        return torch.mm(ToScaled.apply(x), ToScaled.apply(w_t))

    @staticmethod
    def backward(ctx, g):
        x, w_t = ctx.saved_tensors
        g8 = ToScaled.apply(g)
        return torch.mm(g8, ToScaled.apply(w_t).t()), torch.mm(g8.t(), ToScaled.apply(x)).t()


class ScaledLinear(torch.nn.Linear):
    """As torchao's `Float8Linear`: it replaces a linear layer, and the parameters keep their dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ScaledMatmul.apply(x, self.weight.t()) + self.bias


def on_processes(mesh, report: Callable) -> None:
    """Two steps of every rank, in messages to each other rank and in collectives of the backend, against lock-step."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(0)
    whole, batches = state_of(), [[(batch_of(),) for _ in range(ranks)] for _ in range(2)]
    fn, transforms = step_of(Recipe()), (zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())
    expected, lowered = whole, lower(fn, *transforms, state=whole, mesh=zt.AbstractMesh(dp=ranks))
    for each in batches:
        expected, outputs = lowered.lockstep(expected, each)
    for direct in (True, False):
        original = Channel.is_gloo
        Channel.is_gloo = direct
        try:
            step = zt.chain(zt.shard_params(mesh), *transforms)(fn)
            state = step.shard(whole)
            for each in batches:
                state, output = step(state, *each[rank])
        finally:
            Channel.is_gloo = original
        pairs = zip(pytree.tree_leaves(step.unshard(state)), pytree.tree_leaves(expected))
        bits = all(torch.equal(a, b) for a, b in pairs) and torch.equal(output, outputs[rank])
        report("fp8", direct=direct, bitwise=bits)
