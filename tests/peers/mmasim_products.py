"""mmasim: tensor cores in PyTorch, by those who measured them (arXiv 2511.10909). Imports torch alone.

`instruction(unit, a_format, b_format)` finds the class and the name of the instruction for a row of
`refops.products.UNITS`, and `compare` counts results that differ, on inputs that `inputs` makes: random codes, special
values, cancellation, and scales of any size. Run this file to compare as many results of each case as wanted; with so
many of each, 100 million in all:

    PYTHONPATH=.:tests python -m peers.mmasim_products --results 1053000
"""

import argparse
import sys
import time
import types

import numpy as np

from arrays import raw
from refops import E2M1, E8M0
from refops.formats import FloatFormat
from refops.products import UNITS, matmul
from refops.rounding import stored

NAME, PACKAGES = "mmasim", ("mmasim",)
F = np.float32
#: Our names of cards, and theirs.
ARCHITECTURES = {"ampere": "Ampere", "hopper": "Hopper", "blackwell": "Blackwell"}
KINDS = {"f8f6f4": "f8f6f4", "mxf4": "mxf4nvf4", "nvf4": "mxf4nvf4", "mxf8f6f4": "mxf8f6f4"}


def load():
    """The module with their classes, or ImportError. What it compiles for float64 alone is left out."""
    import mmasim.arithmetic

    stand_in = types.ModuleType("mmasim.arithmetic.fma")
    before = sys.modules.setdefault(stand_in.__name__, stand_in)
    mmasim.arithmetic.fma = before
    from mmasim.nv_ptx import sim

    return sim


def pairs(unit):
    """The pairs of formats that a unit multiplies."""
    return [(a, b) for a in unit.formats for b in unit.formats if unit.takes(a, b)]


def instruction(unit, a_format, b_format, block=None):
    """Their instruction for a unit: called with A (m, k), B (k, n), C and scales, it returns D."""
    sim, architecture = load(), ARCHITECTURES[unit.card]
    d, a, b = (_ptx_name(fmt) for fmt in (unit.accumulator.dtype, a_format, b_format))
    if unit.card == "ampere":
        return sim.MMA(architecture, f"m16n8k16.{d}.{a}.{b}.{d}")
    if unit.card == "hopper":
        return sim.WGMMA(architecture, f"m64n64k{unit.products}.{d}.{a}.{b}")
    kind = KINDS.get(unit.name.removesuffix(" in float16"), "f16")
    if unit.scale_format is None:
        return sim.TCGen05MMA(architecture, f"m64n64k{unit.products}.kind::{kind}.{d}.{a}.{b}")
    scale = "ue8m0" if unit.scale_format is E8M0 else "ue4m3"
    name = f"m128n64k{unit.products}.kind::{kind}.block{block}.{d}.{a}.{b}.{scale}"
    return sim.TCGen05MMABlockScale(architecture, name)


