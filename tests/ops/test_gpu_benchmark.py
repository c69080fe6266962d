"""Without a GPU, the sections of benchmarks/gpu run on small tensors, and the command writes nothing."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from benchmarks import RESULTS
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import (
    ages,
    contention,
    gpt_step,
    kernels,
    largest,
    nccl,
    numerics,
    offload,
    ranks,
    rounds,
    small_steps,
    streams,
    two_ranks,
)


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left():
    """Destroy the process group of the benchmark's mesh, because the tests of other files make their own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


CPU = torch.device("cpu")


def test_numerics(monkeypatch):

    monkeypatch.setattr(numerics, "NUMELS", (5003, 3, 0, 4096, 1, 537))
    monkeypatch.setattr(numerics, "STEPS", 2)
    for check in (
        numerics.moves,
        numerics.casts,
        numerics.sums,
        numerics.updates,
        numerics.late,
    ):
        assert check(CPU)


@pytest.mark.slow
def test_moments_on_the_host():

    *_, lines = offload.table(CPU, sizes=(3, 16, 8))
    on_device, *on_host = lines
    for line in on_host:
        assert line["bits"] == "equal" and line["loss"] == on_device["loss"]
    assert "| moments on the host |" in offload.markdown(lines, CPU)


@pytest.mark.slow
def test_table():

    *_, rows = kernels.table(CPU, sizes=(2**17,), updated=(2**17,))
    timed = " ".join(dict.fromkeys(row["kernel"] for row in rows))
    assert timed == "copying packing scattering unpacking summing updating clipping casting"
    assert all(row["us"] > 0 and row["moved, MiB"] > 0 for row in rows)
    text = gpu.markdown({"card": "none"}, {"kernels": rows, "ranks": [{"failed": "so"}]})
    assert (
        "| packing | 0 | torch._foreach_copy_ |" in text
        and "| failed | commit |\n|---|---|\n| so |" in text
    )


@pytest.mark.slow
def test_small_steps_take_turns(monkeypatch):
    """A subject that fails is a line that says so."""

    def broken(model, device):
        raise ValueError("no such loop")

    subjects = {name: small_steps.SUBJECTS[name] for name in ("PyTorch", "ztrans")}
    monkeypatch.setattr(small_steps, "SUBJECTS", subjects | {"broken": broken})
    monkeypatch.setattr(small_steps, "ROUNDS", 2)
    *_, (failed, *timed) = small_steps.table(CPU, models=small_steps.MODELS[:1])
    assert failed["subject"] == "broken" and failed["failed"] == "ValueError: no such loop"
    assert [row["subject"] for row in timed] == ["PyTorch", "ztrans"] and timed[0]["loss"] == timed[
        1
    ]["loss"]
    assert timed[1]["of its peer"].endswith(" of PyTorch")


def test_a_section_that_fails_is_a_line_of_the_report(monkeypatch):

    def halfway(device, left):
        yield [{"what": "one"}]
        raise ValueError("no more")

    def late(device, left):
        raise AssertionError("not to be run")

    monkeypatch.setattr(gpu, "sections", lambda: {"halfway": halfway, "late": late, "unused": late})
    report, written = {}, []
    write = lambda lines: written.append(dict(lines))
    assert not gpu.run(["halfway"], CPU, 100, report, write)
    assert not gpu.run(["late"], CPU, 0, report, write)
    commits = {row.pop("commit") for row in (*report["halfway"][:1], *report["late"])}
    assert len(commits) == 1
    assert report == {
        "halfway": [{"what": "one"}, {"failed": "ValueError: no more"}],
        "late": [{"failed": "not run: the time was over"}],
    }
    assert len(written) == 3


SMALL = {"layers": 1, "width": 32, "heads": 2, "vocab": 64, "sequence": 16, "batch": 2}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_subjects_take_turns_in_processes():
    """A subject that does not exist is a line that says so."""

    config = rounds.Config(**SMALL)
    tables = [(2, True), (4, False)]
    names = ["torch, eager", "nobody"]
    earlier = [{"tokens": 32, "clipped": "yes"}, {"tokens": 32, "clipped": "no"}]
    results = rounds.steps(
        CPU, config=config, tables=tables, names=names, rounds=2, earlier=earlier
    )
    first, last = map(list, results)  # the list grows
    assert len(first) == 3 and len(last) == 5 and first[0] == last[0] == earlier[1]
    assert [(line["tokens"], line["clipped"]) for line in last[1:]] == 2 * [(32, "yes")] + 2 * [
        (64, "no")
    ]
    for timed, unknown in (last[1:3], last[3:5]):
        assert timed["steps"] == 2 * rounds.TIMED and timed["ms, least"] <= timed["ms, median"]
        assert "failed" not in timed
        assert unknown["subject"] == "nobody" and unknown["failed"] == "KeyError: 'nobody'"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch, eager", "ztrans, eager"])
