"""Compile what the processes of `make test` would each compile: the software GPU, most loops of `cuda_kernels.host`.

    python tests/prewarm.py

The work is shared among the CPUs. What it makes is kept on disk (`cuda_kernels.emulator.build`,
`cuda_kernels.host.compile`): a second run for the same sources finds it there and does nothing.
"""

import gc
import logging
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "cuda_kernels"), str(ROOT), str(ROOT / "tests")]

from host_cases import DTYPES, tensor  # noqa: E402

import refops  # noqa: E402
from cuda_kernels import host  # noqa: E402
from cuda_kernels.emulator import build  # noqa: E402
from cuda_kernels.host import products  # noqa: E402
from cuda_kernels.host.compile import folder_of_these_sources  # noqa: E402
from product_cases import NVFP4, any_case  # noqa: E402
from refops.products import unit  # noqa: E402
from refops.survey import SCALINGS  # noqa: E402

#: Every scaling takes it.
SHAPE = (32, 64)


def quantize(name):
    """A scaling from every dtype, and back."""
    scaling = SCALINGS[name].scaling
    only_rows = isinstance(scaling, refops.NVFP4Scaling) and scaling.row_scaled and scaling.four_over_six
    for dtype in DTYPES:
        x = tensor(SHAPE, dtype)
        for rowwise, columnwise in ((True, False),) if only_rows else ((True, False), (False, True), (True, True)):
            q, _ = host.quantize(x, scaling, rowwise=rowwise, columnwise=columnwise, dbias=True)
            host.dequantize(q)
    if isinstance(scaling, refops.MXFP8Scaling | refops.NVFP4Scaling) and not getattr(scaling, "rht", False):
        host.dequantize(host.quantize(x, scaling, columnwise=not only_rows, swizzled_scales=True))


def fuse(name):
    """A scaling behind an activation and a gradient."""
    for activation in ("gelu", "swiglu"):
        x, dy = (np.ones((SHAPE[0], SHAPE[1] * width), DTYPES[-1]) for width in (1 + (activation == "swiglu"), 1))
        host.activation_quantize(activation, x, SCALINGS[name].scaling)
        host.activation_grad_quantize(activation, dy, x, SCALINGS[name].scaling, dbias=True)


def activate(name):
    """An activation and its gradient in every dtype."""
    for dtype in DTYPES:
        x, dy = (np.ones((SHAPE[0], SHAPE[1] * width), dtype) for width in (1 + refops.ACTIVATIONS[name].gated, 1))
        host.activation(name, x)
        host.activation_grad(name, dy, x, dbias=True)


def multiply():
    """The products of tensor cores: units that share loops with these need no others."""
    for row in (unit("ampere", np.float16), unit("hopper", np.float16), NVFP4):
        products.matmul(unit=row, **any_case(np.random.default_rng(0), row, SHAPE[:1] * 3, "any"))


CALLS = [
    multiply,
    *(partial(quantize, name) for name in SCALINGS),
    *(partial(activate, name) for name in refops.ACTIVATIONS),
    *(partial(fuse, name) for name in SCALINGS),
]


def call(number):
    logging.getLogger("cuda_kernels").setLevel("WARNING")  # a line for each of some hundred loops
    CALLS[number]()


def main():
    build.libraries()
    mark = folder_of_these_sources() / "prewarmed"
    if mark.exists():
        return
    print("compiling the kernels for this CPU, once: about a minute on two cores", flush=True)
    spawn = multiprocessing.get_context("spawn")
    # What is imported is garbage never: left out of the searches, which took a tenth of the time.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn, gc.freeze) as pool:
        for _ in pool.map(call, range(len(CALLS))):
            pass
    with suppress(OSError):  # where nothing can be kept
        mark.touch()


if __name__ == "__main__":
    main()