def _ptx_name(fmt):
    if isinstance(fmt, FloatFormat):
        return fmt.name
    return {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[fmt.name]


# --- inputs ---------------------------------------------------------------------------------------


def codes_of(fmt, rng, shape, kind):
    """Random codes of a format: uint16 of 16-bit formats, uint8 of others.

    kind: "any" code, special ones too; "finite" ones of a few exponents around 1; "small", subnormal numbers and zeros
    among them; "special", of which most are zeros, infinities, NaN or the largest.
    """
    bits = fmt.bits if isinstance(fmt, FloatFormat) else 16
    magnitudes, sign = 1 << (bits - 1), rng.integers(0, 2, shape) << (bits - 1)
    largest = _largest(fmt)
    if kind == "special":
        extremes = np.array([0, 1, magnitudes - 1, magnitudes - 2, largest, min(largest + 1, magnitudes - 1)])
        code = np.where(rng.random(shape) < 0.2, extremes[rng.integers(0, 6, shape)], 0)
    elif kind == "small":
        code = rng.integers(0, largest + 1, shape) >> rng.integers(0, bits - 1, shape)
    elif kind == "finite":
        middle = magnitudes // 2
        code = rng.integers(middle - middle // 4, min(largest, middle + middle // 4) + 1, shape)
    else:
        code = rng.integers(0, magnitudes, shape)
    return (code | sign).astype(np.uint16 if bits == 16 else np.uint8)


def _largest(fmt):
    """The code of the largest finite value; what follows it, if anything does, is infinity or NaN."""
    return fmt.largest_code if isinstance(fmt, FloatFormat) else {"float16": 0x7BFF, "bfloat16": 0x7F7F}[fmt.name]


KINDS_OF_INPUT = ("any", "finite", "small", "special", "cancelling")


def inputs(unit, a_format, b_format, block, rng, kind, m, n, k):
    """Codes of a (m, k), b (n, k) and of scales (m, k / block), (n, k / block), None without."""
    drawn = "small" if kind == "cancelling" else kind
    a, b = codes_of(a_format, rng, (m, k), drawn), codes_of(b_format, rng, (n, k), drawn)
    if kind == "cancelling":  # pairs of products that differ in sign, and some in more
        sign = a.dtype.type(1 << ((a_format.bits if isinstance(a_format, FloatFormat) else 16) - 1))
        b[:, 1::2] = b[:, ::2]
        a[:, 1::2] = np.where(rng.random((m, k // 2)) < 0.8, a[:, ::2] ^ sign, a[:, 1::2])
    if block is None:
        return a, b, None, None
    middle = 127 if unit.scale_format is E8M0 else 0x38
    low, high = {"any": (0, 256), "special": (0, 256)}.get(kind, (middle - 24, middle + 24))
    scales = [rng.integers(low, high, (rows, -(-k // block))).astype(np.uint8) for rows in (m, n)]
    if kind in ("any", "special"):  # else most of many NaN
        scales = [np.where(rng.random(one.shape) < 0.02, one, one % np.uint8(middle + 60)) for one in scales]
    return a, b, *scales


# --- both sides -----------------------------------------------------------------------------------


def ours(unit, a_format, b_format, block, codes, matmul=matmul):
    """(m, n) in the accumulator's dtype, of `refops.products.matmul` or of a function with its arguments."""
    a, b, a_scale, b_scale = codes
    scales = {}
    if block is not None:
        values = unit.scale_format.values
        magnitude = unit.scale_format.magnitude_code
        scales = {"a_scale": values[magnitude(a_scale)], "b_scale": values[magnitude(b_scale)]}
    left, right = _values(a, a_format), _values(b, b_format)
    sums = matmul(left, right, unit, a_format=a_format, b_format=b_format, **scales)
    return stored(sums, unit.accumulator.dtype)


def _values(codes, fmt):
    return fmt.values[codes] if isinstance(fmt, FloatFormat) else codes.view(fmt).astype(F)


def theirs(unit, a_format, b_format, block, codes):
    """(m, n) in the accumulator's dtype: their instruction repeated along k, each adding to what the last one gave."""
    import torch

    run = instruction(unit, a_format, b_format, block)
    a, b, a_scale, b_scale = codes
    left, right = _as_theirs(a, a_format, unit), _as_theirs(b, b_format, unit)
    per_byte = left.shape[1] and a.shape[1] // left.shape[1]
    dtype = {"float32": torch.float32, "float16": torch.float16}[unit.accumulator.dtype.name]
    sums = torch.zeros(len(a), len(b), dtype=dtype)
    for start in range(0, a.shape[1], run.k):
        part = slice(start // per_byte, (start + run.k) // per_byte)
        operands = [left[:, part], right[:, part].T, sums]
        if block is not None:
            places = slice(start // block, (start + run.k) // block)
            kind = torch.float8_e8m0fnu if unit.scale_format is E8M0 else torch.float8_e4m3fn
            operands += [
                torch.from_numpy(a_scale[:, places]).view(kind),
                torch.from_numpy(b_scale[:, places]).view(kind).T,
            ]
        sums = run(*operands)
    return sums.numpy()


def _as_theirs(codes, fmt, unit):
    """Codes as their operands are: torch's dtypes; FP6 and FP4 as bytes, which hold them higher up or two."""
    import torch

    if not isinstance(fmt, FloatFormat):
        return torch.from_numpy(codes.view(np.int16)).view(
            {"float16": torch.float16, "bfloat16": torch.bfloat16}[fmt.name]
        )
    if fmt.bits == 8:
        return torch.from_numpy(codes).view({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt.name])
    if unit.added_exactly > 1:  # packed; which half comes first is all the same, if a and b agree
        return torch.from_numpy(codes[:, ::2] << np.uint8(4) | codes[:, 1::2])
    return torch.from_numpy(codes << np.uint8(2) if fmt is E2M1 else codes)


def differing(unit, formats, block, rng, kind, results, matmul=matmul):
    """How many of at least so many results differ, and how many there were; each of two instructions."""
    wrong = count = 0
    m = n = 64
    while count < results:
        codes = inputs(unit, *formats, block, rng, kind, m, n, 2 * max(16, unit.products))
        one, other = ours(unit, *formats, block, codes, matmul), theirs(unit, *formats, block, codes)
        wrong += int(np.count_nonzero(raw(one) != raw(other)))
        count += m * n
    return wrong, count


def cases():
    """(unit, formats, block) of everything that can be compared."""
    return [
        (unit, formats, block) for unit in UNITS for formats in pairs(unit) for block in unit.scale_blocks or (None,)
    ]


def label(unit, formats, block):
    """A case in words."""
    blocks = "" if block is None else f", blocks of {block}"
    return f"{unit.card} {unit.name}: {' by '.join(_ptx_name(fmt) for fmt in formats)}{blocks}"


def main(arguments=None):
    """Compare as many results as are asked for."""
    parser = argparse.ArgumentParser(description="Compare the products of tensor cores with mmasim.")
    parser.add_argument("--results", type=int, default=10**6, help="results of each case (1000000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose label has this in it")
    parser.add_argument("--kernel", action="store_true", help="the compiled kernel instead of the reference")
    options = parser.parse_args(arguments)
    function = matmul
    if options.kernel:
        from cuda_kernels.host.products import matmul as function
    total = bad = 0
    for case in cases():
        if options.only not in label(*case):
            continue
        start = time.perf_counter()
        rng, found = np.random.default_rng(options.seed), []
        for kind in KINDS_OF_INPUT:
            found.append(differing(*case, rng, kind, -(-options.results // len(KINDS_OF_INPUT)), function))
        wrong, count = (sum(numbers) for numbers in zip(*found, strict=True))
        total, bad = total + count, bad + wrong
        print(f"{label(*case):60} {wrong} of {count:,} differ ({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"{bad} of {total:,} results differ")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