def test_a_step_that_is_dropped_leaves_no_parameter(name):

    step = rounds.warm(name, rounds.Task(rounds.Config(**SMALL), CPU))
    if name == "torch, eager":
        leaves = step.optimizer.param_groups[0]["params"]
    else:
        leaves = torch.utils._pytree.tree_leaves(step.state)
    parameters = [weakref.ref(x) for x in leaves if isinstance(x, torch.Tensor) and x.ndim]
    assert len(parameters) > 10
    del step, leaves
    rounds._drop(CPU)
    assert not any(parameter() is not None for parameter in parameters)


def test_a_subject_that_fails_in_an_old_process_gets_a_new_one(monkeypatch):
    """Once, and not if the process was new."""

    class Scripted:
        def __init__(self, *_):
            self.answers = iter(processes.pop(0))

        def tell(self, message):
            pass

        def answer(self, seconds):
            reply = next(self.answers)
            if isinstance(reply, Exception):
                raise reply
            return reply

        def end(self):
            pass

    processes = [[1.0, RuntimeError("full")], [2.0, RuntimeError("full")], [RuntimeError("broken")]]
    monkeypatch.setattr(rounds, "Child", Scripted)
    subject = rounds.Subject("any")
    outcomes = []
    for _ in range(3):
        subject.begin(None)
        subject.await_start(None, 1.0)
        outcomes.append((subject.ready, subject.wrong))
    assert outcomes == [(1.0, ""), (2.0, ""), (None, "broken")] and not processes


def test_tables_can_be_chosen():

    assert len(set(rounds.tables_of())) == 8
    assert rounds.tables_of([1024, 2048], "no") == [(2, False), (1, False)]
    assert rounds.tables_of([8192]) == [(8, False), (8, True)]
    options = gpu._chosen_tables([4096], "yes", [{"tokens": 8192}])
    assert options == {"tables": [(4, True)], "earlier": [{"tokens": 8192}]}


@pytest.mark.slow
def test_a_subject_that_is_too_slow_or_dies_is_a_line():

    child = rounds.Child(time.sleep)
    with pytest.raises(RuntimeError, match="no answer in 0 s"):
        child.answer(0)
    child.end()
    child = rounds.Child(_dies)
    with pytest.raises(RuntimeError, match="ended with code 3"):
        child.answer(60)


def _dies(pipe):
    os._exit(3)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_section_in_a_process_of_its_own_that_dies_or_hangs_leaves_its_lines():

    for last, patience, message in (
        (_exits, 60, "its process ended with code 3"),
        (time.sleep, 0.5, "no answer in"),
    ):
        lines, left = [], iter([60, 60, patience])
        with pytest.raises(RuntimeError, match=message):
            for so_far in rounds.apart(functools.partial(_section, last))(CPU, left.__next__):
                lines.append(so_far)
        assert lines == [[{"what": "one", "on": "cpu"}]]
    assert gpu.sections()["kernels"].__doc__.startswith("Medians")


def _section(last, device, left):
    yield [{"what": "one", "on": str(device)}]
    last(left() + 100)


def _exits(_):
    os._exit(3)


@pytest.mark.slow
def test_the_largest_model_by_arithmetic(monkeypatch):
    """A parameter and its moments take 12 bytes, a gradient 4 or 2, or nothing if it is read at once."""

    from ztrans.planning import early_updates

    monkeypatch.setattr(early_updates, "_TOGETHER", 2**16)
    config = largest.Config(**SMALL | {"width": 128})
    *_, lines = largest.largest(CPU, config=config, layers=(2, 4))
    by_kind = {(line["gradients"], line["updates"]): line for line in lines[1::2]}
    taken = {kind: round(line["bytes per parameter"], 0) for kind, line in by_kind.items()}
    assert taken == {
        ("cast to fp32", "at the end"): 16,
        ("cast to fp32", "during backward"): 12,
        ("in bf16", "at the end"): 14,
        ("in bf16", "during backward"): 12,
    }
    sizes = [line["largest, G parameters"] for line in by_kind.values()]
    assert sizes[2] > 1.3 * sizes[0] and sizes[0] * 16 == pytest.approx(
        139.8 * 2**30 / 1e9, rel=0.1
    )


