"""Live comparison with torch and torchao where installed (`make peers`); skipped, visibly, elsewhere."""

import numpy as np
import pytest

import refops
from refops.quantization.layout import pad_to_blocks

BFLOAT16_BITS = np.arange(1 << 16, dtype=np.uint16)
ALL_BFLOAT16 = (BFLOAT16_BITS.astype(np.uint32) << 16).view(np.float32)
FINITE_BFLOAT16 = ALL_BFLOAT16[np.isfinite(ALL_BFLOAT16)]


@pytest.mark.parametrize("fmt", [refops.E4M3, refops.E5M2], ids=repr)
def test_fp8_casts_agree_with_torch(fmt):
    """torch saturates from 2.12 on; comparing within the finite range needs no version."""
    torch = pytest.importorskip("torch")
    x = FINITE_BFLOAT16[np.abs(FINITE_BFLOAT16) <= fmt.max]
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt.name]
    theirs = torch.from_numpy(x).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(refops.encode(x, fmt), theirs)


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
@pytest.mark.parametrize("fmt", [refops.E4M3, refops.E5M2], ids=repr)
def test_mx_scale_rules_agree_with_torchao(fmt, rule):
    """Ordinary values: the release's treatment of zero blocks, tiny blocks and NaN is its own (see the vectors)."""
    torch = pytest.importorskip("torch")
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", exc_type=ImportError)
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((64, 256)) * 2.0 ** rng.integers(-20, 20, (64, 1))).astype(np.float32)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt.name]
    scales, data = mx_tensor.to_mx(torch.from_numpy(x), dtype, 32, config.ScaleCalculationMode(rule))
    scaling = refops.MXFP8Scaling(fmt, scale_rounding={"ceil": "ceil_ocp"}.get(rule, rule))
    q = refops.quantize(x, scaling)
    np.testing.assert_array_equal(q.rowwise_scale_inv[:64, :8], scales.view(torch.uint8).numpy())
    np.testing.assert_array_equal(q.rowwise_data, data.view(torch.uint8).numpy())


def test_swizzle_agrees_with_torchao():
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils", exc_type=ImportError)
    scales = np.random.default_rng(3).integers(0, 256, (300, 10), dtype=np.uint8)
    theirs = utils.to_blocked(torch.from_numpy(scales)).numpy()
    np.testing.assert_array_equal(refops.swizzle(pad_to_blocks(scales, 128, 4)).ravel(), theirs.ravel())


def test_flushed_subnormals_are_refused():
    """torch can switch the thread's float unit to flush subnormals: wrong bits, so an error instead."""
    torch = pytest.importorskip("torch")
    x = np.full((1, 32), 1e-40, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        with pytest.raises(RuntimeError, match="subnormals are flushed to zero"):
            refops.quantize(x, refops.MXFP8Scaling(refops.E4M3))
    finally:
        torch.set_flush_denormal(False)
    refops.quantize(x, refops.MXFP8Scaling(refops.E4M3))
