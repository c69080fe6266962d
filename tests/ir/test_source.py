"""The user's line of an equation.

Code in files, at prompts, in cells, in doctests and in `exec` is the user's. Libraries and generated code are not.
"""

import code
import dataclasses
import doctest
import linecache
import os
import re
import subprocess
import sys
import types
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import fx

import ztrans as zt
from ztrans.ir.source import Source, is_library, is_user_frame

ROOT = Path(__file__).parents[2]
STEP = """
def step(state, x):
    y = torch.tanh(x * state)
    return state - y.sum(), y
"""


def sources(step) -> set[str]:
    """The user's lines that the program of a step prints at its margin."""
    return {str(e.source) for e in zt.Step.of(step).trace(torch.ones(3), torch.ones(3)).graph.eqns}


def defined(name: str, text: str = STEP, **variables):
    """The step that `text` defines, compiled under the file name `name`."""
    scope = {"torch": torch, **variables}
    exec(compile(text, name, "exec"), scope)
    return scope["step"]


@pytest.mark.parametrize("name, shown", [
    ("<stdin>", "<stdin>"),
    ("<stdin-3>", "<stdin-3>"),
    ("<python-input-7>", "<python-input-7>"),
    ("<console>", "<console>"),
    ("<input>", "<input>"),
    ("<pyshell#4>", "<pyshell#4>"),
    ("<string>", "<string>"),
    ("<doctest step.step[2]>", "<doctest step.step[2]>"),
    ("<ipython-input-5-0a1b2c3d4e5f>", "In[5]"),
    ("/tmp/ipykernel_123/456.py", "456.py"),
    ("/home/me/train.py", "train.py"),
])  # fmt: skip
def test_code_that_a_person_typed_is_the_users_line(name, shown):
    assert sources(defined(name)) == {f"{shown}:3 step", f"{shown}:4 step"}


@pytest.mark.parametrize("name", [
    "<eval_with_key>.17", "<frozen importlib._bootstrap>", "<attrs generated init __main__.State>", "<decorator-gen-3>",
    "<__array_function__ internals>", "<template>", "<lambdifygenerated-1>",
])  # fmt: skip
def test_generated_code_is_not_the_users_line(name):
    """The line of its caller is shown instead."""
    inner = defined(name)

    def step(state, x):
        return inner(state, x)  # here

    line = step.__code__.co_firstlineno + 1
    assert sources(step) == {f"test_source.py:{line} {step.__qualname__.replace('.<locals>', '')}"}


def test_a_dataclass_is_not_the_users_line():
    """`dataclasses` uses `exec`, so the file name of its code is `<string>`, as that of a user's `exec` is."""

    @dataclasses.dataclass
    class State:
        w: int

    frames = []

    class Watched:
        def __set__(self, owner, value):
            frames.append(sys._getframe(1))

    class Holder:
        w = Watched()

    State.__init__(Holder(), 0)
    (constructor,) = frames
    assert constructor.f_code is State.__init__.__code__
    assert constructor.f_code.co_filename == "<string>" and not is_user_frame(constructor)
    assert constructor.f_back is sys._getframe() and is_user_frame(sys._getframe())


def test_the_constructor_of_a_namedtuple_is_not_the_users_line():
    frames = []

    def trace(frame, *_):
        if frame.f_code.co_filename == "<string>":
            frames.append(frame)

    pair = namedtuple("pair", "a b")
    sys.setprofile(trace)
    try:
        pair(1, 2)
    finally:
        sys.setprofile(None)
    constructor = frames[0]
    assert constructor.f_code.co_name == "<lambda>" and not is_user_frame(constructor)
    assert constructor.f_back is sys._getframe()


def test_generated_modules_are_not_the_users_line():
    """torch.fx generates a function under a file name of its own, and enters its text into `linecache`."""
    traced = fx.symbolic_trace(lambda x: torch.tanh(x))

    def step(state, x):
        y = traced(x)
        return state - y.sum(), y

    assert all(source.startswith("test_source.py:") for source in sources(step))


