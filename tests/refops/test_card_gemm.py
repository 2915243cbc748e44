"""Products of quantized tensors on a card: which unit, where scales apply, which copies are read, how it ends."""

from dataclasses import replace

import numpy as np
import pytest
from independent import BF16, FP16, F

import refops
from arrays import assert_same_bits, heavy_tailed
from refops import E2M1, E4M3, E5M2, E8M0, UE5M3
from refops.products import CARDS, matmul, product_of, unit
from refops.rounding import stored
from refops.scalings import NAMED

MX, NV, BLOCK = refops.MXFP8Scaling, refops.NVFP4Scaling, refops.BlockScaling
CURRENT = refops.CurrentScaling(E4M3)
#: layout -> operands a and b, by name, and whether each is transposed for rows that are contracted.
LAYOUTS = {"TN": ("w", "x", False, False), "NN": ("w", "dy", True, False), "NT": ("x", "dy", True, True)}
SHAPES = {"x": (64, 256), "w": (96, 256), "dy": (64, 96)}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

#: Scaling -> (name of the unit, block, promotion) on each card that has a product of two such operands.
PRODUCTS = {
    "current": {"hopper": ("FP8", None, None), "blackwell": ("f8f6f4", None, None)},
    "block-1x128": {"hopper": ("FP8", 128, 128), "blackwell": ("mxf8f6f4", 32, None)},
    "block-128x128": {"hopper": ("FP8", 128, 128), "blackwell": ("mxf8f6f4", 32, None)},
    "e8m0-1x128": {"hopper": ("FP8", 128, 128), "blackwell": ("mxf8f6f4", 32, None)},
    "block-1x64": {"blackwell": ("mxf8f6f4", 32, None)},
    "mxfp8": {"blackwell": ("mxf8f6f4", 32, None)},
    "mxfp4": {"blackwell": ("mxf4", 32, None)},
    "mxfp4-1x16": {"blackwell": ("mxf4", 16, None)},
    "nvfp4-1x16": {"blackwell": ("nvf4", 16, None)},
    "nvfp4-row-scaled": {"blackwell": ("nvf4", 16, None)},
    "nvfp4-ue5m3": {},
    "mxint8": {},
}
HELD = [(name, card) for name, cards in PRODUCTS.items() for card in cards]


