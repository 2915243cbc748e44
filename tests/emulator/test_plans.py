"""Calls that are made again: the same bits with other numbers, and no plan where something else could happen."""

import threading

import numpy as np
import pytest

import cuda_kernels
import refops
from arrays import assert_same_bits
from cuda_kernels import gpu, plans
from cuda_kernels.described import MOST_PLANS
from refops import E2M1, E4M3, E5M2

cuda = pytest.importorskip("numba.cuda")

F = np.float32
MXFP8 = refops.MXFP8Scaling(E4M3)
STOCHASTIC = refops.NVFP4Scaling(stochastic_rounding=True, seed=3)


@pytest.fixture(autouse=True)
def no_plans():
    """Every test begins without plans."""
    plans.PLANS.forget()


@pytest.fixture
def rng():
    return np.random.default_rng(31)


@pytest.fixture
def long_way(monkeypatch):
    """One entry for each call that was not replayed."""
    ran, plain = [], gpu.memory_of
    monkeypatch.setattr(gpu, "memory_of", lambda *given: ran.append(given) or plain(*given))
    return ran


def recorded():
    """How many plans there are."""
    return sum(plan is not None for plan in plans.PLANS.recent.values())


def exact(rng, shape=(32, 128)):
    """Small multiples of 1/4, whose sums are exact."""
    return (rng.integers(-16, 17, shape) / 4).astype(F)


#: name -> (shapes of the arrays, the call of either package).
CALLS = {
    "activation": ([(32, 128)], lambda m, x: m.activation("relu", x)),
    "gated": ([(32, 128)], lambda m, x: m.activation("reglu", x, out_dtype="float16")),
    "gradient": ([(32, 128)] * 2, lambda m, dy, x: m.activation_grad("relu", dy, x, dbias=True)),
    "by keyword": ([(32, 128)] * 2, lambda m, dy, x: m.activation_grad("relu", x=x, dy=dy)),
    "row scales": ([(32, 128), (32,)], lambda m, x, s: m.scaled_activation("srelu", x, s)),
    "mxfp8": ([(32, 128)], lambda m, x: m.quantize(x, MXFP8, columnwise=True)),
    "mxfp8 with sums": ([(32, 128)], lambda m, x: m.quantize(x, refops.MXFP8Scaling(E5M2), dbias=True)),
    "current": ([(32, 128)], lambda m, x: m.quantize(x, refops.CurrentScaling(E4M3), columnwise=True)),
    "delayed": ([(32, 128)], lambda m, x: m.quantize(x, refops.DelayedScaling(E4M3, 2.0))),
    "block": ([(32, 128)], lambda m, x: m.quantize(x, refops.BlockScaling(E4M3), columnwise=True)),
    "nvfp4": ([(32, 128)], lambda m, x: m.quantize(x, refops.NVFP4Scaling(), columnwise=True)),
    "stochastic": ([(32, 128)], lambda m, x: m.quantize(x, STOCHASTIC)),
    "fused": ([(32, 128)] * 2, lambda m, dy, x: m.activation_grad_quantize("relu", dy, x, MXFP8, dbias=True)),
    "and back": ([(32, 128)], lambda m, x: m.dequantize(m.quantize(x, MXFP8))),
    "scale": ([(8, 3), (3,)], lambda m, h, s: m.update_delayed_scale(h, s, E4M3)),
    "hadamard": ([(32, 128)], lambda m, x: m.hadamard_transform(x)),
}


def flat(result):
    """name -> NumPy array of every array of a result."""
    if isinstance(result, tuple):
        return {f"{i} {name}": array for i, one in enumerate(result) for name, array in flat(one).items()}
    if hasattr(result, "rowwise_data"):
        host = result.to_host() if hasattr(result, "to_host") else result
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax_rowwise")
        return {name: getattr(host, name) for name in names if getattr(host, name) is not None}
    return {"": result.copy_to_host() if hasattr(result, "copy_to_host") else np.asarray(result)}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_made_again_gives_the_bits_of_the_reference(name, rng):
    """With new numbers at new addresses; settings that may be others in every step have a plan from the second on."""
    shapes, call = CALLS[name]
    kept, numbers_of_plans = [], []
    for _ in range(4):
        arrays = [exact(rng, shape) for shape in shapes]
        if name == "scale":
            arrays = [np.abs(array) + F(0.25) for array in arrays]
        result = call(cuda_kernels, *map(cuda.to_device, arrays))
        kept.append((result, flat(call(refops, *arrays))))
        numbers_of_plans.append(recorded())
    without = 1 if name in ("delayed", "stochastic") else 0
    assert numbers_of_plans[:without] == [0] * without
    assert numbers_of_plans[without] >= 1 and len(set(numbers_of_plans[without:])) == 1
    for result, expected in kept:  # every call has arrays of its own
        got = flat(result)
        assert set(got) == set(expected)
        for field, array in got.items():
            assert_same_bits(array, expected[field], field)


def test_a_plan_serves_only_what_is_described_alike(rng, long_way):
    x = exact(rng, (4, 64))
    given = cuda.to_device(x)
    variants = [
        lambda: cuda_kernels.activation("silu", given),
        lambda: cuda_kernels.activation("gelu", given),
        lambda: cuda_kernels.activation("silu", given, fast_math=True),
        lambda: cuda_kernels.activation("silu", given, out_dtype="float16"),
        lambda: cuda_kernels.activation("silu", cuda.to_device(x[:2])),
        lambda: cuda_kernels.activation("silu", cuda.to_device(x.astype(np.float16))),
        lambda: cuda_kernels.activation("silu", cuda.to_device(np.zeros(257, F))[1:]),
        lambda: cuda_kernels.activation("clamped_swiglu", given, limit=1.0),
        lambda: cuda_kernels.activation("clamped_swiglu", given, limit=2.0),
        lambda: cuda_kernels.activation("clamped_swiglu", given, limit=2),
        lambda: cuda_kernels.activation("clamped_swiglu", given, glu_linear_offset=0.0),
        lambda: cuda_kernels.activation("clamped_swiglu", given, glu_linear_offset=-0.0),
    ]
    for number, variant in enumerate(variants, 1):
        variant()
        assert recorded() == len(long_way) == number
    for variant in variants:
        variant()
    assert len(long_way) == len(variants)


