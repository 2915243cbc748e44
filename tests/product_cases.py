"""Cases of products of tensor cores that all implementations are given: values, faults in the numbers of a unit."""

from dataclasses import replace

import ml_dtypes
import numpy as np

from refops import E2M1, E4M3, E5M2, E8M0
from refops.products import unit

F = np.float32
BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
MXFP8, MXFP4 = (unit("blackwell", fmt, scale_format=E8M0) for fmt in (E4M3, E2M1))
NVFP4 = unit("blackwell", E2M1, scale_format=E4M3)


def operand_formats(row):
    """Pairs of formats that a unit multiplies."""
    return [(a, b) for a in row.formats for b in row.formats if row.takes(a, b)]


def values_of(fmt, codes):
    """float32 values of codes, 8 bits or 16; those of a format of less bits wrap around."""
    codes = np.asarray(codes, np.uint16)
    if isinstance(fmt, np.dtype):
        return codes.view(fmt).astype(F)
    return fmt.values[codes & ((1 << fmt.bits) - 1)]


def random_case(row, seed):
    """Arguments of `matmul`: values whose exponents differ widely, some of which cancel, and random scales."""
    rng = np.random.default_rng(seed)
    formats = operand_formats(row)[seed % len(operand_formats(row))]
    k = 2 * row.products + 5
    a, b = (values_of(fmt, rng.integers(0, 0x7C00, (8, k))) for fmt in formats)
    a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))
    b[:, 1::2] = b[:, :-1:2]  # in pairs of opposite signs
    a[:, 1::2] = -np.where(rng.random((8, k // 2)) < 0.7, a[:, :-1:2], a[:, 1::2])
    case = {"a": a, "b": b, "a_format": formats[0], "b_format": formats[1]}
    if row.scale_format is not None:
        codes = (107, 147) if row.scale_format is E8M0 else (0, 0x7F)
        count = -(-k // row.scale_blocks[0])
        for name in ("a_scale", "b_scale"):
            case[name] = values_of(row.scale_format, rng.integers(*codes, (8, count)))
    return case


def small_cases(row):
    """Arguments of `matmul` whose sums are near the smallest numbers of the accumulator, where it can come there."""
    lowest = row.zero_exponent - row.fraction_bits
    if row.accumulator.dtype == FP16 and FP16 in row.formats:
        # 23/16 of the least number; half of it and, with what is kept beside zeros, or is not, more.
        return [plain_case(FP16, [(23, -28)]), *(plain_case(FP16, [(1, -25), (1, e)]) for e in (lowest, lowest - 1))]
    if row.accumulator.dtype == FP16:
        return [plain_case(E5M2, [(1, -24), (1, -26), (1, -27), (1, -28)])]
    if row.scale_format is None and BF16 in row.formats:
        # 1.5 * 2^-149; 2^-149 as a sum of numbers down to the lowest bit beside zeros, or one less.
        ones = [[*ones_below(-149, e), (1, e)] for e in (lowest, lowest - 1)]
        return [plain_case(BF16, [(3, -150)]), *(plain_case(BF16, pairs) for pairs in ones)]
    if row is MXFP8:
        cases = [
            ([1.5], -149),
            ([2.0**-i for i in (*range(1, 10), 9)], -149),
            ([2.0**-i for i in (*range(10), 9)], -150),
        ]
        return [scaled_case(row, [[(x, 1) for x in elements]], [exponent]) for elements, exponent in cases]
    # Two quarters, each half of the lowest bit beside a sum that cancels: cut off alone they would be nothing.
    apart = [(0.5, 0.5)] + [(0, 0)] * 7 + [(0.5, 0.5)]
    if row is NVFP4:
        return [scaled_case(row, [[(6, 6), (6, -6)], part], [16, -18]) for part in (apart, apart[:1])]
    if row is MXFP4:
        first = [(6, 6)] * 3 + [(6, 3), (3, 0.5), (0.5, 0.5)]  # 127.75 = 2^7 - 2^-2
        thirds = [(6, 3), (6, 2), (3, 0.5), (0.5, 0.5)], [(6, 6), (6, 4), (3, 1), (0.5, 1.5)]  # 31.75, 63.75
        return [
            scaled_case(row, [[(6, 6), (6, -6)], apart], [0, -34]),
            scaled_case(row, [[(1.5, 1)]], [-149]),
            # 2^-149 - 2^-158, 2^-158 - 2^-167, 2^-167 - 2^-174 or 2^-175, and that: 2^-149.
            scaled_case(row, [first, first, thirds[0], [(0.5, 0.5)]], [-156, -165, -172, -172]),
            scaled_case(row, [first, first, thirds[1], [(0.5, 0.5)]], [-156, -165, -173, -173]),
        ]
    return []


def ones_below(top, last):
    """2^top - 2^last as (integer of 8 bits, exponent)."""
    middle = max(top - 8, last)
    return [((1 << (top - middle)) - 1, middle), *(ones_below(middle, last) if middle > last else [])]


def plain_case(fmt, products):
    """Arguments of `matmul` for products integer * 2^exponent, halves of the exponent in either operand."""
    a = F([[integer * 2.0 ** (exponent // 2) for integer, exponent in products]])
    b = F([[2.0 ** (exponent - exponent // 2) for _, exponent in products]])
    return {"a": a, "b": b, "a_format": fmt, "b_format": fmt}


def scaled_case(row, parts, exponents):
    """Arguments of `matmul` for pairs in blocks, the smallest that the unit reads, and exponents of both scales."""
    block, fmt = row.scale_blocks[-1], row.formats[0]
    pairs = np.array([pair for part in parts for pair in part + [(0, 0)] * (block - len(part))], F)
    a_scale = F([[2.0 ** (exponent // 2) for exponent in exponents]])
    b_scale = F([[2.0 ** (exponent - exponent // 2) for exponent in exponents]])
    elements = {"a": pairs[None, :, 0], "b": pairs[None, :, 1], "a_format": fmt, "b_format": fmt}
    return elements | {"a_scale": a_scale, "b_scale": b_scale}


def faulty(row):
    """name -> the unit with one wrong number."""
    accumulator = row.accumulator
    other_rounding = {"toward_zero": "nearest_even", "nearest_even": "toward_zero"}[accumulator.rounding]
    found = {
        "twice as many products": replace(row, products=2 * row.products),
        "half as many products": replace(row, products=row.products // 2),
        "the other rounding": replace(row, accumulator=replace(accumulator, rounding=other_rounding)),
        "one bit fewer kept": replace(
            row, accumulator=replace(accumulator, fraction_bits=accumulator.fraction_bits - 1)
        ),
    }
    if accumulator.fraction_bits == 13:  # else the dtype has no more
        found["one bit more kept"] = replace(row, accumulator=replace(accumulator, fraction_bits=14))
    if row.added_exactly > 1:
        found["8 added exactly"] = replace(row, added_exactly=8)
    for sign in (-1, 1):
        found[f"fraction bits {sign:+}"] = replace(row, fraction_bits=row.fraction_bits + sign)
        found[f"zero exponent {sign:+}"] = replace(row, zero_exponent=row.zero_exponent + sign)
        smallest = replace(accumulator, smallest_exponent=accumulator.smallest_exponent + sign)
        found[f"smallest exponent {sign:+}"] = replace(row, accumulator=smallest)
    return found


#: Numbers that no result of a unit tells. The smallest product of its elements (E5M2: 2^-32; E2M1 with UE4M3 scales:
#: 2^-20) is above the lowest bit beside zeros; where the accumulator is float32, far above its smallest numbers, too.
BESIDE_ZEROS = {"zero exponent -1", "zero exponent +1"}
SMALLEST = {"smallest exponent -1", "smallest exponent +1"}
UNSEEN = {
    "FP8": BESIDE_ZEROS | SMALLEST,
    "f8f6f4": BESIDE_ZEROS | SMALLEST,
    "nvf4": BESIDE_ZEROS | SMALLEST,
    "FP8 in float16": BESIDE_ZEROS,
    "f8f6f4 in float16": BESIDE_ZEROS,
}


# --- any operands -------------------------------------------------------------------------------------

#: What codes are taken from: (first, behind the last) of 16 bits, wrapped around to a format's; share of zeros; share
#: of infinities and NaN that are left in. Moderate ones have few exponents, so that all products count.
KINDS = {
    "any": ((0, 1 << 16), 0.1, 0.0),
    "moderate": ((0x3C30, 0x4050), 0.0, 0.0),
    "sparse": ((0, 1 << 16), 0.9, 0.0),
    "special": ((0, 1 << 16), 0.2, 0.02),
    "all special": ((0, 1 << 16), 0.2, 1.0),
}
#: The same of scales' codes, of 8 bits: (first, behind the last) of E8M0, whether there is NaN.
SCALE_KINDS = {"any": (0, 255, False), "moderate": (118, 138, False), "sparse": (0, 255, False)}


def elements(rng, fmt, shape, kind):
    """Random float32 values of a format, of one of `KINDS`."""
    (low, high), zeros, special = KINDS[kind]
    codes = rng.integers(low, high, shape)
    if not isinstance(fmt, np.dtype):
        codes = codes ^ rng.integers(0, 2, shape) << (fmt.bits - 1)  # the sign
    values = values_of(fmt, codes)
    dropped = (rng.random(shape) < zeros) | (~np.isfinite(values) & (rng.random(shape) >= special))
    return np.where(dropped, F(0), values)


def scales(rng, fmt, shape, kind):
    """Random float32 values of a format of scales; some NaN where elements may be."""
    low, high, has_nan = SCALE_KINDS.get(kind, (0, 255, True))
    codes = rng.integers(low, high, shape) if fmt is E8M0 else rng.integers(0, 0x7F, shape)
    codes = np.where(has_nan & (rng.random(shape) < 0.02), 0xFF if fmt is E8M0 else 0x7F, codes)
    return values_of(fmt, codes)


def any_case(rng, row, sizes, kind, promoted=None):
    """Arguments of `matmul` for (m, n, k).

    Args:
        kind: one of `KINDS`.
        promoted: None, "plain" or "scaled": partial sums of two groups, each scaled or not.
    """
    m, n, k = sizes
    pairs = operand_formats(row)
    formats = pairs[rng.integers(len(pairs))]
    case = {"a": elements(rng, formats[0], (m, k), kind), "b": elements(rng, formats[1], (n, k), kind)}
    case |= {"a_format": formats[0], "b_format": formats[1]}
    if row.scale_format is not None:
        count = -(-k // rng.choice(row.scale_blocks))
        case |= {f"{x}_scale": scales(rng, row.scale_format, (s, count), kind) for x, s in (("a", m), ("b", n))}
    elif promoted is not None:
        case["promotion"] = 2 * row.products
        if promoted == "scaled":
            shapes = {"a_scale": (m, -(-k // (2 * row.products))), "b_scale": (n, -(-k // (2 * row.products)))}
            case |= {name: rng.standard_normal(shape, F) for name, shape in shapes.items()}
    return case
