"""What a type checker must object to: each marked line with the error that it names, and no other line."""

import numpy as np

import cuda_kernels
import refops
from refops import oracle

x = np.ones((32, 32), np.float32)
mxfp8 = refops.MXFP8Scaling(refops.E4M3)

refops.MXFP8Scaling("e4m3")  # error: arg-type
refops.MXFP8Scaling(refops.E4M3, two_dim=True)  # error: call-arg
refops.quantize(mxfp8, x)  # error: call-overload
refops.quantize(x, mxfp8, dbias="yes")  # error: call-overload
refops.quantize(x, mxfp8)[0]  # error: index
refops.quantize(x, mxfp8, dbias=True).rowwise_data  # error: attr-defined
refops.activation(x, "gelu")  # error: arg-type
refops.activation("clamped_swiglu", x, limit="high")  # error: arg-type
refops.decode(x)  # error: call-arg
refops.quantize(x, mxfp8).rowwise_data.shape  # error: union-attr
oracle.check("gelu", x)  # error: call-arg
refops.no_such_name  # error: attr-defined
cuda_kernels.no_such_name  # error: attr-defined
cuda_kernels.quantize(x, mxfp8, fast_maths=True)  # error: call-overload
cuda_kernels.host.quantize(x, "mxfp8")  # error: call-overload
cuda_kernels.host.encode(x, 4)  # error: arg-type
