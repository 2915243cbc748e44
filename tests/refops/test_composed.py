"""Fused operations against compositions written by hand from the rules of the specification.

Sections are those of docs/spec/quantization.md, mostly 8.2 to 8.4; "activations spec" is docs/spec/activations.md.
"""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from independent import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    SCALINGS,
    TRACKED,
    F,
    Tracked,
    bits,
    expect,
    random_tensor,
    rule_of,
    special_tensor,
)

import refops
from arrays import assert_same_bits, assert_same_quantized, assert_same_values
from refops.activations import REFERENCE, bind_activation
from refops.files import open_tensors
from refops.oracle.interval import are_roundings
from refops.quantization import quantize
from refops.scalings import UNFUSED
from tiers import sampled

with open_tensors(Path(__file__).resolve().parent.parent / "data" / "minilm_ffn.safetensors") as tensors:
    REAL = {tensor.name: tensor.load()[0] for tensor in tensors}

UNARY = [name for name, row in refops.ACTIVATIONS.items() if not row.gated]
GATED = [name for name, row in refops.ACTIVATIONS.items() if row.gated]
#: For the rows that have parameters, others than TE's defaults.
PARAMETERS = {
    name: {p: 0.3 * refops.DEFAULT_PARAMETERS[p] for p in row.parameters}
    for name, row in refops.ACTIVATIONS.items()
    if row.parameters
}


def column_sum(values):
    """Rows added in order within chunks of 128, the chunks in order, all in float32 (activations spec 1.9)."""
    total = np.zeros(values.shape[-1], F)
    matrix = values.reshape(-1, values.shape[-1])
    for start in range(0, len(matrix), 128):
        chunk = np.zeros_like(total)
        for row in matrix[start : start + 128]:
            chunk = chunk + row
        total = total + chunk
    return total


def forward_f32(name, x):
    """Unrounded float32 activation."""
    act = x.astype(F)
    bound = bind_activation(name, PARAMETERS.get(name, {}))
    if not bound.gated:
        return bound.value(act)
    h = x.shape[-1] // 2
    with np.errstate(all="ignore"):
        return bound.value(act[..., :h]) * bound.gate(act[..., h:])


def backward_f32(name, dy, x):
    """Unrounded float32 gradient, [d_act | d_gate] for gated ones, products in the order of activations spec 1.6."""
    bound = bind_activation(name, PARAMETERS.get(name, {}))
    g, x = dy.astype(F), x.astype(F)
    with np.errstate(all="ignore"):
        if not bound.gated:
            return bound.derivative(x) * g
        h = x.shape[-1] // 2
        act, gate = x[..., :h], x[..., h:]
        d_act = (bound.derivative(act) * g) * bound.gate(gate)
        d_gate = (bound.gate_slope(gate) * g) * bound.value(act)
    return np.concatenate([d_act, d_gate], axis=-1)


def compose(f, scaling, dtype, rule):
    """Quantize float32 `f` by a rule; returns (expected result, dbias)."""
    cast, amax, dbias = rule
    with np.errstate(all="ignore"):
        values = {"unrounded": f, "rounded": f.astype(dtype).astype(F)}
        summed = column_sum(values[dbias]).astype(dtype)
        return expect(values[cast], scaling, dtype, amax_values=values[amax]), summed


@sampled(("scaling_name", "name", "dtype"), product(SCALINGS, refops.ACTIVATIONS, DTYPES.values()), 7)
def test_composed_operations_follow_the_rule_table(scaling_name, name, dtype):
    """Forward and backward, both directions, ordinary and special values: bit for bit."""
    scaling, rule = SCALINGS[scaling_name], rule_of(scaling_name)
    shape = (160, 64)
    width = 2 * shape[1] if name in GATED else shape[1]
    extremes = "rht" not in scaling_name
    make = special_tensor if extremes else random_tensor
    dy, x = make(shape, dtype, 41), make((shape[0], width), dtype, 42)
    parameters = PARAMETERS.get(name, {})
    expected, _ = compose(forward_f32(name, x), scaling, dtype, rule)
    assert_same_quantized(
        refops.activation_quantize(name, x, scaling, columnwise=True, **parameters), expected, f"{name} forward"
    )
    expected, expected_dbias = compose(backward_f32(name, dy, x), scaling, dtype, rule)
    q, dbias = refops.activation_grad_quantize(name, dy, x, scaling, columnwise=True, dbias=True, **parameters)
    assert_same_quantized(q, expected, f"{name} backward")
    assert_same_values(dbias, expected_dbias, "dbias")
    alone = refops.activation_grad_quantize(name, dy, x, scaling, **parameters)
    assert_same_bits(alone.rowwise_data, q.rowwise_data)
    assert alone.columnwise_data is None
    assert (q.shape, q.dtype) == (x.shape, dtype)


@sampled("scaling_name", SCALINGS, 2, in_all=1)
def test_real_tensors(scaling_name):
    """A real model's activations and gradients, quantized and composed with GELU: as the second implementation."""
    scaling, rule = SCALINGS[scaling_name], rule_of(scaling_name)
    x, dy = (REAL[f"layer0.ffn.{name}"][:64, :512] for name in ("pre_activation", "grad_activation"))
    assert x.dtype == dy.dtype == BF16
    for values in (x, dy, REAL["layer3.ffn.down.weight"][:64]):
        assert_same_quantized(
            refops.quantize(values, scaling, columnwise=True), expect(values.astype(F), scaling, BF16)
        )
    expected, _ = compose(forward_f32("gelu", x), scaling, BF16, rule)
    assert_same_quantized(refops.activation_quantize("gelu", x, scaling, columnwise=True), expected)
    expected, expected_dbias = compose(backward_f32("gelu", dy, x), scaling, BF16, rule)
    q, dbias = refops.activation_grad_quantize("gelu", dy, x, scaling, columnwise=True, dbias=True)
    assert_same_quantized(q, expected)
    assert_same_values(dbias, expected_dbias, "dbias")


#: A fault put into the code, and a scaling under which the second implementation must notice it.
FAULTS = {
    "delayed path": (refops.DelayedScaling, "path", lambda path: refops.MXFP8Scaling.path, "delayed"),
    "mxfp8 path": (refops.MXFP8Scaling, "path", lambda path: refops.DelayedScaling.path, "mxfp8"),
    "current path": (refops.CurrentScaling, "path", lambda path: UNFUSED, "current"),
    "nvfp4 path": (refops.NVFP4Scaling, "path", lambda path: UNFUSED, "nvfp4"),
    "philox bytes": (quantize, "philox_bytes", lambda f: lambda *a: f(*a)[:, ::-1], "nvfp4-sr"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_second_implementation_notices_a_fault(fault, monkeypatch):
    module, attribute, make_faulty, scaling_name = FAULTS[fault]
    monkeypatch.setattr(module, attribute, make_faulty(getattr(module, attribute)))
    with pytest.raises(AssertionError):
        test_real_tensors(scaling_name)


def test_paths_really_differ():
    """Section 8.2: silu(3.875) in bf16. f32 3.7962122, rounded 3.796875; the scales follow the amax rule."""
    x = np.array([[3.875]], BF16)
    f = refops.activation("silu", x, out_dtype=FP32)
    y = refops.activation("silu", x)
    assert float(f[0, 0]) == pytest.approx(3.7962122, abs=3e-7) and float(y[0, 0]) == 3.796875
    scaling = refops.CurrentScaling(refops.E4M3)
    fused, unfused = refops.activation_quantize("silu", x, scaling), refops.quantize(y, scaling)
    assert fused.rowwise_data.tolist() == unfused.rowwise_data.tolist() == [[0x7E]]
    assert_same_bits(fused.amax_rowwise, f[0])
    assert float(1 / fused.rowwise_scale_inv[0]) == pytest.approx(118.01237, rel=1e-6)
    assert float(1 / unfused.rowwise_scale_inv[0]) == pytest.approx(117.99177, rel=1e-6)
    assert bits(fused.rowwise_scale_inv) != bits(unfused.rowwise_scale_inv)


@pytest.mark.parametrize("scaling_name", ["delayed", "current", "nvfp4"])
def test_fused_differs_from_unfused(scaling_name):
    """The rounding that these paths leave out or move shows in the codes or scales."""
    x = np.linspace(-2, 2, 256 * 16).astype(BF16).reshape(16, 256)  # where silu needs all its bits, the maximum too
    scaling = SCALINGS[scaling_name]
    fused, unfused = (
        refops.activation_quantize("gelu", x, scaling),
        refops.quantize(refops.activation("gelu", x), scaling),
    )
    same = all(
        np.array_equal(getattr(fused, n), getattr(unfused, n))
        for n in ("rowwise_data", "rowwise_scale_inv", "amax_rowwise")
    )
    assert not same


@pytest.mark.parametrize(
    "scaling_name", ["mxfp8", "mxfp8-2d", "mxfp6-e3m2", "block-1d", "block-2d", "nvfp4-rht", "nvfp4-row"]
)
def test_rounding_paths_equal_two_steps(scaling_name):
    """Where f is rounded before everything, one composed call equals activation then quantize (and float32: always)."""
    x, dy = random_tensor((256, 256), BF16, 7), random_tensor((256, 256), BF16, 8)
    scaling = SCALINGS[scaling_name]
    assert_same_quantized(
        refops.activation_quantize("gelu", x, scaling, columnwise=True),
        refops.quantize(refops.activation("gelu", x), scaling, columnwise=True),
    )
    assert_same_quantized(
        refops.activation_grad_quantize("gelu", dy, x, scaling, columnwise=True),
        refops.quantize(refops.activation_grad("gelu", dy, x), scaling, columnwise=True),
    )


@pytest.mark.parametrize("scaling_name", SCALINGS)
def test_float32_paths_are_all_the_same(scaling_name):
    """A float32 input has nothing to round: composed equals two steps under every scaling."""
    x, dy = random_tensor((64, 128), FP32, 7), random_tensor((64, 64), FP32, 8)
    scaling = SCALINGS[scaling_name]
    assert_same_quantized(
        refops.activation_quantize("swiglu", x, scaling, columnwise=True),
        refops.quantize(refops.activation("swiglu", x), scaling, columnwise=True),
    )
    q, dbias = refops.activation_grad_quantize("swiglu", dy, x, scaling, columnwise=True, dbias=True)
    dx, unfused_dbias = refops.activation_grad("swiglu", dy, x, dbias=True)
    assert_same_quantized(q, refops.quantize(dx, scaling, columnwise=True))
    assert_same_bits(dbias, unfused_dbias)


@pytest.mark.parametrize("scaling_name", ["current", "nvfp4", "block-1d", "mxfp8", "delayed"])
def test_fp16_overflow_between_amax_and_cast(scaling_name):
    """A product beyond 65504 is finite in float32 and inf once rounded to fp16: it saturates, and no NaN appears."""
    x = np.zeros((32, 64), FP16)
    x[:, :32], x[:, 32:] = 300.0, 1.0
    x[0, 0], x[0, 32] = 60000.0, 1000.0  # swiglu: 6e7
    scaling = SCALINGS[scaling_name]
    q = refops.activation_quantize("swiglu", x, scaling, columnwise=True)
    expected, _ = compose(forward_f32("swiglu", x), scaling, FP16, rule_of(scaling_name))
    assert_same_quantized(q, expected)
    assert not np.isnan(refops.dequantize(q)).any()
    if scaling_name in ("current", "nvfp4"):
        assert q.amax_rowwise[0] == F(6e7)  # of the unrounded value, not inf


# --- dbias ------------------------------------------------------------------------------------------


def test_dbias_rounded_and_unrounded_sums_differ():
    """201 equal gradients that bf16 rounds all the same way: the rounded sum is off by 201 such errors."""
    x, dy = np.ones((201, 64), BF16), np.tile(np.linspace(1, 2, 64).astype(BF16), (201, 1))
    unrounded = backward_f32("silu", dy, x)
    rounded = unrounded.astype(BF16).astype(F)
    assert (unrounded != rounded).any()
    _, fused = refops.activation_grad_quantize("silu", dy, x, SCALINGS["mxfp8"], dbias=True)
    _, unfused = refops.activation_grad_quantize("silu", dy, x, SCALINGS["current"], dbias=True)
    assert_same_bits(fused, column_sum(unrounded).astype(BF16))
    assert_same_bits(unfused, column_sum(rounded).astype(BF16))
    assert not np.array_equal(fused, unfused)


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 700])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dbias_order(rows, dtype):
    """Chunks of 128 rows, in order, to the bit; within the bound of any order from the float64 sum.

    Sums of n terms in float32 err by at most (n - 1) 2^-24 sum |x| (source: `refops.oracle.enclosure`), and what is
    stored is the rounding of a number within that bound.
    """
    x = random_tensor((rows, 48), dtype, 9)
    _, dbias = refops.quantize(x, SCALINGS["mxfp8"], dbias=True)
    assert_same_bits(dbias, column_sum(x.astype(F)).astype(dtype))
    exact = x.astype(np.float64).sum(axis=0)
    magnitude = np.abs(x.astype(np.float64)).sum(axis=0)
    bound = max(rows - 1, 0) * 2.0**-24 * magnitude
    assert are_roundings(dbias, exact - bound, exact + bound).all()


def test_dbias_cast_once_to_the_gradient_dtype():
    """`activation_grad(out_dtype=float32, dbias=True)` sums float32 gradients and casts the sum to the dtype of dy."""
    dy, x = random_tensor((200, 32), BF16, 1), random_tensor((200, 32), BF16, 2)
    dx, dbias = refops.activation_grad("gelu", dy, x, out_dtype=FP32, dbias=True)
    assert_same_bits(dbias, column_sum(dx).astype(BF16))
    dx, dbias = refops.activation_grad("gelu", dy, x, dbias=True)
    assert_same_bits(dbias, column_sum(dx.astype(F)).astype(BF16))


# --- layout of gated gradients ----------------------------------------------------------------------


@pytest.mark.parametrize("name", GATED)
def test_gated_layout(name):
    """First half activated, second half gate; the gradient comes back as [d_act | d_gate]."""
    h = 96
    act, gate = random_tensor((3, 5, h), BF16, 1), random_tensor((3, 5, h), BF16, 2)
    dy = random_tensor((3, 5, h), BF16, 3)
    x = np.concatenate([act, gate], axis=-1)
    bound = bind_activation(name, {})
    y = refops.activation(name, x)
    assert_same_bits(y, (bound.value(act.astype(F)) * bound.gate(gate.astype(F))).astype(BF16))
    dx = refops.activation_grad(name, dy, x)
    assert_same_bits(dx, backward_f32_default(name, dy, x).astype(BF16))
    # The two halves do not mix: another gate changes d_gate only where d_act says it must.
    other = refops.activation_grad(name, dy, np.concatenate([act, np.zeros_like(gate)], axis=-1))
    if refops.ACTIVATIONS[name].gate == refops.ACTIVATIONS["glu"].gate:  # the identity
        assert not other[..., :h].astype(F).any()
        assert_same_bits(other[..., h:], dx[..., h:])


def backward_f32_default(name, dy, x):
    """`backward_f32` with default parameters."""
    bound = bind_activation(name, {})
    h = x.shape[-1] // 2
    d_act, d_gate = bound.backward(dy.astype(F), x[..., :h].astype(F), x[..., h:].astype(F))
    return np.concatenate([d_act, d_gate], axis=-1)


@pytest.mark.parametrize("scaling_name", ["mxfp8", "mxfp8-e5m2"])
def test_gated_mxfp8_halves_are_separate_block_regions(scaling_name):
    """Section 8.3: with H % 32 == 0 the halves' scales stand side by side, as if each had been quantized alone."""
    dy, x = random_tensor((64, 96), BF16, 3), random_tensor((64, 192), BF16, 4)
    scaling = SCALINGS[scaling_name]
    q = refops.activation_grad_quantize("swiglu", dy, x, scaling, columnwise=True)
    dx = refops.activation_grad("swiglu", dy, x)
    for half, blocks, columns in ((dx[:, :96], slice(0, 3), slice(0, 96)), (dx[:, 96:], slice(3, 6), slice(96, 192))):
        alone = refops.quantize(half, scaling, columnwise=True)
        assert np.array_equal(q.rowwise_data[:, columns], alone.rowwise_data)
        assert np.array_equal(q.rowwise_scale_inv[:64, blocks], alone.rowwise_scale_inv[:64, :3])
        assert np.array_equal(q.columnwise_scale_inv[:2, columns], alone.columnwise_scale_inv[:2, :96])


# --- scaled activations -----------------------------------------------------------------------------


def deinterleave(x, g):
    """Rows [act 0:g | gate 0:g | act g:2g | ...] -> [act | gate]."""
    blocks = x.reshape(*x.shape[:-1], -1, 2, g)
    return np.concatenate(
        [blocks[..., 0, :].reshape(*x.shape[:-1], -1), blocks[..., 1, :].reshape(*x.shape[:-1], -1)], -1
    )


def interleave(x, g):
    """Undo `deinterleave`."""
    h = x.shape[-1] // 2
    act, gate = (part.reshape(*x.shape[:-1], h // g, g) for part in (x[..., :h], x[..., h:]))
    return np.stack([act, gate], axis=-2).reshape(x.shape)


@pytest.mark.parametrize("name", ["swiglu", "situglu", "clamped_swiglu"])
@pytest.mark.parametrize("g", [32, 64, 192])
def test_interleaved_equals_deinterleaving_by_hand(name, g):
    """Forward, gradient of x and gradient of the scales."""
    x, dy = special_tensor((70, 384), BF16, 5), special_tensor((70, 192), BF16, 6)
    scales = random_tensor((70,), FP32, 7)
    assert_same_bits(interleave(deinterleave(x, g), g), x)
    plain = deinterleave(x, g)
    assert_same_values(
        refops.scaled_activation(name, x, scales, glu_interleave_size=g), refops.scaled_activation(name, plain, scales)
    )
    dx, dscales = refops.scaled_activation_grad(name, dy, x, scales, glu_interleave_size=g)
    plain_dx, plain_dscales = refops.scaled_activation_grad(name, dy, plain, scales)
    assert_same_values(dx, interleave(plain_dx, g))
    assert_same_values(dscales, plain_dscales)


@pytest.mark.parametrize("name", refops.SCALED_ACTIVATIONS)
@pytest.mark.parametrize("scales_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_scaled_forward(name, dtype, scales_dtype):
    """(act * gate) * scale in float32, one rounding; the scales' dtype is their own (activations spec 1.6 i)."""
    h = 40
    x = special_tensor((30, 2 * h if name in GATED else h), dtype, 5)
    scales = random_tensor((5, 6), scales_dtype, 6)
    f = forward_f32(name, x)
    with np.errstate(all="ignore"):
        expected = (f * scales.reshape(30, 1).astype(F)).astype(dtype)
    parameters = PARAMETERS.get(name, {})
    assert_same_values(refops.scaled_activation(name, x, scales, **parameters), expected)
    y = refops.scaled_activation(name, x.reshape(5, 6, -1), scales, out_dtype=FP32, **parameters)
    with np.errstate(all="ignore"):
        assert_same_values(y, (f * scales.reshape(30, 1).astype(F)).reshape(5, 6, h))


def scaled_gradients(name, parameters, g, scales, act, gate=None, arithmetic=REFERENCE):
    """Activations spec 1.6 (i): (dx,) or (d_act, d_gate), and the terms of the scales' gradient; g is dy.

    The fused forms of dsilu; a clamped gate mask that lets NaN pass. float32 arrays, or `Tracked` numbers.
    """
    bound = bind_activation(name, parameters).using(arithmetic)
    one, sg = F(1), g * scales
    if gate is None:
        return (sg * bound.derivative(act),), g * bound.value(act)
    slope = bound.gate_slope(gate)
    sigmoid = bind_activation("glu", {}).using(arithmetic).value
    if name == "swiglu":
        s = sigmoid(act)
        value, derivative = act * s, s + (act * s) * (one - s)
    elif name == "clamped_swiglu":
        limit, alpha = F(bound.parameters["limit"]), F(bound.parameters["alpha"])
        c = np.where(act <= limit, act, limit)
        s = sigmoid(alpha * c)
        value = c * s
        derivative = np.where(act <= limit, s + ((alpha * c) * s) * (one - s), F(0))
        slope = np.where((gate > limit) | (gate < -limit), F(0), one)  # NaN passes
    else:
        value, derivative = bound.value(act), bound.derivative(act)
    dx = sg * (derivative * bound.gate(gate)), sg * (value * slope)
    return dx, g * (bound.value(act) * bound.gate(gate))


def halves(x, h):
    """(act, gate) of rows of width 2h, (x,) of rows of width h."""
    return (x[:, :h], x[:, h:]) if x.shape[1] == 2 * h else (x,)


def chunked_sum(terms):
    """float32 terms added in order within chunks of 128, the chunks in order."""
    total = F(0)
    for start in range(0, len(terms), 128):
        chunk = F(0)
        for term in terms[start : start + 128]:
            chunk = chunk + term
        total = total + chunk
    return total


@pytest.mark.parametrize("name", refops.SCALED_ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("scales_dtype", [FP32, BF16], ids=str)
def test_scaled_backward_bits(name, dtype, scales_dtype):
    """dx and the scales' gradient, which float32 scales leave unrounded; each has the dtype of what it belongs to."""
    h, parameters = 300, PARAMETERS.get(name, {})
    x, dy = special_tensor((30, 2 * h if name in GATED else h), dtype, 5), special_tensor((30, h), FP16, 6)
    x[:8], dy[:8] = random_tensor((8, x.shape[1]), dtype, 8), random_tensor((8, h), FP16, 9)  # rows without NaN
    scales = random_tensor((30,), scales_dtype, 7)
    dx, dscales = refops.scaled_activation_grad(name, dy, x, scales, **parameters)
    with np.errstate(all="ignore"):
        expected, terms = scaled_gradients(
            name, parameters, dy.astype(F), scales.astype(F)[:, None], *halves(x.astype(F), h)
        )
        assert_same_values(dx, np.concatenate(expected, axis=1).astype(dtype))
        assert_same_values(dscales, chunked_sum(terms.T).astype(scales_dtype))
    assert np.isfinite(dscales[:8].astype(F)).all()


def test_scaled_clamped_nan_gate_passes_its_gradient():
    """The scaled kernels' mask is `not outside`; the plain kernel's is `inside` (activations spec 6.5)."""
    x = np.array([[1.0, np.nan]], F)
    dy, scales = np.ones((1, 1), F), np.ones(1, F)
    scaled, _ = refops.scaled_activation_grad("clamped_swiglu", dy, x, scales)
    plain = refops.activation_grad("clamped_swiglu", dy, x)
    assert scaled[0, 1] == refops.activation("qgelu", np.ones(1, F))[0]
    assert plain[0, 1] == 0


@pytest.mark.parametrize("name", refops.SCALED_ACTIVATIONS)
def test_scaled_gradients_against_float64(name):
    """dx and the scales' gradient against the truth.

    Bound of an element: the roundings of the kernel's own operations, carried through them (`Tracked`). Of a scale's
    gradient: independent errors within b, one a term and 2^-24 of each partial sum, add up to more than
    5 sqrt(sum b^2) with a probability of 2 e^-12.5 (Hoeffding).
    """
    h, rows = 200, 64
    x = random_tensor((rows, 2 * h if name in GATED else h), FP32, 5, spread=1)
    dy, scales = random_tensor((rows, h), FP32, 6, spread=1), random_tensor((rows,), FP32, 7, spread=1)
    dx, dscales = refops.scaled_activation_grad(name, dy, x, scales)
    bound = bind_activation(name, {})
    parts = halves(x, h)
    with np.errstate(all="ignore"):
        tracked = [Tracked(part) for part in (dy, scales[:, None], *parts)]
        gradients, terms = scaled_gradients(name, {}, *tracked, arithmetic=TRACKED)
    parts, dy, scales = [p.astype(np.float64) for p in parts], dy.astype(np.float64), scales.astype(np.float64)
    truths = bound.truth_grad(dy * scales[:, None], *parts)
    for ours, tracked, truth in zip(halves(dx, h), gradients, truths if bound.gated else [truths], strict=True):
        error = np.abs(ours - truth)
        assert (error <= tracked.error).all()
        assert (error > tracked.error / 16).any()  # the bound is not idle
    partial_sums = [np.cumsum(terms.value[:, chunk], axis=1) for chunk in (slice(0, 128), slice(128, None))]
    errors = np.concatenate([terms.error, 2.0**-24 * np.concatenate(partial_sums, axis=1)], axis=1)
    limit = 5 * np.sqrt((errors**2).sum(axis=1))
    error = np.abs(dscales - (dy * bound.truth(*parts)).sum(axis=1))
    assert (error <= limit).all()
    assert (error > limit / 16).any()


def test_zero_rows():
    """No rows: empty gradients, a zero dbias, scales of zero rows."""
    x, dy = np.zeros((0, 64), BF16), np.zeros((0, 32), BF16)
    dx, dscales = refops.scaled_activation_grad("swiglu", dy, x, np.zeros((0,), F))
    assert dx.shape == (0, 64) and dscales.shape == (0,)
    q, dbias = refops.activation_grad_quantize("swiglu", dy, x, SCALINGS["mxfp8"], dbias=True)
    assert q.shape == (0, 64)
    assert_same_bits(dbias, np.zeros(64, BF16))
