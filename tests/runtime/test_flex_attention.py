"""flex_attention by the kernels that Inductor compiles: the same values as its dense meaning, and no scores in memory."""

import os

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ztrans as zt
from tests.support.worlds import clone, distance
from ztrans.ir.operations import compute
from ztrans.rewrites.flex_attention import is_attention, is_dense
from ztrans.runtime.codegen import nested, to_fx
from ztrans.runtime.flex_attention import FlexAttention

torch.manual_seed(0)
LENGTH, HEADS, DIM, FEATURES = 64, 2, 16, 32
STATE = {"w": torch.randn(FEATURES, FEATURES), "slope": torch.tensor([0.3, 0.1])}
BATCH = (torch.randn(3, LENGTH, FEATURES), torch.arange(LENGTH).div(24).long().repeat(3, 1))
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Inductor's own modules
    pytest.mark.filterwarnings("ignore:flex_attention called without"),  # of the eager form
]


def loss(state, x, of, layers=1):
    """Documents, and a slope that is learned."""
    same = lambda b, h, i, j: (i >= j) & (of[b, i] == of[b, j])
    sloped = lambda score, b, h, i, j: score + state["slope"][h] * (j - i)
    mask = create_block_mask(same, x.shape[0], None, LENGTH, LENGTH, device=x.device)
    for _ in range(layers):
        q = (x @ state["w"]).view(x.shape[0], LENGTH, HEADS, DIM).transpose(1, 2)
        attended = flex_attention(q, q.tanh(), q.sin(), score_mod=sloped, block_mask=mask)
        x = x + attended.transpose(1, 2).reshape(x.shape)
    return x.square().mean()


def evaluate(state, *batch, layers=1):
    with torch.no_grad():
        return state, loss(state, *batch, layers=layers)


def train(state, *batch):
    params = {k: p.detach().requires_grad_() for k, p in state.items()}
    grads = torch.autograd.grad(loss(params, *batch), [*params.values()])
    return {k: p.detach() - 0.1 * g for (k, p), g in zip(params.items(), grads)}, grads[1]


def attentions(graph) -> list:
    return [e for e in graph.eqns if is_attention(e)]


@pytest.mark.exhaustive
@pytest.mark.compiles
@pytest.mark.slow
def test_the_kernel_computes_what_the_dense_meaning_does():
    """On a CPU, for which PyTorch has a kernel of forward."""
    graph = zt.Step.of(evaluate).lower(STATE, *BATCH).graph
    (eqn,) = attentions(graph)
    values = dict(zip(graph.inputs, [*STATE.values(), *BATCH]))
    for e in graph.eqns[: graph.eqns.index(eqn)]:
        values.update((v, x) for v, x in zip(e.outs, compute(e, values)) if v is not None)
    attention, given = FlexAttention(eqn, nested), [values[v] for v in eqn.ins]
    with torch.no_grad():
        (want, *_), (mine, *others) = attention.densely(*given), attention.by_kernel(*given)
        other_strides = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in given]
        again, *_ = attention.by_kernel(*other_strides)
    assert distance(mine, want) < 1e-5 and others == [None, None]
    assert torch.equal(again, mine)


@pytest.mark.slow
def test_equal_layers_share_a_kernel():
    step = lambda state, *batch: evaluate(state, *batch, layers=3)
    lowered = zt.Step.of(step).lower(STATE, *BATCH)
    program = to_fx(lowered.graph)
    assert len(attentions(lowered.graph)) == 3
    assert sum(isinstance(m, FlexAttention) for m in program.modules()) == 1
    _, value = lowered.compile()(clone(STATE), *BATCH)
    assert distance(value, step(STATE, *BATCH)[1]) < 1e-5


@pytest.mark.slow
def test_a_program_for_gpus_holds_no_scores():
    on = lambda device: [x.to(device) for x in BATCH]
    state = {k: v.to("meta") for k, v in STATE.items()}
    scores = lambda lowered: [
        h for h in lowered.memory_analysis().holders if h[2] == "scores of attention"
    ]
    assert scores(zt.Step.of(train).lower(STATE, *on("cpu")))
    assert not scores(zt.Step.of(train).lower(state, *on("meta")))
    in_f64, (x, of) = {k: v.double() for k, v in state.items()}, on("meta")
    assert scores(zt.Step.of(train).lower(in_f64, x.double(), of)), "kernels have no f64"


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
def test_forward_and_backward_are_compiled_for_sm_90(tmp_path):
    """Backward also computes the gradient of the slope, which score_mod reads."""
    pytest.importorskip("triton", reason="kernels need Triton")
    from tests.support import triton_source

    to_meta = lambda tree: {k: v.to("meta") for k, v in tree.items()}
    graph = zt.Step.of(train).lower(to_meta(STATE), *(x.to("meta") for x in BATCH)).graph
    for eqn, results in zip(attentions(graph), (2, 4), strict=True):
        wanted = FlexAttention(eqn, nested).bound_results
        sources = triton_source.sources(
            lambda *x, f=wanted: f(*x), [(v.dtype, v.shape) for v in eqn.ins]
        )
        (template,) = [name for name in sources if name.startswith("triton_tem")]
        assert len(eqn.results) == results
        assert "tl.dot" in sources[template]
        for name, source in sources.items():
            assert ".target sm_90" in triton_source.compiled(name, source, tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_a_gpu_computes_what_it_does_on_a_cpu():
    to_gpu = lambda tree: {k: v.cuda() for k, v in tree.items()}
    state, grad = zt.Step.of(train).lower(STATE, *BATCH).compile()(clone(STATE), *BATCH)
    batch = [x.cuda() for x in BATCH]
    lowered = zt.Step.of(train).lower(to_gpu(STATE), *batch)
    gpu_state, gpu_grad = lowered.compile()(to_gpu(STATE), *batch)
    assert distance({k: v.cpu() for k, v in gpu_state.items()}, state) < 1e-3
    assert distance(gpu_grad.cpu(), grad) < 1e-3


@pytest.mark.slow
def test_layers_with_other_literals_have_kernels_of_their_own():
    heads = 10
    slopes = [0.1 * i for i in range(heads)]

    def biased(slopes):
        return lambda score, b, h, i, j: score * torch.tensor(slopes)[h]

    def step(state, q):
        return state, [
            flex_attention(q, q, q, score_mod=biased(s)) for s in (slopes, slopes[::-1], slopes)
        ]

    q, state = torch.randn(1, heads, 4, 8, dtype=torch.float64), {"w": torch.ones(1)}
    lowered = zt.Step.of(step).lower(state, q)
    assert sum(isinstance(m, FlexAttention) for m in to_fx(lowered.graph).modules()) == 2
    assert distance(lowered.compile()(clone(state), q), step(state, q)) < 1e-12


def test_options_that_ask_for_all_scores():
    assert is_dense({"BACKEND": "DENSE"}) and not is_dense({"BACKEND": "AUTO"})
    assert not is_dense({}) and not is_dense(None)
