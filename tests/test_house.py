"""The house: floors, rooms for private APIs, names, sizes, and what a wheel holds."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ztrans.tracing import versions

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ztrans"

# A module imports only from floors below its own.
FLOORS = {
    **dict.fromkeys(["ops", "transforms"], -1),
    **dict.fromkeys(["source", "scalars", "play", "cluster", "units", "streams", "versions", "process_groups", "c10d", "ambient", "views"], 0),
    **dict.fromkeys(["graph", "problem", "fit", "reached", "generators"], 1),
    **dict.fromkeys(["pretty", "collectives", "layout", "twins", "refusals", "timeline", "slots", "updates", "replay", "captured"], 2),
    **dict.fromkeys(["check", "marks", "varying", "liveness", "redistribute", "rules", "groups", "meeting", "sending", "coalesce", "fusion", "aliases", "transport", "mesh", "watch", "leaks"], 3),
    **dict.fromkeys(["timetable", "palette"], 3),
    **dict.fromkeys(["failure", "write_order", "fingerprint", "replicas"], 3.5),
    **dict.fromkeys(["regions", "donation", "evaluate", "communicate", "schedule", "outcome", "bound", "loads", "figure", "page", "perfetto", "transforms.values", "fx_trace"], 4),
    **dict.fromkeys(["functional", "recompute", "cost", "near", "nccl", "recording", "validate", "buckets", "placement", "eager", "realise"], 5),
    **dict.fromkeys(["trace", "simulate", "symmetric", "search", "residency", "resolve"], 6),
    **dict.fromkeys(["transforms.base", "transforms.accumulate", "transforms.matrix_chains", "transforms.sharding", "planner", "pose", "execute", "capture", "arguments"], 7),
    **dict.fromkeys(["transfer"], 8.5),
    **dict.fromkeys(["plan", "profile", "strides"], 8),
    **dict.fromkeys(["planning", "calibrate", "agreement", "products"], 9),
    **dict.fromkeys(["attention"], 10),
    **dict.fromkeys(["inductor"], 11),
    **dict.fromkeys(["compiled"], 12),
    **dict.fromkeys(["stages"], 13),
    **dict.fromkeys(["step", "lift"], 14),
    **dict.fromkeys(["first_state", "hyperparameters"], 0),
    **dict.fromkeys(["lifted_state", "kept_gradients", "stand_ins"], 1),
    **dict.fromkeys(["__init__"], 15),
}
TRANSFORM = 8  # every other module of transforms/

# The imports that go up: from a method, to give a value its face; or for the name of a type alone.
DOORS = {
    "graph": {"check", "pretty", "execute"},
    "timeline": {"timetable", "figure", "page", "perfetto"},
    "transforms.base": {"step"},
    "agreement": {"stages"},
    "compiled": {"stages"},
}

# Private torch APIs stay in these rooms; each says the torch version that it was checked on.
ROOMS = {"fx_trace", "watch", "leaks", "c10d", "ambient", "marks", "lift", "execute", "rules", "process_groups"}
# No room needed: pytrees, and the type of an operator, which has no public name.
OPEN = ("torch.utils._pytree", "torch._ops.OpOverload")

OPS_MAY_IMPORT = {"torch", "triton", "numpy", *sys.stdlib_module_names}
LINES = 400


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def modules() -> dict[str, Path]:
    """The modules of ztrans by name, without the symlinked ops."""
    files = [*PACKAGE.glob("*.py"), *(PACKAGE / "transforms").rglob("*.py")]
    names = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in sorted(files)}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import, and whether it is inside a function or under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, inside
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        yield from imports(node, inside or function or typing)


def imported(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    """The dotted names that an import in a module of `package` binds, made absolute."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    parts = package.split(".")
    base = [*parts[: len(parts) - node.level + 1], *filter(None, [node.module])] if node.level else [node.module]
    return [".".join([*base, alias.name]) for alias in node.names]


def package_of(path: Path) -> str:
    return ".".join(path.parent.relative_to(ROOT).parts)


def house_module(name: str, known: dict[str, Path]) -> str | None:
    """The module of ztrans that the dotted `name` is, or is in; None for anything else.

    >>> house_module("ztrans.ir.graph.Eqn", {"graph": ROOT}), house_module("torch.nn", {})
    ('graph', None)
    """
    top, *parts = name.split(".")
    if top != "ztrans":
        return None
    if parts[:1] == ["ops"]:
        return "ops"
    inner = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((module for module in inner if module in known), "__init__")


def test_floors():
    known, wrong = modules(), []
    floors = {name: FLOORS.get(name, TRANSFORM if name.startswith("transforms.") else None) for name in known}
    floors["ops"] = FLOORS["ops"]
    homeless = [name for name, floor in floors.items() if floor is None]
    assert not homeless, f"{homeless}: no floor; give each one in FLOORS, above all that it imports"
    for name, path in known.items():
        for node, inside in imports(parse(path)):
            for target in {house_module(x, known) for x in imported(node, package_of(path))} - {None}:
                door = inside and target in DOORS.get(name, ())
                if floors[target] >= floors[name] and not door:
                    wrong.append(
                        f"{path.relative_to(ROOT)}:{node.lineno} {name} (floor {floors[name]}) "
                        f"imports {target} (floor {floors[target]})"
                    )
    assert not wrong, "\n".join(wrong)