def test_one_array_for_two_arguments_is_another_plan(rng):
    """Recorded with one array for both, then with two, and the other way round."""
    x, dy = exact(rng), exact(rng)
    on_device = cuda.to_device(x), cuda.to_device(dy)
    for _ in range(2):
        for one, other in ((0, 0), (1, 0), (1, 1), (0, 1)):
            got = cuda_kernels.activation_grad("relu", on_device[one], on_device[other])
            expected = refops.activation_grad("relu", (x, dy)[one], (x, dy)[other])
            assert_same_bits(got.copy_to_host(), expected, f"{one}, {other}")


def test_zeros_of_both_signs_are_two_plans(rng):
    x = cuda.to_device(np.zeros((1, 64), F))
    for offset in (0.0, -0.0, 0.0, -0.0):
        got = cuda_kernels.activation("clamped_swiglu", x, glu_linear_offset=offset).copy_to_host()
        expected = refops.activation("clamped_swiglu", np.zeros((1, 64), F), glu_linear_offset=offset)
        assert_same_bits(got, expected, f"{offset}")


def test_what_is_refused_is_refused_with_a_plan_too(rng):
    x = cuda.to_device(exact(rng))
    cuda_kernels.quantize(x, MXFP8, rowwise=True)
    with pytest.raises(TypeError, match="rowwise must be True or False; got 1"):
        cuda_kernels.quantize(x, MXFP8, rowwise=1)
    cuda_kernels.activation("silu", x, fast_math=True)
    with pytest.raises(TypeError, match="fast_math must be True or False; got 1"):
        cuda_kernels.activation("silu", x, fast_math=1)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        cuda_kernels.activation("silu")
    with pytest.raises(ValueError, match="name must be one of"):
        cuda_kernels.activation(["silu"], x)


def test_random_bits_are_used_although_settings_are_equal_without_them(rng):
    x = exact(rng)
    bits = [rng.integers(0, 256, x.shape, np.uint8) for _ in range(2)]
    for _ in range(2):
        cuda_kernels.quantize(cuda.to_device(x), STOCHASTIC)
    for given in bits:
        scaling = refops.NVFP4Scaling(stochastic_rounding=True, seed=3, random_bits=given)
        assert scaling == STOCHASTIC
        got = cuda_kernels.quantize(cuda.to_device(x), scaling).to_host()
        assert_same_bits(got.rowwise_data, refops.quantize(x, scaling).rowwise_data, "codes")
    assert recorded() == 1


def test_numbers_that_the_host_reads_make_no_plan(rng, long_way):
    """Codes with few bits are checked, and those of a later call may fail the check."""
    codes = rng.integers(0, 16, (4, 32), np.uint8)
    for _ in range(2):
        got = cuda_kernels.decode(cuda.to_device(codes), E2M1).copy_to_host()
        assert_same_bits(got, refops.decode(codes, E2M1), "values")
    codes[0, 0] = 16
    with pytest.raises(ValueError, match="codes must be below 16"):
        cuda_kernels.decode(cuda.to_device(codes), E2M1)
    assert recorded() == 0 and len(long_way) == 3


def test_a_caller_s_function_is_called_every_time(rng):
    called = []

    def algorithm(history):
        called.append(history)
        return cuda.to_device(history.copy_to_host().max(axis=0))

    history, scale = np.abs(exact(rng, (8, 3))) + F(1), np.ones(3, F)
    for _ in range(3):
        got = cuda_kernels.update_delayed_scale(*map(cuda.to_device, (history, scale)), E4M3, algorithm=algorithm)
        expected = refops.update_delayed_scale(history, scale, E4M3)
        assert_same_bits(got[1].copy_to_host(), expected[1], "scale")
    assert len(called) == 3 and recorded() == 0


def test_an_array_that_is_copied_first_makes_no_plan(rng):
    x = exact(rng, (32, 256))
    for _ in range(2):
        y = cuda_kernels.activation("relu", cuda.to_device(x)[:, ::2])
        assert_same_bits(y.copy_to_host(), refops.activation("relu", x[:, ::2]), "y")
    assert recorded() == 0


def test_the_number_of_plans_is_bounded(rng, long_way):
    """Plans in use stay. Settings of a single step get no plan, and what is remembered of them is dropped."""
    x = cuda.to_device(exact(rng, (1, 32)))
    for step in range(3 * MOST_PLANS):
        cuda_kernels.activation("relu", x)
        cuda_kernels.quantize(x, refops.DelayedScaling(E4M3, 1.0 + step / 1024))
    assert len(plans.PLANS.recent) + len(plans.PLANS.older) <= 2 * MOST_PLANS
    assert len(long_way) == 1 + 3 * MOST_PLANS and recorded() == 1


def test_threads_share_plans(rng):
    inputs = [exact(rng) for _ in range(4)]
    failures = []

    def work(x):
        try:
            with cuda.gpus[0]:
                given, expected = cuda.to_device(x), refops.quantize(x, MXFP8)
                for _ in range(30):
                    q = cuda_kernels.quantize(given, MXFP8)
                    assert_same_bits(q.rowwise_data.copy_to_host(), expected.rowwise_data, "codes")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