def few_bits(shape, seed):
    """A tensor of -1, 0 and 1, times 1 or 2 for each row and each 16 columns: its sums fit in Hopper's 13 bits."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    powers = (
        2.0 ** rng.integers(0, 2, (rows, 1)) * np.repeat(2.0 ** rng.integers(0, 2, -(-columns // 16)), 16)[:columns]
    )
    return (rng.integers(-1, 2, shape) * powers).astype(BF16)


def quantized(scaling, make=few_bits):
    """x, w and dy with both copies."""
    return {
        name: refops.quantize(make(shape, seed=seed), scaling, columnwise=True)
        for seed, (name, shape) in enumerate(SHAPES.items())
    }


def read(q, columnwise):
    """float64 values of the copy that a product reads, contracted dimension last."""
    one = replace(q, rowwise_data=None) if columnwise else q
    values = refops.dequantize(one).astype(np.float64)
    return values.T if columnwise else values


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_a_card_has(name):
    scaling = NAMED[name].scaling
    for card in CARDS:
        if card in PRODUCTS[name]:
            product = product_of(card, scaling, scaling)
            assert (product.unit.card, (product.unit.name, product.block, product.promotion)) == (
                card,
                PRODUCTS[name][card],
            )
        else:
            others = " and ".join(PRODUCTS[name]) or "none of ampere, hopper, blackwell"
            with pytest.raises(ValueError, match=rf"{scaling.fmt!r} (in|with) .*: {others} can; got '{card}'"):
                product_of(card, scaling, scaling)


def test_mixed_products():
    names = {
        (MX(E4M3), MX(E5M2)): "mxf8f6f4",
        (MX(E4M3), refops.MXFP4Scaling()): "mxf8f6f4",
        (refops.MXFP4Scaling(), refops.MXFP4Scaling(block_size=16)): "mxf4",
        (MX(E4M3), BLOCK(E4M3)): "mxf8f6f4",
        (CURRENT, refops.DelayedScaling(E5M2)): "f8f6f4",
        (BF16, BF16): "16 bits",
        (np.float16, FP16): "16 bits",
    }
    for (a, b), name in names.items():
        assert product_of("blackwell", a, b).unit.name == product_of("blackwell", b, a).unit.name == name
    assert product_of("blackwell", refops.MXFP4Scaling(), refops.MXFP4Scaling(block_size=16)).block == 16
    impossible = [
        (MX(E4M3), refops.MXFP4Scaling(block_size=16)),
        (MX(E4M3), CURRENT),
        (refops.MXFP4Scaling(), NV()),
        (BLOCK(E4M3, power_2_scale=False), BLOCK(E4M3)),
        (CURRENT, BF16),
        (FP16, BF16),
        (NV(scale_format=UE5M3), NV()),
    ]
    for a, b in impossible:
        with pytest.raises(ValueError, match=r"card must have a unit that multiplies .* and .*got 'blackwell'"):
            product_of("blackwell", a, b)
    assert product_of("hopper", BLOCK(E4M3, power_2_scale=False), BLOCK(E5M2, 1)).promotion == 128


def test_the_accumulator_is_split_where_it_is_asked_for():
    assert product_of("hopper", CURRENT, CURRENT, use_split_accumulator=True).promotion == 128
    assert product_of("blackwell", CURRENT, CURRENT, use_split_accumulator=True).promotion is None
    assert product_of("hopper", BF16, BF16, use_split_accumulator=True).promotion is None
    for interval, scaling, promotion in ((64, CURRENT, 64), (None, CURRENT, 128), (64, BLOCK(E4M3), 128)):
        split = {"use_split_accumulator": True, "split_interval": interval}
        assert product_of("hopper", scaling, scaling, **split).promotion == promotion
    assert product_of("hopper", CURRENT, CURRENT, split_interval=64).promotion is None
    assert product_of("hopper", CURRENT, CURRENT, accumulator=np.float16).unit.name == "FP8 in float16"
    q = quantized(CURRENT, heavy_tailed)
    once, split = (refops.gemm(q["w"], q["x"], "hopper", use_split_accumulator=flag) for flag in (False, True))
    assert not np.array_equal(once, split)


@every_layout
@pytest.mark.parametrize(("name", "card"), HELD)
def test_exact_sums_are_those_of_the_dequantized_tensors(name, card, layout):
    """Where nothing is cut off, every scale and every copy is the right one, or the sums differ."""
    q = quantized(NAMED[name].scaling)
    a, b, a_transposed, b_transposed = LAYOUTS[layout]
    result = refops.gemm(q[a], q[b], card, layout=layout, out_dtype=np.float32)
    exact = read(q[b], b_transposed) @ read(q[a], a_transposed).T
    if NAMED[name].scaling.layout.two_level or NAMED[name].scaling.layout.block is None:
        # Factors of the tensor: a few roundings on either side, each 2^-24 of the sum of magnitudes.
        magnitudes = np.abs(read(q[b], b_transposed)) @ np.abs(read(q[a], a_transposed)).T
        assert (np.abs(result - exact) <= 8 * 2.0**-24 * magnitudes).all() and np.abs(exact).max() > 1
    else:
        assert_same_bits(result, exact.astype(F) + F(0))
    if q[a].scaling.layout.scale_order == "gemm":
        swizzled = refops.gemm(q[a].swizzled(), q[b].swizzled(), card, layout=layout, out_dtype=np.float32)
        assert_same_bits(swizzled, result)


def test_one_scale_for_the_tensor_multiplies_the_sums():
    """alpha * scale of a * scale of b, then the bias, in float32, and one rounding."""
    x, w = heavy_tailed((33, 160)), heavy_tailed((17, 160), seed=1)
    qx, qw = refops.quantize(x, refops.CurrentScaling(E5M2)), refops.quantize(w, CURRENT)
    bias = np.linspace(-3, 3, 17).astype(BF16)
    sums = matmul(
        E5M2.values[qx.rowwise_data], E4M3.values[qw.rowwise_data], unit("hopper", E4M3), a_format=E5M2, b_format=E4M3
    )
    factor = F(0.3) * qw.rowwise_scale_inv * qx.rowwise_scale_inv
    expected = sums * factor + bias.astype(F)
    result = refops.gemm(qw, qx, "hopper", alpha=0.3, bias=bias)
    assert_same_bits(result, stored(expected, BF16))
    assert_same_bits(refops.gemm(qw, qx, "hopper", alpha=0.3, bias=bias, out_dtype=np.float32), expected)
    # Either copy serves, and leading dimensions stay.
    only = refops.quantize(w, CURRENT, rowwise=False, columnwise=True)
    folded = refops.quantize(x.reshape(3, 11, 160), refops.CurrentScaling(E5M2))
    assert_same_bits(refops.gemm(only, folded, "hopper", alpha=0.3, bias=bias), result.reshape(3, 11, 17))


def test_an_exact_zero_is_positive_and_one_of_rounding_keeps_its_sign():
    q = refops.quantize(np.eye(16, dtype=BF16), refops.DelayedScaling(E4M3))
    result = refops.gemm(q, q, "hopper", alpha=-(2.0**-149), out_dtype=np.float32)
    assert_same_bits(result, np.where(np.eye(16) == 1, F(-(2.0**-149)), F(0)))
    result = refops.gemm(q, q, "hopper", alpha=-(2.0**-126), out_dtype=np.float16)
    assert np.signbit(result[0, 0]) and result[0, 0] == 0 and not np.signbit(result[0, 1])


def test_nvfp4_ends_with_te_s_alpha():
    """alpha * amax of a * amax of b * 1 / (6 * 448 * 6 * 448), from left to right; amaxes of rows, too."""
    x, w = heavy_tailed((32, 128)), heavy_tailed((64, 128), seed=1)
    for settings in ({}, {"row_scaled": True}):
        qx, qw = refops.quantize(x, NV(**settings)), refops.quantize(w, NV(**settings))
        values = [E2M1.values[refops.unpack_fp4(q.rowwise_data)] for q in (qx, qw)]
        scales = [E4M3.values[q.rowwise_scale_inv[: len(one), :8]] for q, one in zip((qx, qw), (x, w), strict=True)]
        row = unit("blackwell", E2M1, scale_format=E4M3)
        sums = matmul(*values, row, a_format=E2M1, b_format=E2M1, a_scale=scales[0], b_scale=scales[1])
        factor = F(0.7) * qw.amax_rowwise[None, :] * qx.amax_rowwise[:, None] * F(1 / (2688 * 2688))
        assert_same_bits(refops.gemm(qw, qx, "blackwell", alpha=0.7, out_dtype=np.float32), sums * factor)


def test_blackwell_reads_blocks_of_128_as_microscaling():
    """The bytes of `block_scales_as_mxfp8`, repeated for each 32 elements."""
    x, w = heavy_tailed((8, 256)), heavy_tailed((136, 256), seed=1)
    qx, qw = refops.quantize(x, BLOCK(E4M3, 1)), refops.quantize(w, BLOCK(E4M3, 2))
    scales = [E8M0.values[refops.unswizzle(refops.block_scales_as_mxfp8(q)[0])] for q in (qx, qw)]
    row = unit("blackwell", E4M3, scale_format=E8M0)
    sums = matmul(
        E4M3.values[qx.rowwise_data],
        E4M3.values[qw.rowwise_data],
        row,
        a_format=E4M3,
        b_format=E4M3,
        a_scale=scales[0][:8, :8],
        b_scale=scales[1][:136, :8],
    )
    assert_same_bits(refops.gemm(qw, qx, "blackwell", out_dtype=np.float32), sums)


def test_a_sign_bit_of_a_ue4m3_scale_is_ignored():
    q = refops.quantize(heavy_tailed((16, 64)), NV())
    signed = replace(q, rowwise_scale_inv=q.rowwise_scale_inv | np.uint8(0x80))
    assert_same_bits(refops.gemm(signed, signed, "blackwell"), refops.gemm(q, q, "blackwell"))


@every_layout
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_plain_operands_go_to_the_unit_of_16_bits(dtype, layout):
    tensors = {name: few_bits(shape, seed).astype(dtype) for seed, (name, shape) in enumerate(SHAPES.items())}
    a, b, a_transposed, b_transposed = LAYOUTS[layout]
    left, right = tensors[b].astype(F), tensors[a].astype(F)
    exact = (left.T if b_transposed else left) @ (right.T if a_transposed else right).T
    for card in CARDS:
        assert_same_bits(refops.gemm(tensors[a], tensors[b], card, layout=layout, out_dtype=np.float32), exact + F(0))
    assert refops.gemm(tensors[a], tensors[b], "ampere", layout=layout).dtype == dtype


def test_another_matmul_gets_the_same_arguments():
    q = quantized(BLOCK(E4M3, 1), heavy_tailed)
    seen = []

    def spy(*operands, **options):
        seen.append((operands, options))
        return matmul(*operands, **options)

    assert_same_bits(refops.gemm(q["w"], q["x"], "hopper", matmul=spy), refops.gemm(q["w"], q["x"], "hopper"))
    ((left, right, row), options) = seen[0]
    assert left.shape == (64, 256) and right.shape == (96, 256) and row is unit("hopper", E4M3)
    assert options["promotion"] == 128 and options["a_scale"].shape == (64, 2)


X = refops.quantize(np.ones((32, 64), F), CURRENT)
RHT = refops.quantize(np.ones((32, 64), BF16), NV(rht=True), columnwise=True)
PLAIN = np.ones((32, 64), BF16)
WRONG = [
    (
        lambda: refops.gemm(X, X, "volta"),
        ValueError,
        "card must be one of 'ampere', 'hopper', 'blackwell'; got 'volta'",
    ),
    (lambda: refops.gemm(X, X, "hopper", layout="TT"), ValueError, "layout must be one of 'TN', 'NN', 'NT'; got 'TT'"),
    (
        lambda: refops.gemm(X, X, "hopper", layout="NN"),
        ValueError,
        r"a of shape \(32, 64\).*layout 'NN'; got 32 and 64",
    ),
    (lambda: refops.gemm(X, X, "ampere"), ValueError, "E4M3 with one scale.*: hopper and blackwell can; got 'ampere'"),
    (lambda: refops.gemm(X, PLAIN, "hopper"), ValueError, "E4M3 with one scale and bfloat16.*none of"),
    (
        lambda: refops.gemm(X, PLAIN.astype(F), "hopper"),
        TypeError,
        "b must be a Quantized, float16 or bfloat16.*float32",
    ),
    (lambda: refops.gemm(X, 3, "hopper"), TypeError, "b must be float32, float16 or bfloat16; got int"),
    (lambda: refops.gemm(X, X, "hopper", out_dtype="int8"), TypeError, "out_dtype must be .*; got 'int8'"),
    (lambda: refops.gemm(X, X, "hopper", bias=np.ones(3, F)), ValueError, r"bias must have shape \(32,\); got \(3,\)"),
    (
        lambda: refops.gemm(X, X, "hopper", matmul=None),
        TypeError,
        "matmul must be a function such as .*; got None",
    ),
    (lambda: refops.gemm(X, X, "hopper", alpha=np.inf), ValueError, "alpha must be a finite float32.*; got inf"),
    (lambda: refops.gemm(X, X, "hopper", use_split_accumulator=1), TypeError, "use_split_accumulator must be True or"),
    (
        lambda: refops.gemm(X, X, "hopper", use_split_accumulator=True, split_interval=48),
        ValueError,
        "split_interval must be a multiple of 32, .*; got 48",
    ),
    (lambda: refops.gemm(X, X, "hopper", accumulator="int8"), TypeError, "accumulator must be float32 or float16; got"),
    (
        lambda: refops.gemm(refops.quantize(PLAIN, NV()), refops.quantize(PLAIN, NV()), "blackwell", layout="NT"),
        ValueError,
        "a must hold a columnwise copy for this product; got Quantized",
    ),
    (
        lambda: refops.gemm(RHT, replace(RHT, scaling=NV()), "blackwell", layout="NT"),
        ValueError,
        "sign masks 55272 and No",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_both_transformed_operands_give_the_product_of_the_tensors():
    """The Hadamard transform along what is contracted cancels."""
    x, dy = heavy_tailed((64, 32)), heavy_tailed((64, 48), seed=1)
    q = [refops.quantize(tensor, NV(rht=True), columnwise=True) for tensor in (x, dy)]
    result = refops.gemm(*q, "blackwell", layout="NT", out_dtype=np.float32)
    exact = read(q[1], True) @ read(q[0], True).T
    magnitudes = np.linalg.norm(read(q[1], True), axis=1)[:, None] * np.linalg.norm(read(q[0], True), axis=1)
    assert (np.abs(result - exact) <= 16 * 2.0**-23 * magnitudes).all()
