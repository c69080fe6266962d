"""Rules of the code base: imports between packages, private torch APIs, names, sizes, and the contents of a wheel."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from radon.visitors import ComplexityVisitor, Function

from ztrans.ir import Primitive, collectives, copies, marks
from ztrans.tracing import fx_trace

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ztrans"

# The packages that the modules of each package may import, besides their own package and ops.
ARROWS = {
    "ir": set(),
    "analyses": {"ir"},
    "rewrites": {"ir"},
    "calling": {"ir"},
    "tracing": {"ir", "rewrites", "calling"},
    "lift": {"ir", "calling", "tracing"},
    "transforms": {"ir", "analyses", "rewrites"},
    "report": {"ir"},
    "planning": {"ir", "rewrites", "report"},
    "runtime": {"ir", "rewrites", "calling"},
    "profiling": {"ir", "planning", "report", "runtime"},
}
# The modules of runtime that may import `runtime.cuda`. What they choose from knows nothing of them.
CHOOSE_CUDA = {"runtime.transports"}
# The modules on top of all packages. Each may import all packages, and the modules before it in this list.
TOP = (
    *("running_order", "backends", "compiled", "fitting", "passes", "all_ranks"),
    *("stages", "eager_step", "step_state", "program_cache", "step", "local_steps"),
    *("search", "testing", "weights", "__init__"),
)

# The exceptions: imports of a higher module, inside a method.
DOORS = {
    ("transforms.base", "step"): "a transform that is applied to a function is a step",
    ("compiled", "stages"): "a compiled program names the types of the stages before it",
}

# Only these modules may use private torch APIs. Each names the torch version that it was checked on.
ROOMS = {
    *("tracing.fx_trace", "tracing.annotate", "tracing.function_mode", "tracing.known_values"),
    *("tracing.checkpoints", "tracing.dtensors", "tracing.higher_order", "tracing.triton_kernels"),
    "lift.scaler",
    *("ir.ambient", "ir.result_types", "ir.registered_rules", "ir.axes"),
    "runtime.state",
    *("calling.guard", "runtime.cuda.graph_capture"),
    *("runtime.inductor.compiler", "ops.symmetric"),
}
# Private attributes of PyTorch's objects, which nothing imports, and the modules that use them.
ATTRIBUTES = {
    "calling.guard": {"_local_tensor"},
    "calling.reads": {"_parameters"},
    "lift.gradients": {"_backward_hooks", "_post_accumulate_grad_hooks"},
    "lift.optimizer_state": {"_init_group"},
    "lift.scaler": {"_growth_tracker", "_lazy_init_scale_growth_tracker"},
    "runtime.communicators": {"_device_types", "_get_backend", "_timeout"},
    "runtime.state": {"_local_tensor", "_spec"},
    "tracing.annotate": {"_sequence_nr"},
    "tracing.dtensors": {"_propagate_tensor_meta_non_cached"},
    "tracing.fx_trace": {"_op_dk", "_rename"},
    "tracing.known_values": {"_cdata"},
    "tracing.gradient_marks": {"_post_accumulate_grad_hooks"},
}
DOCUMENTED = {"_schema", "_version", "_replace"}  # in spite of their names
# Every module may use pytrees, the types of operators and dispatch modes (documented, without public names), PyTorch's
# documented set of operations, our own, and functional collectives, to which torch.distributed traces.
OPEN = (
    *("torch.utils._pytree", "torch.utils._python_dispatch.TorchDispatchMode"),
    *("torch._ops.OpOverload", "torch._ops.HigherOrderOperator"),
)
OPERATIONS = (
    "torch.ops.aten",
    "torch.ops.higher_order",
    "torch.ops.ztrans",
    "torch.ops._c10d_functional",
)

OPS_MAY_IMPORT = {"torch", "triton", "einops", "numpy", *sys.stdlib_module_names}
COMPLEXITY = 20  # cyclomatic, as radon counts it


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def modules() -> dict[str, Path]:
    """The files of ztrans by module name, without the symlinked ops."""
    files = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "ops" not in path.parents]
    names = {
        path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in sorted(files)
    }
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(
    tree: ast.AST, inside: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
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
    base = (
        [*parts[: len(parts) - node.level + 1], *filter(None, [node.module])]
        if node.level
        else [node.module]
    )
    return [".".join([*base, alias.name]) for alias in node.names]


def package_of(path: Path) -> str:
    return ".".join(path.parent.relative_to(ROOT).parts)


def house_module(name: str, known: dict[str, Path]) -> str | None:
    """The module of ztrans that the dotted `name` names, or that defines it; None if it is not in ztrans.

    >>> house_module("ztrans.ir.graph.Eqn", {"ir.graph": ROOT}), house_module("torch.nn", {})
    ('ir.graph', None)
    """
    top, *parts = name.split(".")
    if top != "ztrans":
        return None
    if parts[:1] == ["ops"]:
        return "ops"
    inner = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((module for module in inner if module in known), "__init__")


def package(module: str) -> str:
    return module.split(".")[0]


def may_import(module: str, target: str) -> bool:
    """Whether `module` may import `target`; both are modules of ztrans."""
    here, there = package(module), package(target)
    if here == there or there == "ops":
        return True
    if here in TOP:
        return there not in TOP or TOP.index(there) < TOP.index(here)
    return there in ARROWS[here]


def edges() -> Iterator[tuple[str, str, bool, str]]:
    """Every import between modules of ztrans: importer, target, whether it is inside a function, and its line."""
    known = modules()
    for name, path in known.items():
        for node, inside in imports(parse(path)):
            for target in {house_module(x, known) for x in imported(node, package_of(path))} - {
                None,
                name,
            }:
                yield (
                    name,
                    target,
                    inside,
                    f"{path.relative_to(ROOT)}:{node.lineno} imports {target}",
                )


def test_every_module_is_in_a_package():
    outside = [name for name in modules() if package(name) not in (*ARROWS, *TOP)]
    assert not outside, f"{outside}: move each to the package of its concept"


def test_packages_import_only_the_packages_that_they_may():
    door = lambda name, target: (name, target) in DOORS or (name, package(target)) in DOORS
    wrong = [
        line
        for name, target, inside, line in edges()
        if not may_import(name, target) and not (inside and door(name, target))
    ]
    assert not wrong, "\n".join(wrong)
    assert len(DOORS) <= 2


def test_importing_ztrans_imports_no_compiler():
    """TorchDynamo and Inductor take half a second to import, and a step that is not compiled needs neither."""
    code = "import sys, ztrans; print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"


def test_imports_have_no_cycle():
    graph: dict[str, set[str]] = {}
    for name, target, inside, _ in edges():
        if not inside:
            graph.setdefault(name, set()).add(target)
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_runtime_and_its_part_for_gpus_import_each_other_in_one_direction():
    """What runs on CPUs does not depend on GPUs: one module of runtime chooses between the two."""
    cuda = "runtime.cuda"
    importers = set()
    graph: dict[str, set[str]] = {}
    for name, target, inside, _ in edges():
        here, there = (cuda if x.startswith(cuda) else x for x in (name, target))
        if not inside and here != there:
            graph.setdefault(here, set()).add(there)
            if there == cuda and package(here) == "runtime":
                importers.add(here)
    assert importers == CHOOSE_CUDA
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_ops_import_only_torch_triton_einops_and_the_standard_library():
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


@pytest.mark.slow
def test_ops_are_imported_only_as_ztrans_ops():
    """`import ops` would load a second copy of each module, and register every operation twice."""
    assert (PACKAGE / "ops").is_symlink()
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path in python_files("ztrans", "ops", "tests", "examples", "benchmarks")
        for node, _ in imports(parse(path))
        if not getattr(node, "level", 0)
        and any(name.split(".")[0] == "ops" for name in imported(node, ""))
    ]
    assert not wrong, "\n".join(wrong)


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The private torch APIs that a module imports, or reaches as attributes of an import: lines and names."""
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
        is_open = any(f"{name}.".startswith(f"{x}.") for x in (*OPEN, *OPERATIONS))
        if not is_open and (re.search(r"\._(?!_)", name) or name.startswith("torch.ops.")):
            yield line, name


