"""Layer normalization as a fusible operation. Source: TE behaviour, `ops/basic/layer_norm.py`."""

from typing import Any

import torch

from fuser.basic.normalization import Normalization, steps, wide


class LayerNorm(Normalization):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over the trailing dimensions, with the biased variance.

    See `Normalization` for arguments, dtypes, quantized outputs and errors. Kept for backward: x in the compute dtype,
    mean and 1 / sqrt(variance + eps) of every row in float32.
    """

    parameter_names = ("weight", "bias")

    def normalize(self, x: Any, parameters: Any, out_dtype: Any) -> Any:
        # On a CPU torch's kernel takes 16-bit rows with float32 parameters: float32 statistics, one rounding. Elsewhere
        # it wants one dtype for all.
        source = x if x.device.type == "cpu" and out_dtype == x.dtype else x.to(wide(x.dtype))
        y, mean, rstd = torch.native_layer_norm(source, x.shape[1:], parameters[0], parameters[1], self.eps)
        return y.to(out_dtype), mean, rstd

    def normalize_grad(self, dy: Any, x: Any, statistics: Any, parameters: Any) -> Any:
        dx = torch.empty_like(x)
        weight_grad, bias_grad = (torch.zeros_like(parameter) for parameter in parameters)
        for rows in steps(x):
            # In float32: given 16-bit rows, torch's kernel sums the parameters' gradients in 16 bits.
            step_dx, step_dw, step_db = torch.ops.aten.native_layer_norm_backward(
                dy[rows].to(wide(x.dtype)),
                x[rows].to(wide(x.dtype)),
                x.shape[1:],
                *(statistic[rows] for statistic in statistics),
                *parameters,
                [True, True, True],
            )
            dx[rows] = step_dx
            weight_grad += step_dw
            bias_grad += step_db
        return dx, weight_grad, bias_grad
