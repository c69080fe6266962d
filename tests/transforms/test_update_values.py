"""Updates that a careless sharding rule would get wrong: they compute what the plain update computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import ztrans as zt

UPDATES = {
    "a sum of norms of columns": lambda p, q: p.norm(dim=0).sum(),
    "a sum of norms": lambda p, q: torch.stack([p.norm(), q.norm()]).sum(),
    "a product with a norm": lambda p, q: p.norm() * q.norm() + 1,
    "a norm of norms": lambda p, q: torch.linalg.vector_norm(torch.stack([p.norm(), q.norm()])),
    "a norm of other norms": lambda p, q: torch.stack([p.norm(1), q.norm(1)]).norm(),
    "a mean of squares": lambda p, q: F.mse_loss(p, p * 0.9),
    "a mean": lambda p, q: p.mean() + F.huber_loss(q, q * 0.5),
    "a mean of rows": lambda p, q: p.mean(0).square().sum(),
    "whether any": lambda p, q: (
        (p.sum(0) > 0).any().double() + (p > 0).to(torch.uint8).any().double()
    ),
    "an outer product of sums": lambda p, q: torch.addr(
        torch.eye(3, dtype=p.dtype), p.mean(0), q.sum(0)
    ).sum(),
    "gathered rows": lambda p, q: p.gather(0, torch.zeros(2, 3, dtype=torch.int64)).sum(),
    "a logsumexp": lambda p, q: p.T.logsumexp(0, keepdim=True).sum(),
    "a mean over an empty tuple of dims": lambda p, q: (
        (q - q.mean((), keepdim=True)).square().sum()
    ),
    "a threshold of maxima": lambda p, q: F.threshold(p.amax(0), 0.3, 3.0).sum(),
    "a Fourier transform of maxima": lambda p, q: torch.fft.fft(p.amax(0)).real.square().sum(),
    "a sum in whole numbers": lambda p, q: p.sum(0).sum(dtype=torch.int64).double(),
    "a real part": lambda p, q: torch.complex(p, p).pow(2).sum().imag,
    "a row that is repeated": lambda p, q: q[:1].expand(3, -1).sum(),
}


def figure(update: Callable, dtype: torch.dtype, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What an update computes on several ranks, and what it computes in one process."""
    step = lambda state, x: ({**state, "figure": update(state["p"], state["q"])}, x.mean())
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(rows, 3, dtype=torch.float64, generator=generator) for rows in (5, 4))
    p = p.to(dtype)
    q = q.to(dtype)
    state = {"p": p, "q": q, "figure": torch.zeros((), dtype=dtype)}
    x = torch.ones(2)
    lowered = zt.shard_params(zt.AbstractMesh(dp=ranks))(step).lower(state, x)
    new, _ = lowered.lockstep(state, [(x,)] * ranks)
    return new["figure"], update(p, q)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", UPDATES)
def test_an_update_computes_what_the_plain_one_computes(name, ranks):
    found, wanted = figure(UPDATES[name], torch.float64, ranks)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("factor", [1e3, 1e-5])
def test_norms_in_half_precision_neither_overflow_nor_vanish(factor, order):
    found, wanted = figure(lambda p, q: (p * factor).norm(order), torch.float16, 2)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-7)
    assert 0 < found < torch.inf


@pytest.mark.parametrize("draw", [
    lambda p: torch.multinomial(p.abs().sum(1), 2).sum(), lambda p: torch.randn_like(p.sum(0)).sum(),
])  # fmt: skip
def test_a_draw_that_each_rank_would_make_for_itself_is_refused(draw):
    def step(state, x):
        return {**state, "figure": draw(state["p"]).double()}, x.mean()

    state = {
        "p": torch.ones(6, 3, dtype=torch.float64),
        "figure": torch.zeros((), dtype=torch.float64),
    }
    with pytest.raises(
        ValueError, match=r"shard_params: .*(a random draw \(|multinomial has no sharding rule)"
    ):
        zt.shard_params(zt.AbstractMesh(dp=2))(step).lower(state, torch.ones(2))
