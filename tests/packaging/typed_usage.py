"""What a user writes, for `mypy --strict` against the installed package: the types that come out are those that are
asserted. `check_wheel.py` checks it; the functions are never called.
"""

from pathlib import Path
from typing import Any, assert_type

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import cuda_kernels
import fuser
import refops
from cuda_kernels.result import Quantized as OnGPU
from fuser import recipe
from refops import golden, oracle

Array = NDArray[Any]


def formats(x: NDArray[np.float32]) -> None:
    codes = refops.encode(x, refops.E4M3, rounding="toward_zero")
    assert_type(codes, NDArray[np.uint8])
    assert_type(refops.decode(codes, refops.FORMATS["e4m3"]), NDArray[np.float32])
    assert_type(refops.unpack_fp4(refops.pack_fp4(codes)), NDArray[np.uint8])
    assert_type(refops.E4M3.max, np.float32)
    assert_type(refops.E4M3.bits, int)


def operations(x: NDArray[np.float32], dy: NDArray[np.float32], flag: bool) -> None:
    wide = x.astype(ml_dtypes.bfloat16)
    scaling = refops.MXFP8Scaling(refops.E4M3, scale_rounding="floor")
    assert_type(refops.activation("clamped_swiglu", wide, out_dtype=np.float32, limit=6), Array)
    assert_type(refops.activation_grad("gelu", dy, x), Array)
    assert_type(refops.activation_grad("gelu", dy, x, dbias=True), tuple[Array, Array])
    assert_type(refops.quantize([[1.0, 2.0]], scaling), refops.Quantized)
    assert_type(refops.quantize(x, scaling, columnwise=True, dbias=True), tuple[refops.Quantized, Array])
    assert_type(refops.quantize(x, scaling, dbias=flag), refops.Quantized | tuple[refops.Quantized, Array])
    assert_type(refops.activation_quantize("swiglu", x, refops.NVFP4Scaling(rht=True)), refops.Quantized)
    q, dbias = refops.activation_grad_quantize("dgelu"[1:], dy, x, refops.BlockScaling(refops.E5M2), dbias=True)
    assert_type(dbias, Array)
    assert_type(q.rowwise_data, Array | None)
    assert_type(q.swizzled().matrix_shape, tuple[int, int])
    assert_type(refops.dequantize(q, dtype=ml_dtypes.bfloat16), Array)
    assert_type(refops.scaled_activation_grad("swiglu", dy, x, dy[:, 0], glu_interleave_size=32), tuple[Array, Array])


def training_step(x: Array, history: NDArray[np.float32]) -> refops.DelayedScaling:
    history, scale = refops.update_delayed_scale(history, 1.0, refops.E4M3)
    assert_type(scale, np.float32)
    _, scales = refops.update_delayed_scale(history, np.ones(3, np.float32), refops.E4M3, algorithm=lambda h: h[0])
    assert_type(scales, NDArray[np.float32])
    return refops.DelayedScaling(refops.E4M3, scale)


def judged(x: Array, dump: dict[str, Array]) -> str:
    report = oracle.check("swiglu", x, dump, scaling=refops.CurrentScaling(refops.E4M3), ulp=4)
    assert_type(report.ok, bool)
    assert_type(report.mismatches[0].index, tuple[int, ...])
    assert_type(report.diagnosis[0].sentence, str)
    report.raise_for_mismatch()
    return str(report)


def files(folder: Path) -> list[str]:
    path = golden.write_golden(folder, "quantize", "mxfp8", shape=(64, 64))
    assert_type(path, Path)
    with golden.GoldenWriter(folder) as writer:
        for one in golden.golden_matrix():
            assert_type(writer.add(one).outputs, dict[str, Array])
    return golden.read_golden(path).stale_outputs()


def fast(x: Array, scaling: refops.NVFP4Scaling) -> None:
    assert_type(cuda_kernels.host.quantize(x, scaling, swizzled_scales=True), refops.Quantized)
    assert_type(cuda_kernels.host.activation("gelu", x), Array)
    assert_type(cuda_kernels.host.activation_grad("gelu", x, x, dbias=True, arithmetic="exact"), tuple[Array, Array])
    assert_type(cuda_kernels.host.swizzle(x), Array)
    assert_type(cuda_kernels.host.get_num_threads(), int)
    on_gpu = cuda_kernels.activation_quantize("swiglu", x, scaling, fast_math=True)
    assert_type(on_gpu, OnGPU)
    assert_type(on_gpu.to_host(), refops.Quantized)
    assert_type(cuda_kernels.quantize(x, scaling, dbias=True), tuple[OnGPU, Any])


def trained() -> None:
    settings = recipe.DelayedScaling(amax_history_len=16)
    assert_type(settings.margin, int)
    with fuser.autocast(recipe=settings), fuser.backend("reference") as name:
        assert_type(name, str)
    assert_type(fuser.is_mxfp8_available(), bool | tuple[bool, str])
