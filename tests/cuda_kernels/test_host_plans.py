"""Calls of `cuda_kernels.host` made again: the same bits with other numbers, and no plan where numbers decide."""

import numpy as np
import pytest
from host_cases import BF16, E4M3, MXFP8, F, tensor

import refops
from arrays import assert_same_quantized, same_bits
from cuda_kernels import host
from cuda_kernels.host.calls import PLANS

NVFP4 = refops.NVFP4Scaling()


@pytest.fixture(autouse=True)
def no_plans():
    """Every test begins without plans."""
    PLANS.forget()


def recorded():
    """How many plans there are."""
    return sum(plan is not None for plan in PLANS.recent.values())


def same(mine, want):
    """Compare results of any call."""
    if isinstance(want, tuple):
        for one, other in zip(mine, want, strict=True):
            same(one, other)
    elif isinstance(want, refops.Quantized):
        assert_same_quantized(mine, want)
    else:
        assert same_bits(mine, want)


def amax(module, x):
    """The largest magnitude of `x`, which `refops` has no call for."""
    return host.amax(x) if module is host else np.fmax.reduce(np.abs(x.astype(F)), axis=None).reshape(1)


#: name -> (the call, whether refops has its bits).
CALLS = {
    "relu": (lambda m, x: m.activation("relu", x), True),
    "other dtype": (lambda m, x: m.activation("relu", x, out_dtype=F), True),
    "gradient": (lambda m, x: m.activation_grad("relu", x, x, dbias=True), True),
    "mxfp8": (lambda m, x: m.quantize(x, MXFP8, columnwise=True, dbias=True), True),
    "current": (lambda m, x: m.quantize(x, refops.CurrentScaling(E4M3), columnwise=True), True),
    "delayed": (lambda m, x: m.quantize(x, refops.DelayedScaling(E4M3, 2.0), columnwise=True), True),
    "nvfp4": (lambda m, x: m.quantize(x, NVFP4, columnwise=True), True),
    "stochastic": (lambda m, x: m.quantize(x, refops.NVFP4Scaling(stochastic_rounding=True, seed=3)), True),
    "stored first": (lambda m, x: m.activation_quantize("relu", x, refops.CurrentScaling(E4M3)), True),
    "stored for rows": (lambda m, x: m.activation_quantize("relu", x, refops.NVFP4Scaling(row_scaled=True)), True),
    "transformed": (lambda m, x: m.quantize(x, refops.NVFP4Scaling(rht=True), columnwise=True), False),
    "scaled": (lambda m, x: m.scaled_activation_grad("srelu", x, x, x[:, 0].astype(F)), True),
    "amax": (amax, True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_made_again_has_the_bits_of_its_own_numbers(name):
    call, exact = CALLS[name]
    for _ in range(2):  # settings that may be others in every step have a plan from the second call on
        first = call(host, tensor((64, 96)))
    assert recorded() == 1
    for seed in (1, 2):
        x = tensor((64, 96), seed=seed)
        mine = call(host, x)
        assert recorded() == 1
        if exact:
            same(mine, call(refops, x))
        PLANS.forget()
        for _ in range(2):
            same(mine, call(host, x))
    same(call(host, tensor((64, 96))), first)


def test_dequantize_has_plans_of_what_the_tensor_holds():
    for x in (tensor((64, 96)), tensor((64, 96), seed=1)):
        q = refops.quantize(x, MXFP8, columnwise=True)
        same(host.dequantize(q, dtype=BF16), refops.dequantize(q, dtype=BF16))
        only = refops.quantize(x, MXFP8, rowwise=False, columnwise=True)
        same(host.dequantize(only), refops.dequantize(only))
        assert recorded() == 2


def test_settings_of_one_step_make_no_plan_until_they_come_again():
    x = tensor((64, 96))
    settings = [refops.DelayedScaling(E4M3, scale) for scale in (2.0, 4.0, 8.0)]
    settings += [refops.NVFP4Scaling(stochastic_rounding=True, seed=seed) for seed in (1, 2, 3)]
    for number in (0, len(settings), len(settings)):
        for scaling in settings:
            same(host.quantize(x, scaling), refops.quantize(x, scaling))
        assert recorded() == number


def test_what_the_arrays_are_decides():
    """Shape, dtype and whether two arguments are one array; zeros of both signs are two settings."""
    for x in (tensor((64, 96)), tensor((96, 64)), tensor((64, 96), F)):
        same(host.quantize(x, MXFP8), refops.quantize(x, MXFP8))
    assert recorded() == 3
    x, dy = tensor((64, 96)), tensor((64, 96), seed=1)
    for one, other in ((x, x), (dy, x), (x, dy)):
        same(host.activation_grad("relu", one, other), refops.activation_grad("relu", one, other))
    assert recorded() == 5
    for alpha in (0.0, -0.0):
        same(
            host.activation("clamped_swiglu", x, alpha=alpha), host.activation("clamped_swiglu", x.copy(), alpha=alpha)
        )
    assert recorded() == 7


def test_no_plan_where_an_argument_is_copied_or_its_numbers_decide():
    x = tensor((64, 192))[:, ::2]
    for _ in range(2):
        same(host.quantize(x, MXFP8), refops.quantize(x, MXFP8))
    bits = np.zeros((64, 96), np.uint8)
    for value in (0, 255):
        bits[:] = value
        scaling = refops.NVFP4Scaling(stochastic_rounding=True, random_bits=bits.copy())
        same(host.quantize(tensor((64, 96)), scaling), refops.quantize(tensor((64, 96)), scaling))
    assert recorded() == 0
    six = refops.quantize(tensor((64, 96)), refops.MXFP8Scaling(refops.E3M2))
    same(host.dequantize(six), refops.dequantize(six))
    six.rowwise_data[0, 0] = 200
    with pytest.raises(ValueError, match="codes below 64"):
        host.dequantize(six)


def test_errors_are_the_same_before_and_after():
    host.quantize(tensor((64, 96)), MXFP8)
    for wrong in (tensor((64, 96)).astype(np.float64), 3):
        for _ in range(2):
            with pytest.raises(TypeError):
                host.quantize(wrong, MXFP8)
    assert recorded() == 1


def test_results_share_no_memory():
    x = tensor((64, 96))
    first, second, third = (host.quantize(x, MXFP8, columnwise=True) for _ in range(3))
    kept = second.rowwise_data.copy()
    third.rowwise_data[:] = 0
    assert same_bits(second.rowwise_data, kept) and same_bits(first.rowwise_data, kept)


def test_tensors_of_torch_have_plans():
    torch = pytest.importorskip("torch")
    for seed in (0, 1):
        x = tensor((64, 96), F, seed=seed)
        same(host.quantize(torch.from_numpy(x), MXFP8), refops.quantize(x, MXFP8))
    count = recorded()
    same(host.quantize(torch.from_numpy(x).t().contiguous().t(), MXFP8), refops.quantize(x, MXFP8))
    assert recorded() == count == 1
