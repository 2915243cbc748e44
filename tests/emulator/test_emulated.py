"""`cuda_kernels.emulated`: every GPU call on NumPy arrays, bit for bit as the reference; contexts, threads, faults."""

import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuda_kernels
import refops
from arrays import assert_same_bits
from cuda_kernels import emulator
from cuda_kernels.emulator import driver_calls
from cuda_kernels.result import ARRAYS
from refops import E2M1, E4M3, E5M2, oracle
from tiers import sampled

ROOT = Path(__file__).resolve().parents[2]
F, BF16 = np.float32, ml_dtypes.bfloat16
MXFP8 = refops.MXFP8Scaling(E4M3)
NVFP4 = refops.NVFP4Scaling()
SCALINGS = {
    "delayed": refops.DelayedScaling(E4M3, 2.0),
    "current": refops.CurrentScaling(E5M2),
    "block 1x128": refops.BlockScaling(E4M3, block_dim=1),
    "block 128x128": refops.BlockScaling(E4M3),
    "mxfp8": MXFP8,
    "mxfp8 squares": refops.MXFP8Scaling(E4M3, two_d=True),
    "mxint8": refops.MXINT8Scaling(),
    "nvfp4": NVFP4,
    "nvfp4 squares": refops.NVFP4Scaling(two_d=True),
    "nvfp4 4over6": refops.NVFP4Scaling(four_over_six="mse"),
    "nvfp4 stochastic": refops.NVFP4Scaling(stochastic_rounding=True, seed=7),
}


@pytest.fixture
def rng():
    return np.random.default_rng(23)


@pytest.fixture
def context():
    """Within `emulated`."""
    with cuda_kernels.emulated("sm_90"):
        yield


def numbers(rng, shape=(32, 128), dtype=BF16):
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))).astype(dtype)


def exact(rng, shape=(32, 128), dtype=BF16):
    """Small multiples of 1/4, whose sums are exact."""
    return (rng.integers(-16, 17, shape) / 4).astype(dtype)


def same(got, expected):
    """The arrays are those of the reference, bit for bit, and NumPy's own."""
    assert (got.shape, got.scaling) == (expected.shape, expected.scaling)
    for name in ARRAYS:
        array, wanted = getattr(got, name), getattr(expected, name)
        assert (array is None) == (wanted is None), name
        if array is not None:
            assert not driver_calls.is_on_device(array)
            assert_same_bits(array, wanted, name)


def judged(name, inputs, outputs):
    oracle.check(name, inputs, outputs).raise_for_mismatch()


# --- every call -------------------------------------------------------------------------------------


@pytest.mark.check
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("columnwise", [False, True])
def test_quantize(scaling, columnwise, rng, context):
    x = numbers(rng)
    q = cuda_kernels.quantize(x, scaling, columnwise=columnwise)
    same(q, refops.quantize(x, scaling, columnwise=columnwise))
    same(q.to_host(), refops.quantize(x, scaling, columnwise=columnwise))


@pytest.mark.check
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_dequantize(scaling, rng, context):
    x = numbers(rng)
    q = cuda_kernels.quantize(x, scaling)
    expected = refops.dequantize(refops.quantize(x, scaling), dtype="bfloat16")
    assert_same_bits(cuda_kernels.dequantize(q, dtype="bfloat16"), expected, "dequantized")


@pytest.mark.parametrize("scaling", [MXFP8, NVFP4, SCALINGS["delayed"]], ids=["mxfp8", "nvfp4", "delayed"])
def test_quantize_with_bias_sums(scaling, rng, context):
    x = exact(rng)
    q, sums = cuda_kernels.quantize(x, scaling, columnwise=True, dbias=True)
    expected, expected_sums = refops.quantize(x, scaling, columnwise=True, dbias=True)
    same(q, expected)
    assert_same_bits(sums, expected_sums, "dbias")


@pytest.mark.check
@pytest.mark.parametrize("name", refops.ACTIVATIONS)
def test_activation(name, rng, context):
    x = numbers(rng)
    judged(name, x, cuda_kernels.activation(name, x))
    judged(name, x.astype(F), cuda_kernels.activation(name, x.astype(F)))


@pytest.mark.check
@pytest.mark.parametrize("name", ["silu", "swiglu", "gelu", "relu"])
def test_activation_grad(name, rng, context):
    x = numbers(rng)
    dy = numbers(rng, refops.activation(name, x).shape)
    judged(f"d{name}", {"dy": dy, "x": x}, {"dx": cuda_kernels.activation_grad(name, dy, x)})


