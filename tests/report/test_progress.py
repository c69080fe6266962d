"""Progress: what the logger "ztrans" says, on which ranks, and where it shows."""

import io
import logging
import re

import pytest
import torch

import ztrans as zt
from ztrans.report import progress
from ztrans.report.progress import stage

STATE, X = {"w": torch.ones(8)}, torch.ones(4, 8)
SECONDS = re.compile(r"\d+\.\d s")


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture
def shown(monkeypatch):
    """Run something as in a new process, with stderr on a terminal or not; returns what stderr has got."""
    handlers, level, propagate = (
        list(progress.log.handlers),
        progress.log.level,
        progress.log.propagate,
    )

    def run(action, terminal=False, **environment):
        stream = Stream(terminal)
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.delenv("ZTRANS_LOG", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        progress._prepare.cache_clear()
        progress.log.handlers, progress.log.propagate = (
            [],
            False,
        )  # pytest handles the records of the root logger
        progress.log.setLevel(logging.NOTSET)
        action()
        return SECONDS.sub("0.0 s", stream.getvalue())

    yield run
    progress._prepare.cache_clear()
    progress.log.handlers, progress.log.propagate = handlers, propagate
    progress.log.setLevel(level)


def compiled():
    def train_step(state, x):
        grads, loss = torch.func.grad_and_value(lambda w: (x @ w).square().mean())(state["w"])
        return {"w": state["w"] - grads}, loss

    step = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), zt.overlap_grads())(train_step)
    step.lower(STATE, X)
    zt.Step.of(train_step)({"w": torch.ones(8)}, X)


def test_nothing_shows_without_a_terminal(shown):
    assert shown(compiled) == ""


def test_stages_and_seconds_show_on_request(shown):
    def stages(name):
        return f"ztrans: train_step: {name}\nztrans: train_step: {name}, 0.0 s\n"

    of_one = stages("trace") + stages("plan")
    assert shown(compiled, ZTRANS_LOG="info") == of_one + of_one + stages("compile (eager)")
    each = stages("trace") + stages("shard_params") + stages("overlap_grads") + stages("plan")
    assert shown(compiled, ZTRANS_LOG="debug").startswith(each)


def test_only_the_first_rank_tells(shown):
    assert shown(compiled, ZTRANS_LOG="debug", RANK="1") == ""
    assert shown(compiled, ZTRANS_LOG="info", RANK="0") != ""


def test_a_terminal_shows_the_present_stage_and_keeps_long_ones(shown, monkeypatch):
    monkeypatch.setattr(progress, "_LONG", 0.0)
    text = shown(compiled, terminal=True)
    assert text.startswith(
        "\r\x1b[Kztrans: train_step: trace\r\x1b[Kztrans: train_step: trace, 0.0 s\n\r\x1b[K"
    )
    monkeypatch.setattr(progress, "_LONG", 60.0)
    text = shown(compiled, terminal=True)
    assert "\n" not in text and text.endswith("\r\x1b[Kztrans: train_step: compile (eager)\r\x1b[K")


def test_a_stage_that_fails_says_so(shown):
    def fails():
        with stage("train_step", "plan"):
            raise KeyError

    def run():
        with pytest.raises(KeyError):
            fails()

    assert shown(run, ZTRANS_LOG="info").endswith("train_step: plan failed after 0.0 s\n")


def test_a_program_that_logs_itself_is_left_alone(shown):
    records = []
    own = logging.Handler()
    own.emit = lambda record: records.append(record.getMessage())

    def run():
        progress.log.addHandler(own)
        progress.log.setLevel(logging.INFO)
        compiled()

    assert shown(run, terminal=True) == ""
    assert records[0] == "train_step: trace" and re.fullmatch(
        r"train_step: trace, \d+\.\d s", records[1]
    )


def test_the_level_of_the_root_logger_alone_shows_nothing(shown, monkeypatch):
    """As `logging.basicConfig(level=logging.INFO)` sets it."""
    records = []
    of_root = logging.Handler()
    of_root.emit = lambda record: records.append(record.getMessage())

    def run():
        monkeypatch.setattr(progress.log, "propagate", True)
        monkeypatch.setattr(logging.root, "level", logging.INFO)
        monkeypatch.setattr(logging.root, "handlers", [of_root])
        compiled()

    assert shown(run, terminal=True) == "" and records == []
    progress.log.setLevel(logging.INFO)
    compiled()
    assert records[0] == "train_step: trace"


def test_another_level_is_refused(shown):
    with pytest.raises(ValueError, match=r"ZTRANS_LOG=verbose: it is info or debug\."):
        shown(compiled, ZTRANS_LOG="verbose")
