"""The floating-point operations of attention, grouped products and recurrent layers, compared with figures by hand."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import flop_registry

import ztrans as zt
from ztrans.ir.graph import Eqn, Graph, Var
from ztrans.ir.op_facts import is_matmul
from ztrans.planning.flops import attention_of, flops

aten = torch.ops.aten
BF16 = torch.bfloat16


class GPT(nn.Module):
    """A GPT whose parameters are all in products, but for the embedding."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.token = nn.Embedding(vocab, width)
        linear = functools.partial(nn.Linear, bias=False)
        self.qkv = nn.ModuleList(linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(linear(width, width) for _ in range(layers))
        self.head = linear(width, vocab)

    def forward(self, tokens):
        x = self.token(tokens)
        for qkv, out in zip(self.qkv, self.out):
            parts = qkv(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            x = x + out(seen.transpose(1, 2).flatten(2))
        return self.head(x).flatten(0, 1).logsumexp(-1).mean()


LAYERS, WIDTH, HEADS, VOCAB, BATCH, TOKENS = 3, 64, 4, 96, 2, 128


def gpt_graph(device: str, causal: bool) -> Graph:
    with torch.device(device):
        model = GPT(LAYERS, WIDTH, HEADS, VOCAB, causal)
        tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)

    def step(params, tokens):
        loss = torch.func.functional_call(model, params, (tokens,))
        grads = torch.autograd.grad(loss, list(params.values()))
        return {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads)}, loss.detach()

    return zt.Step.of(step).trace(dict(model.named_parameters()), tokens).graph


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_gpt_has_six_n_t_and_twelve_l_d_t_squared(device, causal):
    """Fused attention computes the scores again in backward, 2LdT^2 more; a causal one computes half of all that."""
    graph = gpt_graph(device, causal)
    products = sum(flops(e, graph) for e in graph.eqns if is_matmul(e))
    in_products = LAYERS * 4 * WIDTH**2 + VOCAB * WIDTH
    attention = (12 + 2) * LAYERS * WIDTH * TOKENS**2 * (0.5 if causal else 1)
    assert products == BATCH * (6 * in_products * TOKENS + attention)
    counted = sum(flops(e, graph) for e in graph.eqns)
    assert products < counted < 1.1 * products


def test_attention_that_is_composed_computes_all_scores_once():
    with sdpa_kernel(SDPBackend.MATH):
        graph = gpt_graph("cpu", causal=True)
    products = sum(flops(e, graph) for e in graph.eqns if is_matmul(e))
    in_products = LAYERS * 4 * WIDTH**2 + VOCAB * WIDTH
    assert products == BATCH * (6 * in_products * TOKENS + 12 * LAYERS * WIDTH * TOKENS**2)


# By name: the attention, and whether heads are the second dim.
FUSED = {
    "for_cpu": (
        lambda q, k, v, causal: aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal
        ),
        True,
    ),
    "flash": (
        lambda q, k, v, causal: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal),
        True,
    ),
    "efficient": (
        lambda q, k, v, causal: aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal
        ),
        True,
    ),
    "cudnn": (
        lambda q, k, v, causal: aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal
        ),
        True,
    ),
    "overrideable": (
        lambda q, k, v, causal: aten._scaled_dot_product_fused_attention_overrideable(
            q, k, v, None, 0.0, causal
        ),
        True,
    ),
    "flash, heads third": (
        lambda q, k, v, causal: aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False
        ),
        False,
    ),
    "efficient, heads third": (
        lambda q, k, v, causal: aten._efficient_attention_forward(
            q, k, v, None, None, None, None, None, 0.0, int(causal), True
        ),
        False,
    ),
}


def attention_flops(attend, heads_second: bool, causal: bool, tokens=(64, 64)) -> list[int]:
    """The operations of forward and of backward of an attention with heads of 32."""
    shapes = []
    for length in (tokens[0], tokens[1], tokens[1]):
        shapes.append((2, 4, length, 32) if heads_second else (2, length, 4, 32))
    q, *kv = (torch.zeros(shape, dtype=BF16, device="meta") for shape in shapes)

    def step(state, k, v):
        seen = attend(state["q"], k, v, causal)[0]
        (grad,) = torch.autograd.grad(seen.float().sum(), [state["q"]])
        return {"q": state["q"] - grad}, None

    graph = zt.Step.of(step).trace({"q": q.requires_grad_()}, *kv).graph
    counted = [e for e in graph.eqns if attention_of(e, graph) is not None]
    assert all(map(is_matmul, counted)), "its results are kept, and it names a place, as products"
    return [flops(e, graph) for e in counted]


