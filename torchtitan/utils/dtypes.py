"""The floating-point types that parameters have, by the names of configurations, checkpoints and manifests."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
