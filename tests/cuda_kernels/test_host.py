"""`cuda_kernels.host` against `refops`: the same bits where arithmetic is exact, inside the enclosure elsewhere."""

import threading
from itertools import product

import numpy as np
import pytest
from host_cases import (
    ALIGNED,
    ALL_SCALINGS,
    BF16,
    DTYPES,
    E4M3,
    MORE_SCALINGS,
    MXFP8,
    RAGGED,
    SCALINGS_AND_DTYPES,
    F,
    takes,
    tensor,
)

import refops
from arrays import ARRAYS, assert_same_quantized, same_bits
from cuda_kernels import host
from refops import oracle
from refops.oracle.operation import OPERATIONS
from tiers import sampled

#: Which copies are made, rowwise and columnwise.
COPIES = [(True, False), (False, True), (True, True)]


def assert_quantizes(name, dtype, rowwise, columnwise):
    """Of every shape that the scaling takes: the bits of the reference, there and back."""
    scaling, options = ALL_SCALINGS[name], {"rowwise": rowwise, "columnwise": columnwise}
    for shape in ALIGNED + RAGGED:
        if not takes(scaling, shape, columnwise):
            continue
        x = tensor(shape, dtype)
        mine, dbias = host.quantize(x, scaling, dbias=True, **options)
        reference, reference_dbias = refops.quantize(x, scaling, dbias=True, **options)
        assert_same_quantized(mine, reference)
        assert same_bits(dbias, reference_dbias)
        assert same_bits(host.dequantize(reference), refops.dequantize(reference))


@sampled(("name", "dtype"), SCALINGS_AND_DTYPES, 8, in_all=24)
def test_quantize_and_dequantize_have_the_reference_s_bits(name, dtype):
    if getattr(ALL_SCALINGS[name], "rht", False):
        pytest.skip("sums in another order: judged by the oracle below")
    for copies in COPIES:
        assert_quantizes(name, dtype, *copies)


@sampled(("name", "dtype", "copies"), product(MORE_SCALINGS, DTYPES, COPIES), 31, in_all=24)
def test_other_settings_have_the_reference_s_bits(name, dtype, copies):
    """What they need is compiled for these tests alone, up to five seconds a case."""
    assert_quantizes(name, dtype, *copies)


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


@sampled(("op", "name"), [*product(["silu", "swiglu", "dgelu", "dswiglu"], ALL_SCALINGS)], 8, in_all=16)
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


#: The largest value is a power of two: the next one is a longer step away than the one before.
POWER_ON_TOP = refops.FloatFormat("e6m1", 6, 1, bias=32, largest_code=0x7E, infinity_code=0x7F)


@sampled(
    ("fmt", "rounding"),
    product(
        [E4M3, refops.E2M1, refops.E8M0, POWER_ON_TOP],
        ["nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic"],
    ),
    5,
    in_all=2,
    ids=str,
)
def test_encode_and_decode_have_the_reference_s_bits(fmt, rounding):
    if rounding == "stochastic" and not fmt.has_subnormals:
        pytest.skip("E8M0 has no zero")
    every = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    bits = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8) if rounding == "stochastic" else None
    options = {
        "rounding": rounding,
        "saturate": fmt not in (E4M3, POWER_ON_TOP),
        "random_bits": bits,
    }  # each combination is compiled
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
            assert_same_quantized(host.quantize(x, MXFP8, columnwise=True), want)
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
        assert_same_quantized(
            host.quantize(view, MXFP8, columnwise=True), refops.quantize(view, MXFP8, columnwise=True)
        )


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
