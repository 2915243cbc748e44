"""Fuzzing: random structured calls of every public function, the command line and the file readers; `make fuzz`.

    python tests/fuzz/run.py                                  everything: under ten minutes on two cores
    python tests/fuzz/run.py --seed 7 --only quantize         one target
    python tests/fuzz/run.py --seed 7 --only quantize --case 12     one case, with its whole error

Every case ends in a result that was judged, or in a documented error; anything else is a failure, and the exit code 1.
Seed, target and number of a case determine it. Each runs in a worker process with limits of time and memory.
"""

import argparse
import importlib
import json
import os
import platform
import secrets
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent), str(HERE.parent)]

from harness import FAILURE, REFUSED, RESULT, TARGETS  # noqa: E402
from pool import Pool  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

#: Modules that register targets.
MODULES = tuple(f"targets.{path.stem}" for path in sorted((HERE / "targets").glob("[a-z]*.py")))
RESULTS = HERE / "results" / "fuzz.json"
#: Seconds after which no further cases are begun.
LONGEST = 560
#: Seed of `make fuzz`, so that its counts can be compared; `--seed random` for another one.
SEED = 2026
VERSIONS = ("numpy", "ml_dtypes", "torch", "jax", "numba", "safetensors", "hypothesis")


def load(modules=MODULES):
    """Import the modules that register targets."""
    for module in modules:
        importlib.import_module(module)


def numbers_of(names, share):
    """Target name -> its case numbers, for a share of a full run."""
    return {name: range(max(1, round(TARGETS[name].cases * share))) for name in names}


def never_returned(tallies):
    """Public names that their targets promise to call, and that returned nothing in any case."""
    returned = {name for tally in tallies.values() for (name, outcome) in tally.calls if outcome == RESULT}
    return sorted({covered for name in tallies for covered in TARGETS[name].covers} - returned)


def print_tallies(console, tallies):
    """One row a target."""
    table = Table(title="cases by target", title_justify="left")
    table.add_column("target")
    for column in ("cases", "results", "documented errors", "failures", "s"):
        table.add_column(column, justify="right")
    for name, tally in tallies.items():
        counts = [tally.outcomes[outcome] for outcome in (RESULT, REFUSED, FAILURE)]
        style = "red" if counts[2] else None
        table.add_row(name, str(sum(counts)), *map(str, counts), f"{tally.seconds:.1f}", style=style)
    total = sum((tally.outcomes for tally in tallies.values()), Counter())
    counts = [total[outcome] for outcome in (RESULT, REFUSED, FAILURE)]
    seconds = sum(tally.seconds for tally in tallies.values())
    table.add_section()
    table.add_row("all", str(sum(counts)), *map(str, counts), f"{seconds:.1f}")
    console.print(table)


def summary(tallies, seed, seconds, not_run):
    """The counts as plain data."""
    total = sum((tally.outcomes for tally in tallies.values()), Counter())
    return {
        "command": "make fuzz",
        "seed": seed,
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in VERSIONS},
        "seconds": round(seconds),
        "cases": sum(total.values()),
        "results": total[RESULT],
        "documented_errors": total[REFUSED],
        "failures": total[FAILURE],
        "not_run": not_run,
        "public_names": len({covered for name in tallies for covered in TARGETS[name].covers}),
        "targets": {
            name: {
                "cases": sum(tally.outcomes.values()),
                "results": tally.outcomes[RESULT],
                "documented_errors": tally.outcomes[REFUSED],
                "failures": tally.outcomes[FAILURE],
            }
            for name, tally in tallies.items()
        },
    }


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def fuzz(numbers, seed, *, modules=MODULES, jobs=2, seconds=LONGEST, console=None):
    """Run cases; return (target name -> `pool.Tally`, cases that time did not allow)."""
    console = console or Console(stderr=True)
    total = sum(map(len, numbers.values()))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        pool = Pool(seed, modules, jobs, lambda done, name: progress.update(task, completed=done, description=name))
        tallies = pool.run(numbers, until=time.monotonic() + seconds)
    return tallies, total - pool.done


def main(argv=None):
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default=str(SEED), help=f"an integer, or random (default {SEED})")
    parser.add_argument("--only", action="append", default=[], metavar="TARGET", help="only this target; repeatable")
    parser.add_argument("--case", type=int, metavar="N", help="only this case of the one target")
    parser.add_argument("--share", type=float, default=1.0, metavar="X", help="share of a full run's cases (default 1)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="worker processes (default 2)")
    parser.add_argument("--json", metavar="FILE", help="write the counts here")
    arguments = parser.parse_args(argv)
    load()
    unknown = [name for name in arguments.only if name not in TARGETS]
    if unknown:
        parser.error(f"--only must be among {', '.join(TARGETS)}; got {unknown[0]}")
    if arguments.case is not None and len(arguments.only) != 1:
        parser.error("--case needs one --only TARGET")
    seed = secrets.randbits(32) if arguments.seed == "random" else int(arguments.seed)
    console = Console()
    console.print(f"seed {seed}")
    names = arguments.only or list(TARGETS)
    numbers = numbers_of(names, arguments.share)
    if arguments.case is not None:
        numbers = {names[0]: [arguments.case]}
    began = time.monotonic()
    tallies, not_run = fuzz(numbers, seed, jobs=arguments.jobs)
    print_tallies(console, tallies)
    for name, tally in tallies.items():
        for number, text in tally.failures:
            console.rule(f"python tests/fuzz/run.py --seed {seed} --only {name} --case {number}", align="left")
            console.print(escape(text), highlight=False)
    silent = [] if arguments.only or arguments.share < 1 or not_run else never_returned(tallies)
    if silent:
        console.print(f"never returned a result: {', '.join(silent)}", style="red")
    if not_run:
        console.print(f"{not_run} cases did not run: the time of {LONGEST} s was up", style="yellow")
    if arguments.json:
        text = json.dumps(summary(tallies, seed, time.monotonic() - began, not_run), indent=1) + "\n"
        Path(arguments.json).write_text(text)
    failed = any(tally.failures for tally in tallies.values()) or bool(silent)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
