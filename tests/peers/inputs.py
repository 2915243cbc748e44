"""The tensors that peers are compared on: ordinary ones, and ones with NaN and infinity, counted apart.

All scalings see the same tensors of one shape, which every block divides; casts see every 16-bit value and, in
float32, whatever decides a code.
"""

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

import refops

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
DATA = Path(__file__).resolve().parents[1] / "data" / "minilm_ffn.safetensors"
#: Of the tensors for scalings.
ROWS, COLUMNS = 128, 384
F = np.float32


@dataclass(frozen=True)
class Dataset:
    """One tensor.

    Attributes:
        name: what it is.
        x: the tensor.
        real: whether it is a trained model's.
    """

    name: str
    x: np.ndarray
    real: bool = False

    @property
    def special(self):
        """Whether it holds NaN or infinity."""
        return bool(special_values(self.x))


def special_values(x):
    """Which special values a tensor holds: "NaN", "infinity"."""
    values = x.astype(F)
    return [name for name, found in (("NaN", np.isnan), ("infinity", np.isinf)) if found(values).any()]


# --- casts ---------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def values_for_casts(fmt, dtype, seed=0):
    """Every value of a 16-bit dtype; in float32 those too, grid points, midpoints, neighbours, random bits."""
    if dtype.itemsize == 2:
        x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    else:
        rng = np.random.default_rng(seed)
        points = np.concatenate([fmt.grid, (fmt.grid[1:] + fmt.grid[:-1]) / 2, fmt.grid[-1:] * 2.0 ** np.arange(5)])
        points = np.concatenate([points, 2.0 ** np.arange(-149.0, 128.0), 1.5 * 2.0 ** np.arange(-148.0, 127.0)])
        points = points.astype(F)
        around = np.concatenate([points, np.nextafter(points, F(np.inf)), np.nextafter(points, F(0))])
        bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(F)
        subnormal = rng.integers(0, 1 << 23, 5_000, dtype=np.uint32).view(F)
        normal = rng.standard_normal(50_000, F) * fmt.max / 4
        halves = [np.arange(1 << 16, dtype=np.uint16).view(t).astype(F) for t in (BFLOAT16, np.float16)]
        x = np.concatenate([around, -around, bits, subnormal, -subnormal, normal, *halves])
    if not fmt.signed:
        x = x[~np.signbit(x)]
    return [Dataset("finite", x[np.isfinite(x)]), Dataset("NaN", x[np.isnan(x)]), Dataset("infinity", x[np.isinf(x)])]


# --- scalings ------------------------------------------------------------------------------------


def tensors(dtype, *, real=True, seed=1):
    """The tensors for scalings, all (ROWS, COLUMNS) of one dtype."""
    rng, shape, info = np.random.default_rng(seed), (ROWS, COLUMNS), ml_dtypes.finfo(dtype)
    sign = rng.choice([-1.0, 1.0], shape)
    normal = rng.standard_normal(shape)
    made = {
        "normal": normal,
        "rows of many magnitudes": normal * 2.0 ** rng.integers(-12, 12, (ROWS, 1)),
        "heavy-tailed: Student t": rng.standard_t(1.2, shape),
        "heavy-tailed: log-normal": sign * rng.lognormal(0, 4, shape),
        "zero blocks": normal * _zero_pattern(rng),
        "zero tensor": np.copysign(0.0, sign),
        "maxima on and around max * 2^k, and ties": _ties(rng, float(info.eps)),
        "powers of two": sign * 2.0 ** rng.integers(-10, 10, shape),
        "tiny": normal * (2.0**-122 if dtype != np.float16 else 2.0**-13),
        "subnormal": sign * rng.integers(0, 128, shape) * float(info.smallest_subnormal),
        "huge": np.clip(normal / 4, -1, 1) * float(info.max),
    }
    found = [Dataset(name, _cast(x, dtype)) for name, x in made.items()]
    if real and dtype == BFLOAT16:
        found += [Dataset(name, piece, real=True) for name, piece in real_pieces()]
    return found + [Dataset(f"NaN and infinity, {name}", x) for name, x in _special(rng, dtype)]


@np.errstate(all="ignore")
def _cast(x, dtype):
    """Finite values stay finite."""
    limit = float(ml_dtypes.finfo(dtype).max)
    x = np.where(np.isfinite(x), np.clip(x, -limit, limit), x)
    return x.astype(F).astype(dtype) if dtype == BFLOAT16 else x.astype(dtype)


def _zero_pattern(rng):
    """Zero blocks of every size, signs left to the factor: 0 or 1, in tiles of 1 x 16, 1 x 32, 1 x 128, 16 x 16."""
    keep = np.ones((ROWS, COLUMNS))
    for (rows, columns), count in (((1, 16), 300), ((1, 32), 200), ((1, 128), 60), ((16, 16), 30), ((32, 32), 6)):
        for row, column in zip(
            rng.integers(0, ROWS // rows, count), rng.integers(0, COLUMNS // columns, count), strict=True
        ):
            keep[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns] = 0
    keep[:, :128] *= np.repeat(rng.integers(0, 2, (1, 1)), 128, axis=1)
    return keep


def _ties(rng, step):
    """Rows whose maxima are max * 2^k of a format or a neighbour; their other values lie on grid points and midpoints.

    `step` is the relative distance of neighbours.
    """
    rows = []
    for row in range(ROWS):
        fmt = (refops.E4M3, refops.E5M2, refops.E2M1, refops.E3M2)[row % 4]
        grid = np.concatenate([fmt.grid, (fmt.grid[1:] + fmt.grid[:-1]) / 2])
        values = rng.choice(grid, COLUMNS) * rng.choice([-1.0, 1.0], COLUMNS)
        values[::16] = fmt.max
        near = row // 4 % 3
        if near:
            values[::16] *= 1 + (1 if near == 1 else -1) * step
        rows.append(values * 2.0 ** float(rng.integers(-6, 0 if fmt is refops.E5M2 else 3)))
    return np.stack(rows)


def _special(rng, dtype):
    """NaN, infinities, both, alone and in blocks among ordinary ones."""
    normal = rng.standard_normal((ROWS, COLUMNS))
    for name, value in (("NaN", np.nan), ("+inf", np.inf), ("-inf", -np.inf)):
        x = normal.copy()
        x[::8, ::48] = value
        yield name, _cast(x, dtype)
    both = normal.copy()
    both[::4, ::64], both[::4, 1::64], both[8, :32] = np.nan, np.inf, np.nan
    yield "both", _cast(both, dtype)


def real_pieces():
    """(name, (ROWS, COLUMNS) piece) of a trained model's weights, activations and gradients, bfloat16."""
    for name, tensor in load_file(DATA).items():
        if tensor.ndim != 2 or tensor.dtype != BFLOAT16:
            continue
        for row in range(0, tensor.shape[0] - ROWS + 1, ROWS):
            for column in range(0, tensor.shape[1] - COLUMNS + 1, COLUMNS):
                piece = tensor[row : row + ROWS, column : column + COLUMNS]
                yield f"{name} [{row}, {column}]", np.ascontiguousarray(piece)
