"""versions: the torch releases that ztrans stands on. It uses private APIs of torch, and those change.

The range is that of pyproject.toml, which an installer reads and a later upgrade of torch alone does not.
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