@pytest.mark.parametrize("name", FUSED)
def test_every_fused_attention_has_two_products_in_forward_and_five_in_backward(name):
    if name == "overrideable" and torch.__version__ < "2.13":
        pytest.skip(
            "without a backend that overrides it, its backward runs on no tensors, not even on meta"
        )
    product = 2 * 2 * 4 * 64 * 64 * 32
    assert attention_flops(*FUSED[name], causal=False) == [2 * product, 5 * product]
    assert attention_flops(*FUSED[name], causal=True) == [product, 5 * product // 2]


def test_flex_attention_counts_as_attention_to_all_keys():
    """By a formula of ours: the FLOP counter of torch 2.11 has none."""
    product = 2 * 2 * 4 * 64 * 64 * 32

    def attend(q, k, v, causal):
        return (flex_attention(q, k, v),)

    assert attention_flops(attend, heads_second=True, causal=False) == [2 * product, 5 * product]


def test_fewer_queries_than_keys():
    """The first query attends to the first key, and in flash attention on packed rows the last one to the last key."""
    product = 2 * 2 * 4 * 32 * 64 * 32
    (forward, _) = attention_flops(*FUSED["for_cpu"], causal=True, tokens=(32, 64))
    assert forward == 2 * product // 4
    (forward, _) = attention_flops(*FUSED["flash, heads third"], causal=True, tokens=(32, 64))
    assert forward == 2 * product * 3 // 4


@pytest.mark.parametrize("heads", [8, 2])
def test_shared_keys_and_wider_values(heads):
    """Groups of queries share keys (GQA), which is as much work."""

    def attend(state, q, k, v):
        return state, aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False)[0]

    shapes = ((1, 8, 16, 32), (1, heads, 64, 32), (1, heads, 64, 32))
    inputs = (torch.zeros(shape, device="meta") for shape in shapes)
    graph = zt.Step.of(attend).trace(torch.zeros(1, device="meta"), *inputs).graph
    (eqn,) = (e for e in graph.eqns if is_matmul(e))
    assert flops(eqn, graph) == 2 * 8 * 16 * 64 * (32 + 32)


def test_a_product_for_each_group_of_rows():
    """Rows of several experts have a weight each; their gradients are sums over the rows of each expert."""

    def both(state, x, w, y, ends):
        rows = aten._grouped_mm(x, w, ends)
        return state, (rows, aten._grouped_mm(x.t(), y, ends))

    x, y = (torch.zeros(48, width, dtype=BF16, device="meta") for width in (32, 64))
    w = torch.zeros(3, 32, 64, dtype=BF16, device="meta")
    ends = torch.zeros(3, dtype=torch.int32, device="meta")
    graph = zt.Step.of(both).trace(torch.zeros(1, device="meta"), x, w, y, ends).graph
    products = [flops(e, graph) for e in graph.eqns if is_matmul(e)]
    assert products == [2 * 48 * 32 * 64] * 2


@torch.library.custom_op("counted::mix", mutates_args=())
def mix(x: torch.Tensor) -> torch.Tensor:
    return x @ x


@mix.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_operation_of_unknown_cost_is_a_note_of_the_plan(monkeypatch):
    def notes(size: int) -> list[str]:
        def step(state, x):
            return state, (mix(x[:size, :size]), x.exp())

        lowered = zt.Step.of(step).lower(torch.zeros(1), torch.zeros(256, 256))
        return [note for note in lowered.plan.notes if "counted::mix" in note]

    (note,) = notes(256)
    assert note.startswith("counted::mix moves 50% of the bytes, and no formula counts")
    assert not notes(8), "it moves less than 1%"
    monkeypatch.setitem(flop_registry, torch.ops.counted.mix, lambda x, out_val: 2 * len(x) ** 3)
    assert not notes(256)


TURNS, ROWS, INPUTS, HIDDEN = 64, 16, 24, 128


def test_the_products_of_an_lstm_and_what_it_saves_for_backward():
    """Each turn multiplies its input and the hidden state by the weights of four gates; backward does so twice."""
    torch.manual_seed(0)
    model = nn.LSTM(INPUTS, HIDDEN, batch_first=True)

    def step(params, x):
        loss = torch.func.functional_call(model, params, (x,))[0].square().mean()
        grads = torch.autograd.grad(loss, list(params.values()))
        return {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads)}, loss.detach()

    x = torch.zeros(ROWS, TURNS, INPUTS)
    graph = zt.Step.of(step).trace(dict(model.named_parameters()), x).graph
    once = 2 * TURNS * ROWS * 4 * HIDDEN * (INPUTS + HIDDEN)
    layers = {str(e.op): e for e in graph.eqns if "rnn_layer" in str(e.op)}
    assert {name: flops(e, graph) for name, e in layers.items()} == {
        "aten.mkldnn_rnn_layer.default": once,
        "aten.mkldnn_rnn_layer_backward.default": 2 * once,
    }
    assert all(map(is_matmul, layers.values()))

    # PyTorch says that the workspace is empty.
    forward = layers["aten.mkldnn_rnn_layer.default"]
    args = [x.transpose(0, 1), *model.parameters(), *torch.zeros(2, 1, ROWS, HIDDEN)]
    *_, saved = forward.op(*args, *forward.args[len(args) :])
    counted = forward.outs[3].numel
    assert 0.5 * saved.numel() < counted < 2 * saved.numel()


def test_the_products_of_a_layer_of_cudnn():
    """Its weights are one list."""
    f32 = functools.partial(Var, dtype=torch.float32)
    x, output = f32("x", shape=(8, 4, 16)), f32("y", shape=(8, 4, 32))
    shapes = [(96, 16), (96, 32), (96,), (96,)]
    weights = [f32(f"w{i}", shape=shape) for i, shape in enumerate(shapes)]
    state = f32("h", shape=(1, 4, 32))
    args = (x, weights, 4, None, state, None, 3, 32, 0, 1, False, 0.0, True, False, [], None)
    outs = (output, f32("h1", shape=(1, 4, 32)), None, None, None)
    e = Eqn(aten._cudnn_rnn.default, args, outs)
    graph = Graph("step", (x, *weights, state), (e,), (output,), 0)
    assert flops(e, graph) == 2 * 8 * 4 * 96 * (16 + 32)
