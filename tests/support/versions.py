"""The versions of PyTorch for which a few tests expect something else. Each test says why."""

import torch
from torch.torch_version import TorchVersion

OLD = TorchVersion(torch.__version__) < "2.13"  # torch 2.11 and 2.12
NEW = TorchVersion(torch.__version__) >= "2.14"
