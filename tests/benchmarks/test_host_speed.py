"""Speed of `cuda_kernels.host` at 4096 x 4096 bfloat16 beside `refops` and PyTorch: one run, the same bits.

Products of tensor cores are compared with PyTorch's float32 product, below.

Rounds alternate between the competitors, the best of each counts. In `extra_info`: wall and CPU milliseconds of each,
and both ratios to `host`. The larger ratio is asserted (`BOUNDS`), with about a fifth of slack: other work on the
machine disturbs CPU time less, but what PyTorch's threads count as such depends on how long they spin. `refops` runs on
one thread, so its wall ratio is larger by the number of CPUs. PyTorch runs the same formulas, eager and compiled (left
out where it or g++ is missing).
"""

import time

import ml_dtypes
import numpy as np
import pytest

import refops.products
from cuda_kernels import host
from cuda_kernels.host import products
from peers import registry
from peers.subjects import SUBJECTS, TIMED, comparable, read

N = 4096
#: Operation -> least ratio of CPU time to (refops, PyTorch eager, PyTorch compiled).
BOUNDS = {
    "swiglu -> MXFP8": (9, 10, 1.8),  # compiled: 2.2 to 3.9 were measured in one hour, as fast as its memory came
    "MXFP8 both directions": (5, 18, 2.5),  # eager: 21 to 30 were measured, as fast as memory was
    "MXFP8 rowwise": (5, 15, 1.2),
    "NVFP4 1x16": (4, 10, 1.5),
}
#: Calls so long that what disturbs one of them is a small part of it.
SLOW = ("refops", "PyTorch eager")
OTHERS = {"PyTorch eager": "torch_eager", "PyTorch compiled": "torch_compiled"}


# --- measurements -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tensors():
    """(4096, 8192) for gated activations, and its left half, contiguous."""
    x = np.random.default_rng(0).standard_normal((N, 2 * N), np.float32).astype(ml_dtypes.bfloat16)
    return x, np.ascontiguousarray(x[:, :N])


def competitors(subject, x):
    """Return competitor -> (function without arguments that runs the subject, function that reads its result)."""
    found = {"refops": (lambda: subject.call(refops, x), read), "copy": (x.copy, None)}
    for name, module in OTHERS.items():
        (peer,) = registry.load(module)
        if not peer.absent:
            offer = peer.offer(subject.name)
            prepared = offer.prepare(x)
            found[name] = (lambda o=offer, p=prepared: o.run(p), offer.arrays)
    return found


def check_same_bits(subject, mine, arrays):
    """The arrays of a competitor against those of `host`; where an activation is computed a few may differ."""
    mine = read(mine)
    assert mine.keys() == arrays.keys()
    for name, fmt in subject.formats.items():
        differing = np.count_nonzero(comparable(mine[name], fmt) != comparable(arrays[name], fmt))
        assert differing <= (0 if subject.exact else mine[name].size * 1e-4), name


def timed(operation):
    """Milliseconds of one call: wall, and CPU of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    operation()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def best_times(operations, rounds):
    """Return name -> least (wall, CPU) milliseconds; rounds alternate between the operations, `SLOW` ones pass some."""
    times = {name: [] for name in operations}
    for number in range(rounds):
        for name, operation in operations.items():
            if name not in SLOW or number % 3 == 0:
                times[name].append(timed(operation))
    return {name: np.min(samples, axis=0) for name, samples in times.items()}


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler has some of its own
@pytest.mark.parametrize("name", BOUNDS)
def test_speed(benchmark, tensors, allowance, name):
    subject = SUBJECTS[TIMED[name][0]]
    x = tensors[subject.inputs != ("pair",)]
    others = competitors(subject, x)
    mine = subject.call(host, x)
    for run, arrays in others.values():
        if arrays is not None:
            check_same_bits(subject, mine, arrays(run()))
    del mine
    benchmark.group, benchmark.name = "4096 x 4096 bfloat16, host", name
    benchmark.pedantic(subject.call, (host, x), rounds=9, warmup_rounds=1)
    runs = {other: run for other, (run, _) in others.items()}
    times = best_times({"host": lambda: subject.call(host, x), **runs}, rounds=7)
    ratios = {other: tuple(times[other] / times["host"]) for other in others}
    benchmark.extra_info |= {"wall and CPU, ms": {n: tuple(t) for n, t in times.items()}, "wall and CPU ratio": ratios}
    for other, bound in zip(("refops", *OTHERS), BOUNDS[name], strict=True):
        assert other not in ratios or max(ratios[other]) * allowance >= bound, f"{other}: {ratios[other]}"


# --- products of tensor cores -------------------------------------------------------------------------

SIDE = 1024
BF16 = np.dtype(ml_dtypes.bfloat16)
#: Product -> (card, format of elements, format of scales), and how much longer than PyTorch's float32 product of the
#: same shape it may take. Ampere's unit, which adds the fewest products at once, was some 17, 16-bit ones 12, those of
#: 32 products 10, NVFP4's 8.
PRODUCTS = {
    "ampere bfloat16": (("ampere", BF16, None), 25),
    "hopper bfloat16": (("hopper", BF16, None), 18),
    "hopper E4M3": (("hopper", refops.E4M3, None), 15),
    "blackwell E4M3": (("blackwell", refops.E4M3, None), 15),
    "blackwell MXFP8": (("blackwell", refops.E4M3, refops.E8M0), 15),
    "blackwell NVFP4": (("blackwell", refops.E2M1, refops.E4M3), 12),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(benchmark, allowance, name):
    """1024 x 1024 by 1024 x 1024; the sums of a few rows have the reference's bits."""
    torch = pytest.importorskip("torch")
    (card, fmt, scale_format), bound = PRODUCTS[name]
    unit = refops.products.unit(card, fmt, scale_format=scale_format)
    a, b = np.random.default_rng(0).standard_normal((2, SIDE, SIDE), np.float32)
    case = {"a_format": fmt, "b_format": fmt}
    if scale_format is not None:
        shape = (SIDE, SIDE // unit.scale_blocks[0])
        case |= dict.fromkeys(("a_scale", "b_scale"), np.ones(shape, np.float32))
    x, y = (cast_to(fmt, one) for one in (a, b))
    rows = {key: value[:4] if key == "a_scale" else value for key, value in case.items()}
    mine = products.matmul(x, y, unit, **case)
    np.testing.assert_array_equal(mine[:4], refops.products.matmul(x[:4], y, unit, **rows))
    benchmark.group, benchmark.name = "1024 x 1024 x 1024, host", name
    benchmark.pedantic(products.matmul, (x, y, unit), case, rounds=3)
    left, right = torch.from_numpy(a), torch.from_numpy(b).T
    runs = {"host": lambda: products.matmul(x, y, unit, **case), "PyTorch float32": lambda: left @ right}
    times = best_times(runs, rounds=9)
    ratios = tuple(times["host"] / times["PyTorch float32"])
    benchmark.extra_info |= {"wall and CPU, ms": {n: tuple(t) for n, t in times.items()}, "wall and CPU ratio": ratios}
    assert min(ratios) <= bound * allowance, ratios


def cast_to(fmt, x):
    """float32 values rounded to a format."""
    if isinstance(fmt, np.dtype):
        return x.astype(fmt).astype(np.float32)
    return refops.decode(refops.encode(x, fmt), fmt)
