"""Run the notebooks from top to bottom and compare what they show with what is committed: `make notebooks`.

    python notebooks/execute.py            # all; exit code 1 where one fails or is stale
    python notebooks/execute.py 03 07      # those whose names start so
    python notebooks/execute.py --write    # commit what was shown, and the pictures of the index

A cell's outputs must be the committed ones: text to the letter, figures to two of 255 levels in each pixel (a last bit
of a float moves a line's edge by less). What a cell writes to stderr, warnings too, is a fault. Cells' tags:

    varies             times and other things of the machine: only the kinds of output are compared
    raises-exception   the cell shows an error on purpose
    picture            its figure stands for the notebook in README.md; one cell of each notebook
    hide-input         folded on the site: cells that draw, helpers, answers. JupyterLab folds by jupyter.source_hidden
"""

import argparse
import asyncio
import base64
import io
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
from matplotlib import image
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from refops.replacing import replacing

FOLDER = Path(__file__).resolve().parent
#: Seconds that a notebook may take, on a laptop's cores, once its kernels are compiled.
LIMIT = 60
#: Levels of 255 that a pixel's channels may differ by.
PIXEL_TOLERANCE = 2
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


async def execute(path):
    """Run a notebook in a kernel of its own, in its folder.

    Returns:
        (notebook with its new outputs, seconds, problems: list of lines).
    """
    notebook, start = nbformat.read(path, as_version=4), time.perf_counter()
    client = NotebookClient(
        notebook,
        timeout=2 * LIMIT,
        kernel_name="python3",
        extra_arguments=["--log-level=40"],
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        await client.async_execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return notebook, time.perf_counter() - start, [f"fails: {str(error).strip()}"]
    seconds, problems = time.perf_counter() - start, []
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in code_cells(notebook):
        for output in cell.outputs:
            if output.get("name") == "stderr":
                problems.append(f"cell {number} writes to stderr: {output.text.strip()}")
            if str(path.parent.parent) in str(output):
                problems.append(f"cell {number} shows a path of this machine")
    return notebook, seconds, problems


def code_cells(notebook):
    """Yield (number of the cell from 1 on, cell) for each code cell."""
    return ((number, cell) for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code")


def is_tagged(cell, tag):
    """Whether a cell has the tag."""
    return tag in cell.metadata.get("tags", ())


def contents(output):
    """The parts of an output: kind -> text or base64 of a PNG."""
    if output.output_type == "stream":
        return {output.name: output.text}
    if output.output_type == "error":
        return {"error": f"{output.ename}: {output.evalue}"}
    parts = {kind: "".join(part) for kind, part in sorted(output.data.items())}
    if len(parts) > 1:  # beside a figure or a table stands what it is: <Figure size 750x320>
        parts.pop("text/plain", None)
    return parts


def pixels(png):
    """(height, width, channels) of a PNG given in base64, 0 to 255."""
    return np.round(255 * image.imread(io.BytesIO(base64.b64decode(png)), format="png")).astype(int)


def same_part(kind, old, new):
    """Whether two parts of one kind show the same."""
    if kind != "image/png" or old == new:
        return old == new
    old, new = pixels(old), pixels(new)
    return old.shape == new.shape and bool((np.abs(old - new) <= PIXEL_TOLERANCE).all())


def stale_cells(committed, executed):
    """Lines that say which cells do not show what is committed."""
    for (number, old), (_, new) in zip(code_cells(committed), code_cells(executed), strict=True):
        before, after = ([contents(output) for output in cell.outputs] for cell in (old, new))
        if [list(parts) for parts in before] != [list(parts) for parts in after]:
            yield f"cell {number} is stale: {kinds(before)} committed, {kinds(after)} shown"
        elif not is_tagged(new, "varies"):
            for was, now in zip(before, after, strict=True):
                for kind in was:
                    if not same_part(kind, was[kind], now[kind]):
                        yield f"cell {number} is stale in its {kind}{first_difference(kind, was[kind], now[kind])}"


def kinds(outputs):
    """The kinds of a cell's outputs in words."""
    return ", ".join(kind for parts in outputs for kind in parts) or "nothing"


def first_difference(kind, old, new):
    """The first line in which two texts differ."""
    if kind == "image/png":
        return ""
    for was, now in zip(f"{old}\n".split("\n"), f"{new}\n".split("\n"), strict=False):
        if was != now:
            return f":\n    committed {was}\n    shown     {now}"
    return ""


def picture(notebook):
    """Base64 of the figure that stands for a notebook, or None."""
    found = [
        parts["image/png"]
        for _, cell in code_cells(notebook)
        if is_tagged(cell, "picture")
        for parts in map(contents, cell.outputs)
        if "image/png" in parts
    ]
    return found[0] if len(found) == 1 else None


async def check(path, write):
    """Run one notebook; write it and its picture, or compare both. Return (seconds, problems)."""
    committed = nbformat.read(path, as_version=4)
    executed, seconds, problems = await execute(path)
    if seconds > LIMIT and not problems:  # the first run on a machine compiles kernels, which are kept
        executed, seconds, problems = await execute(path)
    if seconds > LIMIT:
        problems.append(f"takes {seconds:.0f} s, more than {LIMIT}")
    shown, kept = picture(executed), path.parent / "pictures" / f"{path.stem}.png"
    if not problems:
        if shown is None:
            problems.append("has no figure of a cell tagged picture, or several")
        elif write:
            kept.parent.mkdir(exist_ok=True)
            with replacing(kept) as new:
                new.write_bytes(base64.b64decode(shown))
            with replacing(path) as new:
                nbformat.write(executed, new)
        else:
            problems += stale_cells(committed, executed)
            if not kept.exists() or not same_part("image/png", base64.b64encode(kept.read_bytes()).decode(), shown):
                problems.append(f"pictures/{kept.name} is stale")
    return seconds, problems


def main(arguments=None):
    """The command line. Return the exit code: 1 where a notebook fails or is stale, 2 for bad use."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("names", nargs="*", help="starts of the names of notebooks; all without")
    parser.add_argument("--write", action="store_true", help="keep what the notebooks show")
    parser.add_argument("--jobs", type=int, default=2, help="notebooks at a time (2)")
    options = parser.parse_args(arguments)
    paths = [path for path in sorted(FOLDER.glob("*.ipynb")) if path.name.startswith(tuple(options.names) or "")]
    if not paths:
        parser.error(f"no notebook's name starts with {options.names}")
    return asyncio.run(check_all(paths, options.write, options.jobs))


async def check_all(paths, write, jobs):
    """Check notebooks, `jobs` at a time, and print a line for each. Return the exit code."""
    free = asyncio.Semaphore(jobs)

    async def check_and_print(path):
        async with free:
            seconds, problems = await check(path, write)
        print(f"{path.name:40} {seconds:5.1f} s  {'FAILED' if problems else 'ok'}", flush=True)
        for problem in problems:
            print(f"  {problem}")
        return bool(problems)

    return int(any(await asyncio.gather(*map(check_and_print, paths))))


if __name__ == "__main__":
    sys.exit(main())
