"""TE's constants that scripts import: its dtypes by torch's, positions of quantizers, block sizes.

Those of attention (mask types, layouts of queries, keys and values ...) are not here.
"""

from types import SimpleNamespace

import torch

from fuser.dtypes import _TORCH, DType
from refops.scalings import MXFP8Scaling, NVFP4Scaling

__all__ = [
    "MXFP8_BLOCK_SCALING_SIZE",
    "NVFP4_BLOCK_SCALING_SIZE",
    "DType",
    "FP8BwdTensorIdx",
    "FP8FwdTensorIdx",
    "GemmParallelModes",
    "TE_DType",
    "TE_DType_To_Torch",
    "dist_group_type",
]

#: `DType` -> torch dtype, of the types that every torch here has, and the reverse.
TE_DType_To_Torch = {dtype: name for dtype, name in _TORCH.items() if dtype <= DType.kFloat8E5M2}
TE_DType = {name: dtype for dtype, name in TE_DType_To_Torch.items()}

#: Positions of quantizers among those of a direction: (input, weight, output), (grad_output, grad_input) in turn.
FP8FwdTensorIdx = SimpleNamespace(**{f"GEMM{1 + i // 3}_{('INPUT', 'WEIGHT', 'OUTPUT')[i % 3]}": i for i in range(9)})
FP8BwdTensorIdx = SimpleNamespace(**{f"GRAD_{('OUTPUT', 'INPUT')[i % 2]}{1 + i // 2}": i for i in range(6)})

GemmParallelModes = ("row", "column", None)
dist_group_type = torch.distributed.ProcessGroup if torch.distributed.is_available() else None
MXFP8_BLOCK_SCALING_SIZE = MXFP8Scaling.block_size
NVFP4_BLOCK_SCALING_SIZE = NVFP4Scaling.block_size