def test_activation_grad_with_bias_sums(rng, context):
    x, dy = exact(rng), exact(rng)
    dx, sums = cuda_kernels.activation_grad("relu", dy, x, dbias=True)
    expected, expected_sums = refops.activation_grad("relu", dy, x, dbias=True)
    assert_same_bits(dx, expected, "dx")
    assert_same_bits(sums, expected_sums, "dbias")


def test_scaled_activation_and_its_gradients(rng, context):
    x, dy, scales = exact(rng), exact(rng), exact(rng, (32,), F)
    y = cuda_kernels.scaled_activation("srelu", x, scales)
    assert_same_bits(y, refops.scaled_activation("srelu", x, scales), "y")
    got = cuda_kernels.scaled_activation_grad("srelu", dy, x, scales)
    for array, expected in zip(got, refops.scaled_activation_grad("srelu", dy, x, scales), strict=True):
        assert_same_bits(array, expected, "gradients")


def test_results_outside_the_matrix_count_nowhere(context):
    """With such parameters the gradients of zeros, which threads outside compute, are NaN, and f(0) is not 0."""
    x, dy, scales = np.ones((3, 16), BF16), np.ones((3, 8), BF16), np.ones(3, F)
    for call in (
        lambda module: module.activation_grad("clamped_swiglu", dy, x, dbias=True, alpha=np.inf),
        lambda module: module.scaled_activation_grad("clamped_swiglu", dy, x, scales, alpha=np.inf),
    ):
        for array, expected in zip(call(cuda_kernels), call(refops), strict=True):
            assert_same_bits(array, expected, "gradients and sums")
    x, scaling = np.full((3, 6), -100, BF16), SCALINGS["current"]
    q = cuda_kernels.activation_quantize("clamped_swiglu", x, scaling, limit=-2.0)
    same(q, refops.activation_quantize("clamped_swiglu", x, scaling, limit=-2.0))


@pytest.mark.parametrize("scaling", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
def test_activation_quantize_and_its_gradient(scaling, rng, context):
    x, dy = exact(rng), exact(rng)
    q = cuda_kernels.activation_quantize("relu", x, scaling, columnwise=True)
    same(q, refops.activation_quantize("relu", x, scaling, columnwise=True))
    q, sums = cuda_kernels.activation_grad_quantize("relu", dy, x, scaling, columnwise=True, dbias=True)
    expected, expected_sums = refops.activation_grad_quantize("relu", dy, x, scaling, columnwise=True, dbias=True)
    same(q, expected)
    assert_same_bits(sums, expected_sums, "dbias")


@pytest.mark.parametrize("algorithm", ["max", "most_recent", lambda history: history.max(axis=0)])
def test_update_delayed_scale(algorithm, rng, context):
    history, scale = np.abs(numbers(rng, (8, 3), F)), np.ones(3, F)
    got = cuda_kernels.update_delayed_scale(history, scale, E4M3, algorithm=algorithm)
    for array, expected in zip(
        got, refops.update_delayed_scale(history, scale, E4M3, algorithm=algorithm), strict=True
    ):
        assert_same_bits(array, expected, "history and scale")


def test_update_delayed_scale_of_a_number(context):
    got = cuda_kernels.update_delayed_scale(np.array([3, 5], F), 1.0, E4M3)
    for array, expected in zip(got, refops.update_delayed_scale(np.array([3, 5], F), 1.0, E4M3), strict=True):
        assert_same_bits(array, np.asarray(expected, F), "history and scale")


@pytest.mark.parametrize("scaling", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
def test_swizzled_scales(scaling, rng, context):
    x = numbers(rng, (64, 256))
    expected = refops.quantize(x, scaling, columnwise=True)
    q = cuda_kernels.quantize(x, scaling, columnwise=True)
    same(q.swizzled(), expected.swizzled())
    same(q.swizzled().unswizzled(), expected)
    same(cuda_kernels.quantize(x, scaling, columnwise=True, swizzled_scales=True), expected.swizzled())
    assert_same_bits(cuda_kernels.dequantize(q.swizzled()), refops.dequantize(expected), "dequantized")


def test_elements(rng, context):
    x = numbers(rng)
    codes = cuda_kernels.encode(x, E4M3)
    assert_same_bits(codes, refops.encode(x, E4M3), "codes")
    assert_same_bits(cuda_kernels.decode(codes, E4M3), refops.decode(codes, E4M3), "values")
    four_bits = rng.integers(0, 16, (5, 7), np.uint8)
    assert_same_bits(cuda_kernels.decode(four_bits, E2M1), refops.decode(four_bits, E2M1), "values")
    assert_same_bits(cuda_kernels.amax(x), np.abs(x.astype(F)).max(keepdims=True).reshape(1), "amax")
    whole = exact(rng)
    assert_same_bits(cuda_kernels.hadamard_transform(whole), refops.hadamard_transform(whole), "transformed")


def test_given_random_bits(rng, context):
    x, bits = numbers(rng), rng.integers(0, 256, (32, 128), np.uint8)
    scaling = refops.NVFP4Scaling(stochastic_rounding=True, random_bits=bits)
    same(cuda_kernels.quantize(x, scaling), refops.quantize(x, scaling))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 3, 32)])
