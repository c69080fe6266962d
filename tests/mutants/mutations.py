"""Small mutations of the project's code, drawn evenly over its packages.

Each mutation changes one operator, number or condition, by an operator of cosmic-ray. The draw depends only on the text
of the line, its function and its module, so an edit elsewhere leaves it as it is.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).parents[2]

# The operators of cosmic-ray whose mutations run: others replace operators by ones that raise TypeError at once.
_COMPARISONS = "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is"
_ARITHMETIC = "Add_Sub Sub_Add Mul_Add Div_Mul FloorDiv_Mul"
OPERATORS = (
    *(f"core/ReplaceComparisonOperator_{pair}" for pair in _COMPARISONS.split()),
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in _ARITHMETIC.split()),
    *("core/ReplaceAndWithOr", "core/ReplaceOrWithAnd", "core/AddNot"),
    *("core/ReplaceUnaryOperator_Delete_Not", "core/NumberReplacer"),
    *("core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue"),
    *("core/ReplaceBreakWithContinue", "core/ReplaceContinueWithBreak"),
    "core/ZeroIterationForLoop",
)


@dataclass(frozen=True)
class Mutation:
    """One change of one line."""

    module: str  # "ir.verifier", "ops.reduce"
    path: Path  # from the root
    operator: str  # a name of cosmic-ray
    occurrence: int  # among the places of this operator in the file
    function: str  # the qualified name of the function around it, or ""
    line: str  # the text of the line before
    repeat: int  # how many equal lines with this operator the function has before

    @property
    def key(self) -> str:
        """What names this mutation in `harmless.txt`, whatever the number of its line."""
        operator = self.operator.removeprefix("core/").removeprefix("Replace")
        repeat = f" #{self.repeat}" if self.repeat else ""
        return f"{self.module}:{self.function} | {operator}{repeat} | {self.line}"

    def code(self) -> str:
        """The text of the file with this mutation."""
        operator = plugins.get_operator(self.operator)()
        return mutate_code((ROOT / self.path).read_text(), operator, self.occurrence)


def draw(total: int) -> list[Mutation]:
    """About `total` mutations: for each package a number in proportion to the root of its lines, and at least four."""
    by_package: dict[str, list[Mutation]] = defaultdict(list)
    lines: Counter[str] = Counter()
    for path in _files():
        module = _module(path)
        package = module.rpartition(".")[0] or "the top"
        by_package[package] += mutations_of(path)
        lines[package] += len(path.read_text().splitlines())
    weights = {package: lines[package] ** 0.5 for package in by_package}
    drawn = []
    for package, mutations in sorted(by_package.items()):
        count = max(4, round(total * weights[package] / sum(weights.values())))
        drawn += sorted(mutations, key=_rank)[:count]
    return drawn


def mutations_of(path: Path) -> list[Mutation]:
    """All mutations of a file, except in annotations, in text, and in code that only type checkers read."""
    source = path.read_text()
    lines = source.splitlines()
    tree = ast.parse(source)
    parsed = get_ast(source)
    functions = _functions(tree)
    skipped = _skipped_lines(tree)
    seen: Counter[tuple[str, str, str]] = Counter()
    found = []
    for name in OPERATORS:
        places = _Places(plugins.get_operator(name)())
        places.walk(parsed)
        for occurrence, line in enumerate(places.lines):
            function = functions.get(line, "")
            text = lines[line - 1].strip()
            same = (function, name, text)
            # A number at the top of a module is a measured figure, which no test can know.
            is_figure = name == "core/NumberReplacer" and not function
            if line not in skipped and not is_figure:
                relative = path.relative_to(ROOT)
                found.append(
                    Mutation(_module(path), relative, name, occurrence, function, text, seen[same])
                )
            seen[same] += 1
    return found


class _Places(Visitor):
    """The lines at which an operator can mutate a file, in its order."""

    def __init__(self, operator: object) -> None:
        self.operator = operator
        self.lines: list[int] = []

    def visit(self, node: object) -> object:
        for (line, _), _ in self.operator.mutation_positions(node):
            self.lines.append(line)
        return node


def _files() -> list[Path]:
    inside = [path for path in (ROOT / "ztrans").rglob("*.py") if "ztrans/ops" not in str(path)]
    return sorted([*inside, *(ROOT / "ops").glob("*.py")])


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "ztrans" else parts)


def _functions(tree: ast.Module) -> dict[int, str]:
    """The qualified name of the innermost function of each line."""
    names: dict[int, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
                for line in range(child.lineno, child.end_lineno + 1):
                    names[line] = name
            visit(child, name)

    visit(tree, "")
    return names


def _skipped_lines(tree: ast.Module) -> set[int]:
    """Lines whose mutations no test could see: signatures, types, and texts of several lines."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            skipped.update(range(first, node.body[0].lineno))
            continue
        is_type = isinstance(node, ast.AnnAssign) and node.value is None
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        is_text = isinstance(node, ast.JoinedStr | ast.Constant)
        is_long_text = is_text and node.end_lineno > node.lineno
        if is_type or is_for_types or is_long_text:
            skipped.update(range(node.lineno, node.end_lineno + 1))
    return skipped


def _rank(mutation: Mutation) -> bytes:
    return hashlib.sha256(mutation.key.encode()).digest()
