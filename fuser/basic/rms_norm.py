"""Root mean square normalization as a fusible operation. Source: TE behaviour, `ops/basic/rms_norm.py`."""

from typing import Any

import torch

from fuser.basic.normalization import STEP, Normalization, steps, wide
from fuser.common import maybe_dequantize

#: The same steps in one call, on a CPU: (y, rstd). A private function of torch, which older ones lack.
_fused_on_cpu = getattr(torch, "_fused_rms_norm", None)


class RMSNorm(Normalization):
    """y = x / sqrt(mean(x^2) + eps) * weight over the trailing dimensions.

    See `Normalization` for arguments, dtypes, quantized outputs and errors. Kept for backward: x in the compute dtype
    and 1 / sqrt(mean(x^2) + eps) of every row in float32.
    """

    parameter_names = ("weight",)

    def normalize(self, x: Any, parameters: Any, out_dtype: Any) -> Any:
        (weight,) = parameters
        if x.dtype is out_dtype is wide(x.dtype) and x.numel() <= STEP:
            if _fused_on_cpu is not None and x.is_cpu:
                return _fused_on_cpu(x, x.shape[1:], weight, self.eps)
            # what mean() computes, with less to dispatch
            rstd = x.square().sum(-1, keepdim=True).div_(x.shape[-1]).add_(self.eps).rsqrt_()
            return (x * rstd).mul_(weight), rstd
        y = torch.empty_like(x, dtype=out_dtype)
        rstd = x.new_empty((len(x), 1), dtype=wide(x.dtype))
        for rows in steps(x):
            step = x[rows].to(wide(x.dtype))
            torch.rsqrt(step.square().mean(-1, keepdim=True).add_(self.eps), out=rstd[rows])
            y[rows] = (step * rstd[rows]).mul_(weight)
        return y, rstd

    def normalize_grad(self, dy: Any, x: Any, statistics: Any, parameters: Any, *, extra_gradient: Any = None) -> Any:
        """As for every normalization; `extra_gradient`, shaped like the input, is added before dx is rounded."""
        extra = None if extra_gradient is None else maybe_dequantize(extra_gradient).view(x.shape)
        (rstd,), (weight,) = statistics, parameters
        dx, weight_grad = torch.empty_like(x), torch.zeros_like(weight)
        for rows in steps(x):
            normalized = x[rows].to(wide(x.dtype)) * rstd[rows]
            step_dy = dy[rows].to(wide(x.dtype))
            product = step_dy * normalized
            weight_grad += product.sum(0)
            slope = product.mul_(weight).mean(-1, keepdim=True)  # of the row's length
            step_dx = (step_dy * weight).addcmul_(normalized, slope, value=-1).mul_(rstd[rows])
            dx[rows] = step_dx if extra is None else step_dx.add_(extra[rows])
        return dx, weight_grad