def test_shapes(shape, rng, context):
    x = numbers(rng, shape)
    assert_same_bits(cuda_kernels.activation("relu", x), refops.activation("relu", x), "y")


def test_arrays_that_are_not_contiguous(rng, context):
    x = numbers(rng, (32, 256))[:, ::2]
    same(cuda_kernels.quantize(x, MXFP8), refops.quantize(x, MXFP8))
    x = np.asfortranarray(numbers(rng))
    same(cuda_kernels.quantize(x, MXFP8), refops.quantize(x, MXFP8))


@pytest.mark.parametrize(
    "behaviour", [{"deferred": True}, {"deferred": True, "backward": True}, {"uninitialised": True}]
)
def test_behaviours(behaviour, rng):
    x = numbers(rng)
    with cuda_kernels.emulated("sm_90", **behaviour) as settings:
        assert all(getattr(settings, name) for name in behaviour)
        for _ in range(2):
            same(cuda_kernels.quantize(x, NVFP4, columnwise=True), refops.quantize(x, NVFP4, columnwise=True))


SAMPLE = """
import sys
import ml_dtypes, numpy as np
import cuda_kernels, refops
from refops import E4M3, oracle

rng = np.random.default_rng(5)
x = (rng.standard_normal((64, 128)) * np.exp2(rng.integers(-6, 7, (64, 128)))).astype(ml_dtypes.bfloat16)
with cuda_kernels.emulated(sys.argv[1]):
    for scaling in (refops.MXFP8Scaling(E4M3), refops.NVFP4Scaling(), refops.CurrentScaling(E4M3)):
        q, expected = cuda_kernels.quantize(x, scaling, columnwise=True), refops.quantize(x, scaling, columnwise=True)
        for name, array in q.arrays.items():
            assert array.tobytes() == getattr(expected, name).tobytes(), (scaling, name)
    oracle.check("swiglu", x, cuda_kernels.activation("swiglu", x)).raise_for_mismatch()
print("the same bits")
"""


