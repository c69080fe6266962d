"""JAX: the same step under jit, with parameters sharded over the hosts as in FSDP, over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .model import EPS, LR, Config, Task


def norm(p: dict, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    scale = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return centred * scale * p["weight"] + p["bias"]


def linear(p: dict, x: jax.Array) -> jax.Array:
    return x @ p["weight"].T + p["bias"]


def under(p: dict, prefix: str) -> dict:
    return {
        name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)
    }


def block(p: dict, heads: int, x: jax.Array) -> jax.Array:
    batch, sequence, width = x.shape
    part = lambda name: under(p, f"{name}.")
    qkv = linear(part("qkv"), norm(part("norm1"), x)).reshape(
        batch, sequence, 3, heads, width // heads
    )
    seen = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    x = x + linear(part("proj"), seen.reshape(x.shape))
    return x + linear(
        part("down"), jax.nn.gelu(linear(part("up"), norm(part("norm2"), x)), approximate=False)
    )


def loss_of(
    config: Config, gather: Callable, params: dict, x: jax.Array, y: jax.Array
) -> jax.Array:
    layer = lambda name: gather(under(params, f"{name}."))
    hidden = layer("token")["weight"][x]
    for i in range(config.layers):
        hidden = block(layer(f"blocks.{i}"), config.heads, hidden)
    logits = norm(layer("norm"), hidden) @ layer("head")["weight"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1).mean()


def adamw(state: dict, grads: dict, b1=0.9, b2=0.999, decay=0.01) -> dict:
    count = state["count"] + 1
    m = {k: b1 * m + (1 - b1) * grads[k] for k, m in state["m"].items()}
    v = {k: b2 * v + (1 - b2) * jnp.square(grads[k]) for k, v in state["v"].items()}
    ratio = {k: m[k] / (1 - b1**count) / (jnp.sqrt(v[k] / (1 - b2**count)) + EPS) for k in m}
    params = {k: p - LR * (ratio[k] + decay * p) for k, p in state["params"].items()}
    return {"params": params, "m": m, "v": v, "count": count}


def fsdp(task: Task) -> Callable[[], float]:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    coordinator = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    # Processes are stopped between turns. With the default, JAX would take a stopped process for dead.
    jax.distributed.initialize(
        coordinator, task.ranks, task.rank, heartbeat_timeout_seconds=100_000
    )
    mesh = jax.make_mesh((task.ranks,), ("dp",), axis_types=(AxisType.Auto,))
    cut, everywhere = NamedSharding(mesh, P("dp")), NamedSharding(mesh, P())
    mine = partial(jax.make_array_from_process_local_data, cut)

    def lay(p) -> jax.Array:
        return mine(p.detach().chunk(task.ranks)[task.rank].numpy(), p.shape)

    params = {name: lay(p) for name, p in task.model().named_parameters()}
    zeros = [{name: jnp.zeros_like(p) for name, p in params.items()} for _ in range(2)]
    state = {
        "params": params,
        "m": zeros[0],
        "v": zeros[1],
        "count": jnp.zeros((), device=everywhere),
    }
    shape = task.ranks * task.config.batch, task.config.sequence
    batch = [mine(tokens.numpy(), shape) for tokens in task.batch()]
    gather = partial(jax.tree.map, lambda p: lax.with_sharding_constraint(p, everywhere))

    @jax.jit(
        donate_argnums=0, out_shardings=(jax.tree.map(lambda x: x.sharding, state), everywhere)
    )
    def train_step(state: dict, x: jax.Array, y: jax.Array) -> tuple[dict, jax.Array]:
        loss, grads = jax.value_and_grad(partial(loss_of, task.config, gather))(
            state["params"], x, y
        )
        return adamw(state, grads), loss

    def step() -> jax.Array:
        nonlocal state
        state, loss = jax.block_until_ready(train_step(state, *batch))
        return loss

    return step
