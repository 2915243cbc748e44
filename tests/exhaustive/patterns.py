"""All 2^32 float32, or a part of them spread over the whole range, through a comparison: what the scripts share."""

import argparse
import functools
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

VALUES = 1 << 32
#: Values that one task takes at a time, unless a script knows better: its arrays stay in a few MiB of cache.
CHUNK = 1 << 18
TASK = 1 << 24


def values_from(start, count, stride):
    """float32 values whose bit patterns are start, start + stride, ... (`count` of them)."""
    patterns = start + np.arange(count, dtype=np.uint64) * stride
    return patterns.astype(np.uint32).view(np.float32)


def run_task(compare, chunk, task):
    """Compare one range of bit patterns: (name, values, counts, bit pattern of the first that differs or None)."""
    name, start, count, stride = task
    counts, first = Counter(), None
    for done in range(0, count, chunk):
        x = values_from(start + done * stride, min(chunk, count - done), stride)
        found, where = compare(name, x)
        counts.update(found)
        first = where if first is None else first
    return name, count, counts, first


def tasks(stride, names):
    """All tasks; the strata of a `stride` start at different offsets, so that low mantissa bits vary too."""
    for name in names:
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


def results(compare, chunk, work, workers):
    """Results of all tasks in order; one worker runs them in this process."""
    run = functools.partial(run_task, compare, chunk)
    if workers == 1:
        yield from map(run, work)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(run, work)


def compare_all(arguments, description, what, names, compare, chunk=CHUNK):
    """Read the command line, compare, and show how far it is.

    Args:
        arguments: of the command line. description: of the script. what: what the names are, "formats".
        names: what can be compared.
        compare: function of (name, float32 array) -> (mapping of counts, one of them "differences"; bit pattern of the
            first value that differs, or None). It is sent to other processes: a function of a module.
        chunk: how many values it gets at a time.

    Returns:
        (values compared of each name, number of names, `Counter`, seconds).
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--fraction", type=stride_of, default=1, metavar="1/N", help="how many of the values (default all)"
    )
    parser.add_argument(f"--{what}", nargs="+", choices=names, default=list(names), metavar="NAME", dest="names")
    parser.add_argument("--workers", type=int, default=available_cores(), metavar="N", help="processes")
    options = parser.parse_args(arguments)
    work = list(tasks(options.fraction, options.names))
    compared, counts, began = 0, Counter(), time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        running = bar.add_task("float32", total=len(work))
        for name, count, found, first in results(compare, chunk, work, options.workers):
            compared += count
            counts.update(found)
            if first is not None:
                text = f"{name}: {found['differences']} differences, the first at float32 bits 0x{first:08X}"
                bar.console.print(text)
            bar.update(running, advance=1, description=f"float32, {name}")
    return compared // len(options.names), len(options.names), counts, time.perf_counter() - began