@sampled("target", ["sm_100a", "sm_80", "sm_120a"], 3)
def test_other_targets(target):
    run = subprocess.run([sys.executable, "-c", SAMPLE, target], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout == "the same bits\n", run.stderr


# --- where it holds ---------------------------------------------------------------------------------


def refused(x):
    with pytest.raises(TypeError, match=r"x must be an array on a GPU; got a NumPy array.*cuda_kernels\.host"):
        cuda_kernels.activation("relu", x)


def works(x):
    assert_same_bits(cuda_kernels.activation("relu", x), refops.activation("relu", x), "y")


def test_outside_of_the_context_numpy_arrays_are_refused_as_ever(rng):
    x = numbers(rng)
    refused(x)
    with cuda_kernels.emulated():
        works(x)
        q = cuda_kernels.quantize(x, MXFP8)
    refused(x)
    same(q.to_host(), refops.quantize(x, MXFP8))


def test_an_exception_ends_the_context(rng):
    x = numbers(rng)
    with pytest.raises(ZeroDivisionError), cuda_kernels.emulated(deferred=True):
        works(x)
        raise ZeroDivisionError
    refused(x)
    assert not emulator.behaviour().deferred


def test_nested_contexts(rng):
    x = numbers(rng)
    with cuda_kernels.emulated(deferred=True):
        with cuda_kernels.emulated(backward=True) as inner:
            assert inner.backward and not inner.deferred
            works(x)
        assert emulator.behaviour().deferred and not emulator.behaviour().backward
        works(x)
    refused(x)


def test_it_holds_for_the_thread_that_entered_it(rng):
    x, failures = numbers(rng), []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            failures.append(error)

    def inside():
        with cuda_kernels.emulated():
            for _ in range(5):
                works(x)

    with cuda_kernels.emulated():
        threads = [threading.Thread(target=guarded, args=(work,)) for work in (inside, inside, lambda: refused(x))]
        for thread in threads:
            thread.start()
        works(x)
        for thread in threads:
            thread.join()
        works(x)
    assert not failures, failures[0]
    refused(x)


def test_generators_may_end_in_any_order(rng):
    x = numbers(rng)

    def within(**behaviour):
        with cuda_kernels.emulated(**behaviour):
            yield cuda_kernels.activation("relu", x)

    first, second = within(deferred=True), within()
    next(first), next(second)
    first.close()
    works(x)  # the second one still holds
    second.close()
    refused(x)
    assert not emulator.behaviour().deferred


def test_a_generator_that_ends_in_another_thread_ends_its_context(rng):
    x = numbers(rng)

    def within():
        with cuda_kernels.emulated():
            yield

    entered = within()
    next(entered)
    works(x)
    thread = threading.Thread(target=entered.close)
    thread.start()
    thread.join()
    refused(x)


def test_as_a_decorator(rng):
    @cuda_kernels.emulated()
    def work(x):
        works(x)

    x = numbers(rng)
    work(x)
    refused(x)
    work(x)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": "sm_1"}, ValueError, "target must be one of 'sm_75'"),
        ({"deferred": 1}, TypeError, "deferred must be True or False; got 1"),
        ({"perturb": -1}, ValueError, "perturb must be an integer in"),
        ({"colour": True}, TypeError, "colour"),
    ],
)
def test_wrong_arguments(options, error, message, rng):
    with pytest.raises(error, match=message), cuda_kernels.emulated(**options):
        pass
    refused(numbers(rng))


# --- faults -----------------------------------------------------------------------------------------


@pytest.fixture
def short_results(monkeypatch):
    """The device's memory of a new array is half as long as it should be."""
    from cuda_kernels.emulator import numpy_memory

    plain = numpy_memory.NumpyMemory._new

    def new(memory, how, shape, dtype):
        array = plain(memory, how, (shape[0] // 2, *shape[1:]), dtype)
        return np.lib.stride_tricks.as_strided(array, shape, array.strides)

    monkeypatch.setattr(numpy_memory.NumpyMemory, "_new", new)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_fault_of_a_kernel_names_instruction_thread_and_line(deferred, rng, monkeypatch, request):
    x = numbers(rng)
    with cuda_kernels.emulated(deferred=deferred):
        works(x)
        request.getfixturevalue("short_results")
        for _ in range(2):
            with pytest.raises(driver_calls.DeviceError) as caught:
                cuda_kernels.activation("relu", x)
            said = str(caught.value)
            assert "invalid write of 16 bytes" in said and "st.global" in said
            assert "block (" in said and "thread " in said and "line " in said
            assert said.endswith(", in cuda_kernels.families.elementwise.Elementwise.build.<locals>.elementwise")
        monkeypatch.undo()
        works(x)
    refused(x)


def test_an_error_of_a_call_is_no_fault(rng, context):
    x = numbers(rng)
    with pytest.raises(ValueError, match="name must be one of"):
        cuda_kernels.activation("nothing", x)
    with pytest.raises(TypeError, match="x must be a NumPy array, as the first argument is; got"):
        cuda_kernels.activation_grad("relu", x, [1.0])
    works(x)


AFTER_A_FAILURE = """
import numpy as np
import cuda_kernels, refops
x, scaling = np.linspace(-3, 3, 32 * 64, dtype=np.float32).reshape(32, 64), refops.MXFP8Scaling(refops.E4M3)
try:
    cuda_kernels.quantize(x, scaling)
except TypeError as error:
    print("cuda_kernels.emulated()" in str(error))
with cuda_kernels.emulated():
    q = cuda_kernels.quantize(x, scaling)
print((q.rowwise_data == refops.quantize(x, scaling).rowwise_data).all())
"""


def test_what_the_error_about_a_numpy_array_advises_works_afterwards():
    """The call that failed has let numba.cuda look for a driver: it has found none."""
    run = subprocess.run([sys.executable, "-c", AFTER_A_FAILURE], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout == "True\nTrue\n", run.stderr
