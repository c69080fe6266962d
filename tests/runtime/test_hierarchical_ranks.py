"""Messages on two hosts of three ranks: gloo processes, and the calls for NCCL on a simulated GPU over gloo."""

import pytest

from tests.support.processes import run_ranks


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_reductions_of_two_hosts_of_three_ranks():
    figures = run_ranks(6, "hierarchical.py")
    cases = {
        (f["case"], f["dtype"].removeprefix("torch."), f["reduce_dtype"].removeprefix("torch."))
        for f in figures
    }
    assert len(figures) == 6 * 5 and len(cases) == 5
    for f in figures:
        assert f["gathers"] == ["hierarchical exchange"], f
        assert f["ways"] == ["hierarchical exchange"] and f["races"] == [] and f["recorded"] == 0, f
        if f["dtype"] == "torch.float64":  # NCCL reduces these itself
            assert (
                f["on_gpu"] == ["nccl reduce_scatter"]
                and f["lockstep"] <= 1e-14
                and f["streamed"] <= 1e-14
            ), f
            continue
        assert f["on_gpu"] == ["nccl hierarchical all_to_all"] and f["bitwise"], f
        # Sums of hosts in fp32 change at most the last bit of bf16. With reduce_dtype, each of them is rounded.
        assert f["lockstep"] <= (2**-8 if f["reduce_dtype"] == "None" else 2**-7), f
