"""The range of torch releases that ztrans works with: it uses private APIs, which change between releases.

pyproject.toml has the same range, which an installer checks. An upgrade of torch alone does not check it again.
"""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

OLDEST, BEFORE = "2.11", "2.15"


def check_torch(version: str = torch.__version__) -> None:
    """Raises: RuntimeError for a torch outside of the range.

    >>> check_torch("2.13.0+cpu")
    """
    if not OLDEST <= TorchVersion(version) < BEFORE:
        wanted = f"torch>={OLDEST},<{BEFORE}"
        raise RuntimeError(
            f"ztrans: this is torch {version}, and ztrans uses private APIs of {wanted}.\n"
            f"Install such a torch, pip install '{wanted}', or a release of ztrans for torch {version}."
        )