def test_ops_know_nothing_of_graphs():
    wrong = []
    for path in python_files("ops"):
        depth = len(path.relative_to(ROOT).parts) - 1
        for node, _ in imports(parse(path)):
            if isinstance(node, ast.ImportFrom) and node.level:
                ok = node.level <= depth
            else:
                ok = {name.split(".")[0] for name in imported(node, "")} <= OPS_MAY_IMPORT
            if not ok:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_ops_have_one_name():
    """`import ops` would load a second copy of each, and register everything twice."""
    assert (PACKAGE / "ops").is_symlink()
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path in python_files("ztrans", "ops", "tests", "examples", "benchmarks")
        for node, _ in imports(parse(path))
        if not getattr(node, "level", 0) and any(name.split(".")[0] == "ops" for name in imported(node, ""))
    ]
    assert not wrong, "\n".join(wrong)


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and names of the private torch APIs that a module imports, or reaches from what it imports."""
    torch, names = {"torch": "torch"}, []
    for node, _ in imports(tree):
        if not getattr(node, "level", 0):
            for alias, name in zip(node.names, imported(node, ""), strict=True):
                if name.split(".")[0] == "torch":
                    torch[alias.asname or alias.name] = name
                    names.append((node.lineno, name))
    chains = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {node.value for node in chains}
    for node in chains:
        head, *rest = ast.unparse(node).split(".")
        if node not in inner and head in torch:
            names.append((node.lineno, ".".join([torch[head], *rest])))
    for line, name in names:
        open_ = name.startswith("torch.ops.") or any(f"{name}.".startswith(f"{x}.") for x in OPEN)
        if not open_ and re.search(r"\._(?!_)", name):
            yield line, name


def test_private_torch_has_rooms():
    outside, unsaid = [], []
    for name, path in modules().items():
        tree = parse(path)
        private = [f"{path.relative_to(ROOT)}:{line} {x}" for line, x in private_names(tree)]
        if name not in ROOMS:
            outside += private
        elif private and not re.search(r"checked\s+on\s+torch\s+\d+\.\d+", ast.get_docstring(tree) or ""):
            unsaid.append(f"{name}: its docstring does not say `checked on torch X.Y`")
    assert not outside + unsaid, "\n".join(outside + unsaid)


def test_the_range_of_torch_is_said_twice_and_is_one():
    wanted = f"torch>={versions.OLDEST},<{versions.BEFORE}"
    assert wanted in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def test_names():
    banned = re.compile(r"(utils|common|helpers|manager|engine|misc)|.*_v\d+")
    wrong = [
        str(path.relative_to(ROOT))
        for path in python_files("ztrans", "ops", "tests", "examples", "benchmarks")
        if any(banned.fullmatch(part) for part in path.relative_to(ROOT).with_suffix("").parts)
    ]
    assert not wrong, f"{wrong}: name the concept"


def test_every_module_says_what_it_is():
    wrong = [
        str(path.relative_to(ROOT)) for path in python_files("ztrans", "ops") if not ast.get_docstring(parse(path))
    ]
    assert not wrong, f"{wrong}: no docstring"


def test_files_are_read_in_one_sitting():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files("ztrans", "ops")}
    wrong = {file: n for file, n in lines.items() if n > LINES}
    assert not wrong, f"{wrong}: over {LINES} lines; one concept per file"


def test_nothing_is_left_for_later():
    later = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
    wrong = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in python_files("ztrans", "ops", "tests", "examples", "benchmarks")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if later.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_verified_with_assert():
    """`python -O` drops such statements, and what they verify with them."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files("ztrans", "ops")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Assert)
    ]
    assert not wrong, f"{wrong}: raise an error"


@pytest.mark.slow
def test_wheel_holds_ztrans_alone(tmp_path):
    """Built by way of the sdist, from a copy: setuptools leaves a build folder where it builds."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("ztrans", "ops", "pyproject.toml"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    run = subprocess.run(build, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    kernels = {f"ztrans/ops/{path.name}" for path in (ROOT / "ops").glob("*.py")}

    with zipfile.ZipFile(wheel) as held:
        names = [name for name in held.namelist() if ".dist-info/" not in name]
        sizes = {name: held.getinfo(name).file_size for name in kernels & set(names)}
    assert {name.split("/")[0] for name in names} == {"ztrans"}
    assert sizes == {name: (ROOT / name).stat().st_size for name in kernels}
    data = {"ztrans/py.typed", "ztrans/page.html"}
    wanted = {f"ztrans/{path.relative_to(PACKAGE)}" for path in modules().values()} | kernels | data
    assert set(names) == wanted
    with tarfile.open(sdist) as held:
        files = {member.name.split("/", 1)[1] for member in held if member.isfile()}
    assert kernels <= files
    assert "ops" not in {name.split("/")[0] for name in files}
