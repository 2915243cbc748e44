"""Use a block scaling that was declared a moment ago, everywhere: `python use_scaling.py CHECK`, of MX64Scaling.

`tests/test_cost_of_change.py` runs each check in a copy of this repository that has `mx64.py` in refops/scalings, in a
process of its own. Nothing here edits the copy.
"""

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

import refops
from refops import E4M3, E8M0, oracle

ROOT = Path(refops.__file__).resolve().parents[1]
F, BF16 = np.float32, ml_dtypes.bfloat16
SCALING = refops.MX64Scaling(E4M3)


def matrix(shape=(48, 200), dtype=BF16):
    """Blocks of all sizes of numbers, the last of a row shorter; a block of zeros, NaN and infinity."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 10, (shape[0], 1))
    x[3, :64], x[4, 5], x[5, 70] = 0, np.nan, np.inf
    return x.astype(dtype)


def by_rule(x):
    """(codes, scale bytes) along rows, from the rule's text: float64 logarithms, ml_dtypes' cast."""
    rows, columns = x.shape
    blocks = np.zeros((rows, -(-columns // 64), 64), F)
    blocks.reshape(rows, -1)[:, :columns] = x
    amax = np.nanmax(np.abs(blocks), axis=2).astype(np.float64)
    with np.errstate(all="ignore"):
        byte = np.clip(np.ceil(np.log2(amax / 448)) + 127, 0, 254)
    scaled = blocks * np.exp2(127 - byte)[:, :, None].astype(F)
    codes = np.clip(np.where(np.isnan(scaled), 0, scaled), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes = np.where(np.isnan(scaled), np.uint8(0x7F), codes)
    return codes.reshape(rows, -1)[:, :columns], byte.astype(np.uint8)


def require_right(library):
    """Both directions follow the rule, come back as they must, and are accepted by the oracle; so is a fused swiglu."""
    x = matrix()
    q = library.quantize(x, SCALING, columnwise=True)
    host = q.to_host() if hasattr(q, "to_host") else q
    codes, scales = by_rule(x)
    assert np.array_equal(host.rowwise_data, codes) and np.array_equal(host.rowwise_scale_inv[:48, :4], scales)
    codes, scales = by_rule(x.T)
    assert np.array_equal(host.columnwise_data.T, codes) and np.array_equal(
        host.columnwise_scale_inv.T[:200, :1], scales
    )
    powers = np.repeat(E8M0.values[host.rowwise_scale_inv[:48, :4]], 64, axis=1)[:, :200]
    values = host.rowwise_data.view(ml_dtypes.float8_e4m3fn).astype(F) * powers
    assert np.array_equal(np.asarray(library.dequantize(q)), values, equal_nan=True)
    oracle.check("quantize", x, q, scaling=SCALING).raise_for_mismatch()
    pair = matrix((48, 256))
    q = library.activation_quantize("swiglu", pair, SCALING, columnwise=True)
    oracle.check("swiglu", pair, q, scaling=SCALING).raise_for_mismatch()
    dy = matrix((48, 128))
    q, _ = library.activation_grad_quantize("swiglu", dy, pair, SCALING, dbias=True)
    oracle.check("dswiglu", {"dy": dy, "x": pair}, q, scaling=SCALING).raise_for_mismatch()


def reference():
    """NumPy."""
    require_right(refops)
    assert refops.quantize(np.zeros((0, 64), F), SCALING).rowwise_data.shape == (0, 64)
    assert (refops.dequantize(refops.quantize(np.zeros((2, 64), F), SCALING)) == 0).all()


def host():
    """Compiled for this CPU."""
    import cuda_kernels.host

    require_right(cuda_kernels.host)


def simulator():
    """The kernels as Python: NUMBA_ENABLE_CUDASIM=1."""
    import cuda_kernels

    require_right(cuda_kernels)


def software_gpu():
    """The compiled kernels, executed."""
    import cuda_kernels

    with cuda_kernels.emulated("sm_90"):
        require_right(cuda_kernels)


def judged_and_named():
    """Wrong kernels are rejected, and what they do is named."""
    x = np.random.default_rng(1).standard_normal((128, 512)).astype(BF16)
    right = refops.quantize(x, SCALING)
    oracle.check("quantize", x, right, scaling=SCALING).raise_for_mismatch()
    down = refops.quantize(x, replace(SCALING, scale_rounding="floor"))
    wrong = {
        "scale-floor": {"data": down.rowwise_data, "scale": down.rowwise_scale_inv},
        "scale-off-by-one": {"data": right.rowwise_data, "scale": right.rowwise_scale_inv + np.uint8(1)},
        "wrong-block-size": {"data": refops.quantize(x, refops.MXFP8Scaling(E4M3)).rowwise_data},
        "scales-swizzled": {"data": right.rowwise_data, "scale": refops.swizzle(right.rowwise_scale_inv)},
        "other-format": {"data": refops.quantize(x, replace(SCALING, fmt=refops.E5M2)).rowwise_data},
    }
    for name, outputs in wrong.items():
        report = oracle.check("quantize", x, outputs, scaling=SCALING)
        assert not report.ok and report.diagnosis[0].names == (name,), (name, report)


def command(*arguments):
    """What a command of this repository prints; it must exit with 0."""
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands():
    """golden, check, inspect and explain of the command line."""
    with tempfile.TemporaryDirectory() as folder:
        command("refops", "golden", "--op", "swiglu", "--scaling", "mx64", "--shape", "32x128", "--out", folder)
        assert any("mx64" in path.name for path in Path(folder).iterdir())
        x, data, scale = (Path(folder) / f"{name}.npy" for name in ("x", "data", "scale"))
        q = refops.quantize(matrix(dtype=F), SCALING)
        for path, array in ((x, matrix(dtype=F)), (data, q.rowwise_data), (scale, q.rowwise_scale_inv)):
            np.save(path, array)
        outputs = ("--output", f"data={data}", "--output", f"scale={scale}")
        printed = command("refops", "check", "--op", "quantize", "--scaling", "mx64", "--input", str(x), *outputs)
        assert "RIGHT" in printed
        assert "mx64" in command("refops", "inspect", str(x), "--scaling", "mx64")
        assert "2^(127 - byte)" in command("refops", "explain", str(x), "--scaling", "mx64")


def fuser():
    """The quantizer, and a layer that trains under a recipe of the scaling."""
    import torch

    import fuser
    from fuser.quantization import BlockScaledQuantizer

    x = torch.randn(32, 128, dtype=torch.bfloat16)
    expected = refops.dequantize(refops.quantize(x.float().numpy().astype(BF16), SCALING))
    assert np.array_equal(BlockScaledQuantizer(SCALING)(x).dequantize(dtype=torch.float32).numpy(), expected)
    layer = fuser.ops.Linear(128, 64, bias=False, dtype=torch.bfloat16)
    with fuser.autocast(recipe=fuser.recipe.BlockScaledRecipe(SCALING)):
        y = layer(x)
    y.sum().backward()
    assert layer.weight.grad is not None and torch.isfinite(layer.weight.grad).all()


CHECKS = {
    check.__name__: check for check in (reference, host, simulator, software_gpu, judged_and_named, commands, fuser)
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
