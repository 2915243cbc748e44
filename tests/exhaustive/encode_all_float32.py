"""Encode all 2^32 float32 values in every format and compare with ml_dtypes.

    python tests/exhaustive/encode_all_float32.py                      # everything (`make exhaustive`)
    python tests/exhaustive/encode_all_float32.py --fraction 1/1024    # one value in 1024, spread over the whole range

ml_dtypes rounds to nearest even but does not saturate, so it gets clipped values; NaN compares as a class. The last
line is the verdict; the exit code is 1 on any difference.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import refops

#: Format -> ml_dtypes' type of the same values.
PEERS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
}
VALUES = 1 << 32
#: Values that one task takes at a time: its arrays stay in a few MiB of cache.
CHUNK = 1 << 18
TASK = 1 << 24


def values_from(start, count, stride):
    """float32 values whose bit patterns are start, start + stride, ... (`count` of them)."""
    patterns = start + np.arange(count, dtype=np.uint64) * stride
    return patterns.astype(np.uint32).view(np.float32)


def compare(name, x):
    """Return (differences, bit pattern of the first one or None) of refops.encode and ml_dtypes on `x`."""
    fmt, peer = refops.FORMATS[name], PEERS[name]
    limit = np.float32(ml_dtypes.finfo(peer).max)
    nan = np.isnan(x)
    with np.errstate(invalid="ignore"):  # signalling NaN
        theirs = np.clip(x, -limit, limit).astype(peer).view(np.uint8)
    if nan.any():
        canonical = np.uint8(fmt.largest_code if fmt.nan_code is None else fmt.nan_code)
        theirs = np.where(nan, canonical, theirs)
    different = np.flatnonzero(refops.encode(x, fmt) != theirs)
    return len(different), int(x.view(np.uint32)[different[0]]) if len(different) else None


def run_task(task):
    """Compare one range of bit patterns in one format."""
    name, start, count, stride = task
    differences, first = 0, None
    for done in range(0, count, CHUNK):
        x = values_from(start + done * stride, min(CHUNK, count - done), stride)
        found, where = compare(name, x)
        differences += found
        first = where if first is None else first
    return name, count, differences, first


def tasks(stride, formats):
    """All tasks; the strata of a `stride` start at different offsets, so that low mantissa bits vary too."""
    for name in formats:
        for start in range(0, VALUES, TASK):
            offset = (start // TASK * 0x9E3779B1) % stride
            yield name, start + offset, -(-(TASK - offset) // stride), stride


def stride_of(text):
    """'1/1024' -> 1024."""
    try:
        fraction = Fraction(text)
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if fraction.numerator != 1 or not 1 <= fraction.denominator <= TASK:
        raise argparse.ArgumentTypeError(f"fraction must be 1/n with n from 1 to {TASK}; got {text!r}")
    return fraction.denominator


def available_cores():
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def results(work, workers):
    """Results of all tasks in order; one worker runs them in this process."""
    if workers == 1:
        yield from map(run_task, work)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(run_task, work)


def main(arguments=None):
    """Run the comparison; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--fraction", type=stride_of, default=1, metavar="1/N", help="how many of the values (default all)"
    )
    parser.add_argument(
        "--formats", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME", help=", ".join(PEERS)
    )
    parser.add_argument("--workers", type=int, default=available_cores(), metavar="N", help="processes")
    options = parser.parse_args(arguments)
    work = list(tasks(options.fraction, options.formats))
    compared, differences, began = 0, 0, time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        running = bar.add_task("encode float32", total=len(work))
        for name, count, found, first in results(work, options.workers):
            compared += count
            differences += found
            if found:
                bar.console.print(f"{name}: {found} differences, the first at float32 bits 0x{first:08X}")
            bar.update(running, advance=1, description=f"encode float32 as {name.upper()}")
    seconds = time.perf_counter() - began
    formats = len(options.formats)
    print(f"{compared // formats:,} values x {formats} formats: {differences:,} differences in {seconds:.0f} s")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