def private_attributes(tree: ast.Module, ours: set[str]) -> set[str]:
    """The private attributes that a module reads of objects other than ours and those that it imports."""
    modules = {alias.asname or alias.name for node, _ in imports(tree) for alias in node.names}
    attributes = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
            is_imported = ast.unparse(node).split(".")[0] in modules | {"aten"}
            if not is_imported and node.attr not in ours | DOCUMENTED:
                attributes.add(node.attr)
    return attributes


def test_private_attributes_of_torch_are_used_only_in_the_modules_listed():
    files = modules() | {f"ops.{path.stem}": path for path in python_files("ops")}
    trees = {name: parse(path) for name, path in files.items()}
    methods = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    found = {}
    for name, tree in trees.items():
        stored = [
            node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store)
        ]
        names = {ast.unparse(node).removeprefix("self.") for node in stored}
        attributes = private_attributes(tree, methods | names)
        if attributes:
            found[name] = attributes
    assert found == ATTRIBUTES
    unchecked = [
        name for name in found if "checked on torch" not in (ast.get_docstring(trees[name]) or "")
    ]
    assert not unchecked, f"{unchecked}: their docstrings do not say `checked on torch X.Y`"


@pytest.mark.slow
def test_private_torch_apis_are_used_only_in_the_modules_listed():
    outside, unchecked, users = [], [], set[str]()
    ops = {f"ops.{path.stem}": path for path in python_files("ops")}
    for name, path in (modules() | ops).items():
        tree = parse(path)
        private = [f"{path.relative_to(ROOT)}:{line} {x}" for line, x in private_names(tree)]
        if private:
            users.add(name)
        if name not in ROOMS:
            outside += private
        elif private and not re.search(
            r"checked\s+on\s+torch\s+\d+\.\d+", ast.get_docstring(tree) or ""
        ):
            unchecked.append(f"{name}: its docstring does not say `checked on torch X.Y`")
    assert not outside + unchecked, "\n".join(outside + unchecked)
    assert users == ROOMS, f"{ROOMS - users} use none"


