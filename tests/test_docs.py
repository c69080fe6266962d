"""The pages for users: their code runs and prints what they show, and every file that they name exists.

The words after the opening fence of a block say what kind of block it is:

    python             the block runs; the blocks of a page share a namespace, and run from top to bottom
    python torchrun    the block needs several processes; it is compiled, but not run
    python gpu         the block needs a GPU; it is compiled, but not run
    python peer        the block is code of another library, or a loop before its change; it is compiled, but not run
    text               what the block before it prints, if that block runs (see `is_shown`)
"""

from __future__ import annotations

import ast
import codeop
import contextlib
import io
import math
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

from ztrans.runtime import stop

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
NOT_RUN = {"torchrun", "gpu", "peer"}

SLOW = {"performance.md", "write-a-transform.md"}  # pages whose code takes some seconds
by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@dataclass(frozen=True)
class Block:
    """A fenced block: the number of its first line, the words after the opening fence, and its text."""

    line: int
    info: tuple[str, ...]
    text: str

    @property
    def is_python(self) -> bool:
        return self.info[:1] == ("python",)

    @property
    def runs(self) -> bool:
        return self.info == ("python",)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    page_blocks, opened, body = list[Block](), None, list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("```"):
            body.append(line)
        elif opened is None:
            opened, body = (number, tuple(line[3:].split())), []
        else:
            page_blocks.append(Block(*opened, "\n".join(body) + "\n"))
            opened = None
    assert opened is None, f"{page.name}:{opened} opens a block that nothing closes"
    return page_blocks


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs the test in an empty folder. A process group and a handler of a signal that a page makes end with the test."""
    before = dist.is_initialized()
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(stop, "_watched", set())
    monkeypatch.chdir(tmp_path)
    yield
    signal.signal(signal.SIGTERM, handler)
    if dist.is_initialized() and not before:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.name in SLOW else ()) for page in PAGES],
    ids=lambda page: page.name,
)
def test_code_runs_and_prints_what_the_page_shows(page, scratch):
    namespace: dict = {"__name__": "__main__"}
    every = blocks(page)
    for block, following in zip(every, [*every[1:], None]):
        if not block.is_python:
            continue
        assert block.runs or (len(block.info) == 2 and block.info[1] in NOT_RUN), (
            f"{page.name}:{block.line}"
        )
        # With these empty lines, errors and printed programs name the lines of the page.
        code = compile("\n" * block.line + block.text, str(page), "exec")
        if block.runs:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, namespace)
            if (
                following is not None
                and following.info == ("text",)
                and is_next(page, block, following)
            ):
                assert is_shown(out.getvalue(), following.text), (
                    f"{page.name}:{block.line} printed\n{out.getvalue()}"
                )


def is_shown(printed: str, shown: str) -> bool:
    """Whether the page shows what the block printed. `...` matches anything; decimals may differ by a tenth.

    >>> is_shown("step: 1.52 ms  # f:3\\n b", "step: 1.5 ms # f:... b"), is_shown("a b c", "a ... b")
    (True, False)
    """
    *runs, last = [run.split() for run in re.split(r"(?<!\S)\.\.\.(?!\S)", shown)]
    words = printed.split()
    for k, run in enumerate(runs):
        starts = range(len(words) - len(run) + 1) if k else [0]
        begin = next((i for i in starts if is_same(words[i : i + len(run)], run)), None)
        if begin is None:
            return False
        words = words[begin + len(run) :]
    return is_same(words[len(words) - len(last) :] if runs else words, last)


def is_same(words: list[str], run: list[str]) -> bool:
    """Whether the printed words match a run of words of the page."""
    pattern, figures = " ".join(run), r"\d+\.\d+"
    texts = [
        rf"({figures})".join(map(re.escape, re.split(figures, text)))
        for text in pattern.split("...")
    ]
    match = re.fullmatch(".*".join(texts), " ".join(words))
    is_close = lambda a, b: math.isclose(float(a), float(b), rel_tol=0.1)
    return match is not None and all(map(is_close, match.groups(), re.findall(figures, pattern)))


def is_next(page: Path, block: Block, following: Block) -> bool:
    """Whether only empty lines are between two blocks of a page."""
    end = block.line + block.text.count("\n") + 1
    return not "".join(page.read_text().splitlines()[end : following.line - 1]).strip()


def test_the_example_of_the_readme_can_be_pasted_into_a_prompt():
    """A prompt runs a statement as soon as an empty line, or the next statement, ends it."""
    first = next(block for block in blocks(ROOT / "README.md") if block.runs)
    statement = list[str]()
    for line in [*first.text.splitlines(), ""]:
        statement.append(line)
        if codeop.compile_command("\n".join(statement)) is not None:
            statement.clear()
    assert not statement


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "SPEC.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name
)
def test_links_resolve(page):
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if (
            not target.is_relative_to(ROOT)
            or not target.exists()
            or (anchor and anchor not in anchors(target))
        ):
            wrong.append(link)
    assert not wrong, f"{page.name}: {wrong}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "SPEC.md"], ids=lambda page: page.name)
def test_files_and_tests_that_are_named_exist(page):
    wrong = []
    for name in re.findall(r"`([\w./-]+/[\w.-]*(?:::\w+)?)`", prose(page)):
        file, _, test = name.partition("::")
        places = [place / file for place in (ROOT, ROOT / "ztrans") if (place / file).exists()]
        if not places or (test and test not in functions(places[0])):
            wrong.append(name)
    assert not wrong, f"{page.name}: {wrong}"


def functions(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def test_every_file_of_the_architecture_exists():
    """Also those in its tree, whose first column names folders and files."""
    page = ROOT / "docs/architecture.md"
    (tree,) = (block for block in blocks(page) if block.info == ("text",))
    named = re.findall(r"(?<!\S)[\w.]+/[\w./]*", tree.text)
    assert len(named) > 10
    wrong = [name for name in named if not (ROOT / name.rstrip(".")).exists()]
    assert not wrong, f"{wrong}: no such file"


def test_pages_are_short_enough_to_be_read():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "SPEC.md").read_text().splitlines()) <= 250


def test_every_page_is_reached_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert not [page.name for page in DOCS if f"(docs/{page.name})" not in readme]


def test_the_page_of_the_benchmarks_has_a_line_for_every_file():
    folder = ROOT / "benchmarks"
    _, *parts = re.split(r"(?m)^## (\w+):", (folder / "README.md").read_text())
    listed = {
        f"{name}/{file}"
        for name, text in zip(parts[::2], parts[1::2], strict=True)
        for line in text.splitlines()
        if line.startswith("| `")
        for file in re.findall(r"`(\w+\.py)`", line.split(" | ")[0])
    }
    files = {str(path.relative_to(folder)) for path in folder.glob("*/*.py")}
    assert listed == {name for name in files if not name.endswith("__init__.py")}