def test_code_that_a_library_executes_is_not_the_users_line():
    library = {"__file__": torch.__file__, "__name__": "torch"}
    inner = defined("<string>", **library)
    assert all(
        source.startswith("test_source.py:") for source in sources(lambda state, x: inner(state, x))
    )
    own = {"__file__": str(ROOT / "train.py"), "__name__": "train"}
    assert sources(defined("<string>", **own)) == {"<string>:3 step", "<string>:4 step"}


def test_a_named_tuple_is_not_the_users_line():
    """The generated constructor has the file name `<string>` too. Its arguments are computed in the caller's line."""
    Pair = namedtuple("Pair", "a b")

    def step(state, x):
        pair = Pair(torch.tanh(x), x)
        return state - pair.a.sum(), pair.b

    assert all(source.startswith("test_source.py:") for source in sources(step))


def test_code_in_a_console_is_the_users_line():
    """`code.InteractiveConsole` is what debuggers and `python -m code` use."""
    console = code.InteractiveConsole({"torch": torch})
    for line in (*STEP.strip().splitlines(), ""):
        console.push(line)
    assert sources(console.locals["step"]) == {"<console>:2 step", "<console>:3 step"}


def test_code_in_a_doctest_is_the_users_line():
    text = ">>> import torch\n" + "".join(
        f"{'...' if k else '>>>'} {row}\n" for k, row in enumerate(STEP.strip().splitlines())
    )
    test = doctest.DocTestParser().get_doctest(text, {}, "train", None, 0)
    doctest.DocTestRunner().run(test, clear_globs=False)
    assert sources(test.globs["step"]) == {"<doctest train[1]>:2 step", "<doctest train[1]>:3 step"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(("-i",), marks=pytest.mark.exhaustive),
        ("-",),
        (
            "-c",
            f"import torch, ztrans as zt{STEP}print(zt.Step.of(step).trace(torch.ones(3), torch.ones(3)))",
        ),
    ],
)
def test_code_at_a_prompt_is_the_users_line(how):
    """A Python process reads its code from a prompt, from a pipe, or from its command line."""
    typed = f"import torch, ztrans as zt\n{STEP.strip()}\n\nprint(zt.Step.of(step).trace(torch.ones(3), torch.ones(3)))\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSTARTUP": ""}
    run = subprocess.run(
        [sys.executable, *how],
        input=typed,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    margins = {line.rpartition("# ")[2] for line in run.stdout.splitlines() if " = " in line}
    name = "<string>" if how[0] == "-c" else r"<(stdin|python-input)(-\d+)?>"
    assert len(margins) == 2 and all(re.fullmatch(rf"{name}:\d step", margin) for margin in margins)


class Compiler:
    """A stand-in for IPython's compiler, which knows the number of each cell."""

    def format_code_name(self, name: str):
        return ("Cell", "In[12]") if name == "/tmp/ipykernel_123/456.py" else None


def test_a_notebook_knows_the_number_of_a_cell(monkeypatch):
    """IPython puts the text of a cell into `linecache`, and its compiler maps the file name to the cell's number."""
    name = "/tmp/ipykernel_123/456.py"
    monkeypatch.setitem(
        linecache.cache, name, (len(STEP), None, STEP.splitlines(keepends=True), name)
    )
    shell = types.SimpleNamespace(compile=Compiler())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert sources(defined(name)) == {"In[12]:3 step", "In[12]:4 step"}
    assert Source(name, 3, "step").where == "In[12]:3 in step"
    assert Source("/tmp/other.py", 3, "step").where == "/tmp/other.py:3 in step"
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert sources(defined(name)) == {"456.py:3 step", "456.py:4 step"}, (
        "IPython is imported but no shell runs"
    )


def test_torch_the_standard_library_and_installed_packages_are_libraries():
    assert all(
        map(is_library, (torch.__file__, os.__file__, zt.__file__, str(ROOT / "ops" / "kernel.py")))
    )
    assert all(
        map(
            is_library,
            ("/x/site-packages/attr/_make.py", "/usr/lib/python3/dist-packages/yaml/__init__.py"),
        )
    )
    assert not any(
        map(is_library, (__file__, "/home/me/train.py", "/tmp/ipykernel_1/2.py", "<stdin>"))
    )
