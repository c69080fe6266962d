"""Which commit a figure of results/gpu.md is of, and whether its code has changed since, as git says.

python -m benchmarks.gpu.ages             # writes results/gpu.md again from results/gpu.json, on any machine
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence

from .. import RESULTS

ROOT = RESULTS.parents[1]
KERNELS = "ops"
RUNTIME = "ztrans/runtime"
STEP = "ztrans"
UNKNOWN = "unknown"
# The files on which the figures of a section depend, apart from the benchmark's own.
SOURCES: Mapping[str, Sequence[str]] = {
    "numerics": (KERNELS,),
    "kernels": (KERNELS,),
    "ranks": (KERNELS,),
    "streams": (KERNELS, "ztrans/runtime/cuda/copies.py"),
    "processes": (KERNELS,),
    "collectives": (KERNELS, "ztrans/runtime/cuda/nccl.py"),
    "jitter": (KERNELS, RUNTIME),
    "sanitizer": (KERNELS, RUNTIME),
    "contention": ("ops/kernel.py", "ops/cast_pack.py"),
    "nccl": (KERNELS, RUNTIME),
    "step": (KERNELS, STEP),
    "variants": (KERNELS, STEP),
    "largest": (KERNELS, STEP),
    "host": (STEP,),
    "offload": (KERNELS, STEP),
}


def commit_now() -> str:
    """The commit of the sources here, with a plus sign if files have been changed since; `unknown` without git."""
    if not (ROOT / ".git").exists():
        return UNKNOWN
    commit = _git("rev-parse", "--short=8", "HEAD")
    return f"{commit}+" if _git("status", "--porcelain", "--untracked-files=no") else commit


def changes_since(commit: str, section: str) -> int:
    """How many commits have changed the files of a section since a commit; one without git, to be safe."""
    if UNKNOWN in (commit, commit_now()):
        return 1
    known = commit.removesuffix("+")
    return int(_git("rev-list", "--count", f"{known}..HEAD", "--", *SOURCES[section]))


def age(section: str, rows: Sequence[Mapping]) -> str:
    """What the report says about the age of the rows of a section."""
    commits = list(dict.fromkeys(row["commit"] for row in rows if "commit" in row))
    older = [commit for commit in commits if changes_since(commit, section)]
    files = ", ".join(SOURCES[section])
    if not older:
        return f"Of the code of {files} as it is."
    return f"Rows of {', '.join(older)} are **older than their code**: {files} has changed since."


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    from .__main__ import markdown

    file = RESULTS / "gpu.json"
    where = json.loads(file.read_text())
    sections = where.pop("sections")
    file.with_suffix(".md").write_text(markdown(where, sections) + "\n")


if __name__ == "__main__":
    main()
