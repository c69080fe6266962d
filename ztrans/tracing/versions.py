"""The range of torch releases that ztrans works with, for it uses private APIs, which change between releases.

pyproject.toml has the same range, and an installer checks it. A later upgrade of torch alone does not.
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
            f"ztrans: this is torch {version}, and ztrans stands on private APIs of {wanted}.\n"
            f"Install such a torch, pip install '{wanted}', or a ztrans that was made for torch {version}."
        )
