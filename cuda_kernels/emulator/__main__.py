"""Run a script on the software GPU: `python -m cuda_kernels.emulator [options] SCRIPT [arguments]`.

The script uses numba.cuda, cuda.core or cuda.bindings as on a machine with GPUs, and needs no change. What its kernels
do wrong is an exception, or a line on stderr where work is used before its stream has finished.

    python -m cuda_kernels.emulator vector_add.py
    python -m cuda_kernels.emulator --target sm_90 --target sm_90 --deferred --counts two_gpus.py --size 1000
    python -m cuda_kernels.emulator -m package.module
"""

import argparse
import runpy
import sys
from pathlib import Path

from cuda_kernels.emulator import loading
from cuda_kernels.emulator.counting import KernelCounters, counters
from cuda_kernels.emulator.settings import BEHAVIOUR, DEFAULT_TARGETS, TARGETS, Settings


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options; `script` and `arguments` are what runs."""
    parser = argparse.ArgumentParser(prog="python -m cuda_kernels.emulator", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--target",
        action="append",
        choices=TARGETS,
        help=f"what a device is; once for each device (default: {' '.join(DEFAULT_TARGETS)})",
    )
    parser.add_argument("--deferred", action="store_true", help="work is done when somebody waits for it")
    parser.add_argument("--backward", action="store_true", help="blocks, warps and unordered work from last to first")
    parser.add_argument("--contract", action="store_true", help="fuse multiplications and additions, as ptxas may")
    parser.add_argument("--perturb", type=int, default=0, metavar="N", help="a seed: approximate units err")
    parser.add_argument("--uninitialised", action="store_true", help="reads of bytes that nobody wrote are faults")
    parser.add_argument(
        "--longest",
        type=int,
        default=Settings.longest,
        metavar="N",
        help="instructions of a warp in a block, after which its loop is taken to be endless",
    )
    parser.add_argument("--counts", action="store_true", help="at the end print what each kernel did")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Load the software GPU and run the script; its exceptions and its exit code are this program's."""
    options = parse(arguments)
    targets = tuple(options.target or DEFAULT_TARGETS)
    loading.load(Settings(targets=targets, **{name: getattr(options, name) for name in BEHAVIOUR}))
    sys.argv = [options.script, *options.arguments]
    try:
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(options.script).resolve().parent)
            runpy.run_path(options.script, run_name="__main__")
    finally:
        if options.counts:
            print(table(counters()), file=sys.stderr)


def table(kernels: list[KernelCounters]) -> str:
    """Return the counts as lines of text, a kernel each."""
    heads = ("launches", "blocks", "warp instr", "lanes", "sectors/load", "sectors/store", "wavefronts/ideal", "kernel")
    lines: list[tuple[str, ...]] = [heads]
    for one in kernels:
        shares = (one.active_lanes, one.load_sectors_per_request, one.store_sectors_per_request)
        numbers = (*map(str, (one.launches, one.blocks, one.warp_instructions)), *(f"{share:.1f}" for share in shares))
        lines.append((*numbers, f"{one.wavefronts_over_ideal:.2f}", one.kernel))
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads) - 1)]
    return "\n".join("  ".join([*map(str.rjust, line, widths), line[-1]]) for line in lines)


if __name__ == "__main__":
    main(sys.argv[1:])
