"""Operations that a compiled graph calls by name: `torch.ops.rondel.*`."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("rondel", "FRAGMENT")
