"""Recorded calls: make_fx records a call of a higher-order operator as a graph, and each of its functions as another.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention
from torch.utils import _pytree as pytree

from ...ir.ambient import having
from ...ir.source import Source
from ..operation import Seen


def record_call(
    op: HigherOrderOperator, args: tuple, kwargs: dict, source: Source | None
) -> tuple[fx.GraphModule, Sequence[torch.Tensor], Any]:
    """Call a higher-order operator on fake tensors.

    Returns: The graph of the call, the tensors among its arguments, and what it returned.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    results: list[Any] = []

    def call(*tensors: torch.Tensor) -> list[Any]:
        rest = iter(tensors)
        given = [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves]
        own_args, own_kwargs = pytree.tree_unflatten(given, tree)
        results.append(op(*own_args, **own_kwargs))
        return pytree.tree_leaves(results[0])

    inputs = [x for x in leaves if isinstance(x, torch.Tensor)]
    custom = having(fx_traceback, current_meta={**fx_traceback.current_meta, "custom": {"source": source}})
    with custom, _sparingly(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute")  # make_fx looks at that of every tensor
        module = make_fx(call, None, "fake", _allow_non_fake_inputs=True, _disable_torch_fn_metadata_mode=True)(*inputs)
    return module, inputs, results[0]


@contextlib.contextmanager
def _sparingly() -> Iterator[None]:
    """Let make_fx record of each result what the import reads, and generate no code for the graph.

    In the graphs of functions it also keeps a copy of each fake tensor: PyTorch reads them to differentiate the
    functions.
    """
    plain, call = proxy_tensor.set_meta, list[fx.Tracer]()

    def set_meta(proxy: Any, result: Any) -> Any:
        call[:] = call or [proxy.tracer]
        proxy.node.meta["seen"] = Seen.of(result)
        return proxy if proxy.tracer is call[0] else plain(proxy, result)

    with having(proxy_tensor, set_meta=set_meta), _use_lazy_graph_module(True):
        yield


def forget_fakes(module: fx.GraphModule) -> None:
    """Remove the fake tensors that PyTorch has kept in the graphs of functions."""
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            node.meta.pop("val", None)


@contextlib.contextmanager
def attention_on_every_device() -> Iterator[None]:
    """Let flex_attention be traced for any device. Without a kernel, a program computes it by its dense meaning."""
    with having(flex_attention, _validate_device=lambda query, key, value: None), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield
