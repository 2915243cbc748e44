"""`cuda_kernels.host` against `refops`: the same bits where arithmetic is exact, inside the enclosure elsewhere."""

import threading

import ml_dtypes
import numpy as np
import pytest

import refops
from cuda_kernels import host
from refops import oracle
from refops.oracle.operation import OPERATIONS
from refops.survey import SCALINGS

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(F), np.dtype(np.float16), BF16]
E4M3, E5M2 = refops.E4M3, refops.E5M2
MXFP8 = refops.MXFP8Scaling(E4M3)
ALL_SCALINGS = {name: row.scaling for name, row in SCALINGS.items()} | {
    "block-1x128-f32": refops.BlockScaling(E4M3, 1, power_2_scale=False, amax_epsilon=1e-3),
    "block-128x128-f32-e5m2": refops.BlockScaling(E5M2, 2, power_2_scale=False),
    "mxfp8-2d": refops.MXFP8Scaling(E4M3, two_d=True),
    "mxfp8-even": refops.MXFP8Scaling(E4M3, scale_rounding="even"),
    "mxfp8-floor": refops.MXFP8Scaling(E5M2, scale_rounding="floor"),
    "mxfp8-ceil": refops.MXFP8Scaling(E5M2, scale_rounding="ceil_ocp"),
    "mxfp6-e3m2": refops.MXFP8Scaling(refops.E3M2),
    "mxfp6-e2m3-2d": refops.MXFP8Scaling(refops.E2M3, two_d=True),
    "nvfp4-mse": refops.NVFP4Scaling(four_over_six="mse"),
    "nvfp4-mse-2d": refops.NVFP4Scaling(four_over_six="mse", e4m3_max=256, two_d=True),
    "nvfp4-sr-2d": refops.NVFP4Scaling(stochastic_rounding=True, two_d=True, seed=7),
    "nvfp4-sr": refops.NVFP4Scaling(stochastic_rounding=True, seed=7, offset=1 << 40),
}
ARRAYS = [f"{d}_{kind}" for d in ("rowwise", "columnwise") for kind in ("data", "scale_inv")]
ARRAYS += ["amax_rowwise", "amax_columnwise"]
#: M and K that every scaling takes, and ragged ones.
ALIGNED, RAGGED = [(96, 160), (160, 1312), (0, 64)], [(3, 5), (130, 1070), (1, 8200), (33, 1), (7,), (2, 3, 40), (4, 0)]


def tensor(shape, dtype=BF16, seed=0):
    """Heavy-tailed values with zeros of both signs, huge and tiny ones, NaN and infinities."""
    x = np.random.default_rng(seed).standard_t(2, shape).astype(F)
    flat = x.reshape(-1)
    flat[::97], flat[5::211] = 0, -0.0
    for start, value in ((300, 1e-42), (901, 3e38), (1502, -1e-30), (2203, np.nan), (4604, np.inf), (4705, -np.inf)):
        flat[start::9001] = value
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same(mine, reference):
    for name in ARRAYS:
        a, b = getattr(mine, name), getattr(reference, name)
        assert (a is None) == (b is None), name
        assert a is None or same_bits(a, b), name


def takes(scaling, shape, columnwise):
    """Whether the scaling allows this."""
    if not isinstance(scaling, refops.NVFP4Scaling):
        return True
    m = int(np.prod(shape[:-1]))
    return m % 32 == 0 == shape[-1] % 32 and not (scaling.row_scaled and scaling.four_over_six and columnwise)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL_SCALINGS)
def test_quantize_and_dequantize_have_the_reference_s_bits(name, dtype):
    scaling = ALL_SCALINGS[name]
    if getattr(scaling, "rht", False):
        pytest.skip("sums in another order: judged by the oracle below")
    for shape in ALIGNED + RAGGED:
        for rowwise, columnwise in ((True, False), (False, True), (True, True)):
            if not takes(scaling, shape, columnwise):
                continue
            x, options = tensor(shape, dtype), {"rowwise": rowwise, "columnwise": columnwise}
            mine, dbias = host.quantize(x, scaling, dbias=True, **options)
            reference, reference_dbias = refops.quantize(x, scaling, dbias=True, **options)
            assert_same(mine, reference)
            assert same_bits(dbias, reference_dbias)
            assert same_bits(host.dequantize(reference), refops.dequantize(reference))


def outputs_of(op, scaling, dtype, shape, columnwise):
    """(inputs, what host writes) of an operation of the oracle."""
    operation = OPERATIONS[op]
    gated = refops.ACTIVATIONS[operation.activation].gated
    x, dy = tensor((shape[0], shape[1] * (1 + gated)), dtype), tensor(shape, dtype, seed=1)
    if "dy" in operation.inputs:
        q, _ = host.activation_grad_quantize(operation.activation, dy, x, scaling, columnwise=columnwise, dbias=True)
        return {"x": x, "dy": dy}, {n: getattr(q, n) for n in ARRAYS if getattr(q, n) is not None}
    q = host.activation_quantize(operation.activation, x, scaling, columnwise=columnwise)
    return {"x": x}, {n: getattr(q, n) for n in ARRAYS if getattr(q, n) is not None}


@pytest.mark.parametrize("name", ALL_SCALINGS)
@pytest.mark.parametrize("op", ["silu", "swiglu", "dgelu", "dswiglu"])
def test_fused_activations_lie_in_the_enclosure(op, name):
    scaling = ALL_SCALINGS[name]
    inputs, outputs = outputs_of(op, scaling, BF16, (96, 160), takes(scaling, (96, 160), True))
    report = oracle.check(op, inputs, outputs, scaling=scaling, diagnose=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("activation", refops.ACTIVATIONS)
def test_activations_and_gradients_lie_in_the_enclosure(activation):
    gated = refops.ACTIVATIONS[activation].gated
    for dtype in DTYPES:
        x, dy = tensor((37, 140 * (1 + gated)), dtype), tensor((37, 140), dtype, seed=1)
        report = oracle.check(activation, x, host.activation(activation, x), diagnose=False)
        assert report.ok, str(report)
        dx = host.activation_grad(activation, dy, x)
        report = oracle.check(f"d{activation}", {"x": x, "dy": dy}, dx, diagnose=False)
        assert report.ok, str(report)


@pytest.mark.parametrize("fmt", [E4M3, refops.E2M1, refops.E8M0], ids=str)
@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic"])
def test_encode_and_decode_have_the_reference_s_bits(fmt, rounding):
    if rounding == "stochastic" and not fmt.has_subnormals:
        pytest.skip("E8M0 has no zero")
    every = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    bits = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8) if rounding == "stochastic" else None
    options = {"rounding": rounding, "saturate": fmt != E4M3, "random_bits": bits}  # each combination is compiled
    with np.errstate(all="ignore"):
        inputs = (every.astype(F), every.astype(F) * F(1 + 2.0**-20))
    for x in inputs:
        assert same_bits(host.encode(x, fmt, **options), refops.encode(x, fmt, **options))
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    np.testing.assert_array_equal(host.decode(codes, fmt), refops.decode(codes, fmt))


def test_results_do_not_depend_on_threads_and_calls_may_overlap():
    x, before = tensor((384, 1600)), host.get_num_threads()
    want = refops.quantize(x, MXFP8, columnwise=True)
    try:
        for n in (1, 2, 3):
            host.set_num_threads(n)
            assert_same(host.quantize(x, MXFP8, columnwise=True), want)
    finally:
        host.set_num_threads(before)
    wrong = []

    def call():
        for _ in range(10):
            q = host.quantize(x, MXFP8, columnwise=True)
            if not all(same_bits(getattr(q, n), getattr(want, n)) for n in ARRAYS[:4]):
                wrong.append(q)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_strided_and_read_only_input_is_taken():
    x = tensor((256, 96))
    for view in (x.T, x[::2, 1::3], np.broadcast_to(x[:1], x.shape)):
        assert_same(host.quantize(view, MXFP8, columnwise=True), refops.quantize(view, MXFP8, columnwise=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.quantize(np.zeros((3, 5)), MXFP8),
        lambda m: m.quantize(F(1), MXFP8),
        lambda m: m.quantize(np.zeros((3, 5), F), None),
        lambda m: m.quantize(np.zeros((3, 5), F), refops.NVFP4Scaling()),
        lambda m: m.quantize(np.zeros((3, 5), F), MXFP8, rowwise=False),
        lambda m: m.quantize(np.zeros((3, 5), F), MXFP8, dbias=1),
        lambda m: m.activation("nope", np.zeros(3, F)),
        lambda m: m.activation("swiglu", np.zeros(3, F)),
        lambda m: m.activation("gelu", np.zeros(3, F), limit=1),
        lambda m: m.activation("gelu", np.zeros(3, F), out_dtype=np.int8),
        lambda m: m.activation_grad("gelu", np.zeros(4, F), np.zeros(3, F)),
        lambda m: m.activation_grad("gelu", np.zeros(3, BF16), np.zeros(3, F)),
        lambda m: m.activation_quantize("swiglu", np.zeros((2, 34), F), MXFP8),
        lambda m: m.scaled_activation("gelu", np.zeros((2, 4), F), np.zeros(2, F)),
        lambda m: m.scaled_activation("swiglu", np.zeros((2, 4), F), np.zeros(3, F)),
        lambda m: m.scaled_activation("swiglu", np.zeros((2, 64), F), np.zeros(2, F), glu_interleave_size=8),
        lambda m: m.dequantize(3),
        lambda m: m.hadamard_transform(np.zeros((2, 5), F)),
        lambda m: m.encode(np.zeros(3, F), E4M3, rounding="stochastic"),
        lambda m: m.decode(np.full(3, 99, np.uint8), refops.E2M1),
        lambda m: m.update_delayed_scale(np.zeros(3), 1.0, E4M3),
    ],
)
def test_errors_are_the_reference_s(call):
    with pytest.raises((TypeError, ValueError)) as want:
        call(refops)
    with pytest.raises(want.type) as got:
        call(host)
    assert str(got.value) == str(want.value)
