"""Tensors to check operations with: synthetic ones with every kind of trouble, and real ones from a file."""

from pathlib import Path

import ml_dtypes
import numpy as np

from refops.activations import ACTIVATIONS
from refops.arguments import BFLOAT16
from refops.files import FileError, UnsupportedTensorError, open_tensors

DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)


# --- tensors ---------------------------------------------------------------------------------------------------------


def synthetic_tensors():
    """Return name -> float32 (M, K). Sizes are odd on purpose: no multiple of 128, one that nothing divides."""
    rng = np.random.default_rng(20240229)
    wide = wide_range(rng, 96, 288)
    special = rng.standard_normal((32, 96)).astype(np.float32)
    special[0, :6] = [np.nan, np.inf, -np.inf, -0.0, 3.0e38, -65504]
    special[1] = np.nan
    special[2, 40] = np.inf
    special[5, 3::7] = -np.nan
    zero = np.zeros((32, 32), np.float32)
    zero[::2] = -0.0
    return {
        "gaussian": rng.standard_normal((64, 160)).astype(np.float32),
        "wide": wide,
        "special": special,
        "zero": zero,
        "ragged": wide_range(rng, 37, 75),
    }


def wide_range(rng, m, k):
    """Finite float32 (m, k) with heavy tails, outlier and tiny rows, zero blocks, signed zeros, subnormals, ties."""
    x = (rng.standard_normal((m, k)) * np.exp(2 * rng.standard_normal((m, k)))).astype(np.float32)
    x[3 % m] *= 1e4
    x[7 % m] *= np.float32(1e-6)
    x[11 % m, : k // 2] = 0
    x[11 % m, 1::3] = -0.0
    x[13 % m, ::5] = 1e-40
    x[17 % m] = np.resize([1.0625, 1.1875, 17, 19, -0.25, 0.75, 2.5, 5, 3.5, 1.25, -2.5, 6, 448, -464], k)
    return x


def real_tensors(path):
    """Return name -> array of the tensors in a file that refops can quantize; none where there is no file.

    Raises:
        FileError: the file is there but cannot be read, or holds no such tensor.
    """
    if not Path(path).exists():
        return {}
    found = {}
    with open_tensors(path) as tensors:
        for tensor in tensors:
            try:
                found[tensor.name] = tensor.load()[0]
            except UnsupportedTensorError:
                continue
    if not found:
        raise FileError(f"must hold at least one tensor that refops quantizes; got {str(path)!r}")
    return found


def in_every_dtype(tensors):
    """Yield (label, tensor) for each float32 tensor in each dtype."""
    for name, x in tensors.items():
        for dtype in DTYPES:
            yield f"{name} {dtype.name}", x.astype(dtype)


def clip_to_finite(x, dtype):
    """`x` in `dtype`, clipped where float16 would overflow."""
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype)


# --- inputs of activations -------------------------------------------------------------------------------------------


def activation_input(name, act, gate):
    """What activation `name` takes: [act | gate] for gated activations, else act alone."""
    return np.concatenate([act, gate], axis=-1) if ACTIVATIONS[name].gated else act


def synthetic_activation_inputs(name):
    """Yield (label, x, dy) in every dtype, everything finite."""
    rng = np.random.default_rng(7)
    act, gate, dy = (wide_range(rng, 48, 160) for _ in range(3))
    for dtype in DTYPES:
        x = clip_to_finite(activation_input(name, act, gate), dtype)
        yield f"{name} {dtype.name} wide", x, clip_to_finite(dy, dtype)


def real_activation_inputs(name, real):
    """Yield (label, x, dy) of the first and last layer in the model's own dtype; a gate is the rows in reverse."""
    for layer in ("layer0", "layer3"):
        x, dy = real.get(f"{layer}.ffn.pre_activation"), real.get(f"{layer}.ffn.grad_activation")
        if x is not None and dy is not None and x.shape == dy.shape:
            yield f"{name} {x.dtype} {layer}", activation_input(name, x, x[::-1]), dy