def test_pyproject_and_the_package_support_the_same_versions_of_torch():
    wanted = f"torch>={fx_trace.OLDEST},<{fx_trace.BEFORE}"
    assert wanted in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def test_files_are_named_by_their_concept():
    banned = re.compile(r"(utils|common|helpers|manager|engine|misc)|.*_v\d+")
    wrong = [
        str(path.relative_to(ROOT))
        for path in python_files("ztrans", "ops", "tests", "examples", "benchmarks")
        if any(banned.fullmatch(part) for part in path.relative_to(ROOT).with_suffix("").parts)
    ]
    assert not wrong, f"{wrong}: name the concept"


def test_every_module_has_a_docstring():
    wrong = [
        str(path.relative_to(ROOT))
        for path in python_files("ztrans", "ops")
        if not ast.get_docstring(parse(path))
    ]
    assert not wrong, f"{wrong}: no docstring"


def test_functions_are_simple():
    wrong = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.fullname}: {function.complexity}"
        for path in python_files("ztrans", "ops")
        for function in ComplexityVisitor.from_code(path.read_text()).blocks
        if isinstance(function, Function) and function.complexity > COMPLEXITY
    ]
    assert not wrong, "\n".join(wrong)


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
    """`python -O` drops assert statements, so the check would not run."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files("ztrans", "ops")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Assert)
    ]
    assert not wrong, f"{wrong}: raise an error"


# The modules that say what primitives mean.
HOMES = ("ir.collectives", "ir.copies", "ir.marks", "ir.micro_batches", "ir.pairing")
PRIMITIVES = {
    value.name.upper()
    for module in (collectives, copies, marks)
    for value in vars(module).values()
    if isinstance(value, Primitive)
}
KINDS = {"starts", "waits", "reads_futures"}  # rules that only tell which primitive an equation has
RECOGNITIONS = 25


def recognitions(tree: ast.Module) -> Iterator[ast.AST]:
    """The places where code distinguishes primitives itself, instead of calling a rule of the primitive.

    A comparison with a primitive or its name counts. So does a predicate that stands for such a comparison:
    `is_start(e)`, `rules(e).starts`, `isinstance(rules(e), Start)`. A table with a row for each primitive does not.
    """
    names = lambda node: {getattr(x, "id", getattr(x, "attr", None)) for x in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            recognised = names(node) & PRIMITIVES
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")[-1]
            recognised = called == "is_start" or (
                called == "isinstance" and "rules" in names(node.args[0])
            )
        elif isinstance(node, ast.Attribute):
            recognised = (
                node.attr in KINDS
                and isinstance(node.value, ast.Call)
                and "rules" in names(node.value.func)
            )
        else:
            recognised = isinstance(node, ast.MatchValue) and names(node) & PRIMITIVES
        if recognised:
            yield node


def test_few_places_distinguish_primitives_themselves():
    places = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for name, path in modules().items()
        if name not in HOMES
        for node in recognitions(parse(path))
    ]
    assert len(places) < RECOGNITIONS, "\n".join(places)


def test_the_search_for_such_places_finds_them():
    code = """
        e.op is WAIT; op not in (PMEAN, PSUM); self.kind == ALL_GATHER.name; is_start(e); collectives.is_start(e)
        rules(e).starts; isinstance(rules(e), Start); any(e.op is GRADIENT for e in eqns)
        rules(e).lane == "gather"; {ALL_GATHER: 2}[e.op]; Eqn(SHARD, (v,), (out,)); e.op is CAST; started.waits
    """
    tree = ast.parse("\n".join(line.strip() for line in code.splitlines()))
    assert len(list(recognitions(tree))) == 8


@pytest.mark.slow
def test_a_wheel_contains_ztrans_and_nothing_else(tmp_path):
    """The wheel is built from the sdist, and from a copy of the sources, as setuptools leaves a build folder there."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("ztrans", "ops", "pyproject.toml"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(source),
    ]
    run = subprocess.run(build, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    kernels = {f"ztrans/ops/{path.name}" for path in (ROOT / "ops").glob("*.py")}

    with zipfile.ZipFile(wheel) as held:
        names = [name for name in held.namelist() if ".dist-info/" not in name]
        sizes = {name: held.getinfo(name).file_size for name in kernels & set(names)}
    assert {name.split("/")[0] for name in names} == {"ztrans"}
    assert sizes == {name: (ROOT / name).stat().st_size for name in kernels}
    data = {"ztrans/py.typed", "ztrans/report/page.html"}
    wanted = {f"ztrans/{path.relative_to(PACKAGE)}" for path in modules().values()} | kernels | data
    assert set(names) == wanted
    with tarfile.open(sdist) as held:
        files = {member.name.split("/", 1)[1] for member in held if member.isfile()}
    assert kernels <= files
    assert "ops" not in {name.split("/")[0] for name in files}