@pytest.mark.slow
def test_all_subjects_train_alike():

    task = gpt_step.Task(gpt_step.Config(**SMALL), CPU)
    losses = [
        rounds.played(gpt_step.SUBJECTS[name](task), CPU)["loss"]
        for name in ("torch, eager", "ztrans, eager")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_several_ranks_run_over_gloo_too():

    (line,) = two_ranks.outcome("accumulation", 2, "cpu", 120.0)
    assert line["result"] == "bits of lockstep"


@pytest.mark.slow
def test_collectives_of_one_rank_are_sent_and_change_nothing(monkeypatch):

    import ztrans.runtime.collectives

    monkeypatch.setattr(ztrans.runtime.session.Channel, "is_gloo", False)  # as NCCL's is not
    task = gpt_step.Task(gpt_step.Config(**SMALL), CPU)
    sharded, line = nccl.bits(task, ways=[False])
    assert "DTensors" in sharded["what"] and sharded["result"] == "bits of the plain step"
    assert int(line["what"].split()[1]) >= 8 and line["result"] == "bits of the plain step"


@pytest.mark.slow
def test_ranks_on_streams_check_every_value_that_arrives(monkeypatch):
    """On a CPU each stream is a thread."""

    monkeypatch.setattr(streams, "SIZES", (40, 3))
    ends = streams.make_ends(2, CPU)

    def send_all(rounds: int) -> int:
        def send(end: streams.End) -> None:
            for _ in range(rounds):
                end.send(lambda: None, spins=1_000_000)

        with ThreadPoolExecutor(len(ends)) as threads:
            list(threads.map(send, ends))
        return sum(end.wrong_values() for end in ends)

    assert send_all(140) == 0, "the numbers of messages begin again after 127"
    line = streams.judged("so", ends, 1.0)
    assert line == {"ranks": 2, "what": "so", "us": 1e6, "result": "right"}
    ends[1].values[41] += 1
    ends[3].values[41] += 1
    assert send_all(3) == 2 * 2 * 3, "both ranks receive the values that rank 1 sends in two lanes"


def test_a_step_is_counted_in_parameters_and_flops():

    c = gpt_step.CONFIG
    assert (
        sum(p.numel() for p in gpt_step.Task(c, torch.device("meta")).model().parameters()) > 350e6
    )
    assert gpt_step.flops(c) == pytest.approx(2.14e13, rel=1e-2)
    assert gpt_step.peak("NVIDIA H200") == gpt_step.peak("NVIDIA H100 80GB HBM3") == 989e12
    assert gpt_step.peak("NVIDIA H100 PCIe") == 756e12 and gpt_step.peak("another") is None


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_written():
    before = {path: path.stat().st_mtime_ns for path in RESULTS.glob("gpu*")}
    command = [sys.executable, "-m", "benchmarks.gpu"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parents[1])
    assert (
        run.returncode == 1 and "torch sees none here: nothing is measured or written" in run.stderr
    )
    assert {path: path.stat().st_mtime_ns for path in RESULTS.glob("gpu*")} == before


def test_the_kernel_of_rounds_compiles(tmp_path):
    pytest.importorskip("triton", reason="kernels need Triton")

    from tests.ops.compiled import compiled

    types = {
        "buffers": "*i64",
        "pads": "*i64",
        "error": "*i32",
        "wrong": "*i32",
        "rounds": "i32",
        "spins": "i32",
    }
    options = {"num_warps": 4, "launch_cooperative_grid": True}
    kernel = compiled(ranks._rounds, 90, tmp_path, types, {"WORLD": 8, "BLOCK": 256}, **options)
    assert (
        kernel.stack <= 8
    )  # ptxas spills one register, since a barrier keeps whether all have come


@pytest.mark.parametrize("number", range(5))
def test_blocks_that_wait_keep_their_registers(tmp_path, number):
    pytest.importorskip("triton", reason="kernels need Triton")

    from tests.ops.compiled import compiled

    kind = contention.WAITING[number]
    types = {"flag": "*i32", "values": "*fp32", "spins": "i32"}
    constants = {"BLOCK": contention.block_size(kind)}
    options = {"num_warps": kind.warps, "maxnreg": 128}
    kernel = compiled(contention._hold, 90, tmp_path, types, constants, **options)
    assert kernel.stack == 0 and 64 <= kernel.registers <= 128


def test_every_row_has_its_commit_and_says_if_it_is_older_than_its_code():
    """After a change of a kernel: python -m benchmarks.gpu.ages writes gpu.md again."""

    if not (ages.ROOT / ".git").exists():
        pytest.skip("git knows nothing of these sources")
    text = (RESULTS / "gpu.md").read_text()
    found = json.loads((RESULTS / "gpu.json").read_text())["sections"]
    assert set(found) <= set(ages.SOURCES) and set(gpu.sections()) == set(ages.SOURCES)
    for name, rows in found.items():
        assert all(row["commit"] for row in rows), name
        of_section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert ages.age(name, rows) in of_section, "python -m benchmarks.gpu.ages"


def test_a_row_is_older_than_its_code_if_git_says_so(monkeypatch):

    rows = [{"us": 1, "commit": "aaaa"}, {"us": 2, "commit": "bbbb+"}]
    monkeypatch.setattr(ages, "commit_now", lambda: "cccc")
    changes = {"aaaa..HEAD": "2", "bbbb..HEAD": "0"}
    monkeypatch.setattr(ages, "_git", lambda *arguments: changes[arguments[2]])
    text = "Rows of aaaa are **older than their code**: ops has changed since."
    assert ages.age("kernels", rows) == text
    assert ages.age("kernels", rows[1:]) == "Of the code of ops as it is."
    unknown = [{"us": 1, "commit": ages.UNKNOWN}]
    assert "older than their code" in ages.age("kernels", unknown)
