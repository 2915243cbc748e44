"""Where output goes: tables and JSON to stdout, a progress bar to stderr."""

import json
import math
import sys
from contextlib import contextmanager

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

#: Columns where stdout is no terminal.
PIPE_WIDTH = 120


def printable(text):
    """`text` with control characters spelled out: names come from files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_json(document):
    """Print one JSON document; NaN and infinities become null."""
    print(json.dumps(_plain(document), allow_nan=False, indent=1))


def _plain(value):
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Stdout(Console):
    """rich's console, except that the caller handles a closed pipe: rich would exit with 1, which means a mismatch.

    Where it is no terminal, lines do not end in the spaces that rich fills tables with.
    """

    def on_broken_pipe(self):
        raise BrokenPipeError

    def print(self, *objects, **options):
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        for line in captured.get().removesuffix("\n").split("\n"):
            self.file.write(f"{line.rstrip()}\n")
        self.file.flush()


def stdout_console():
    """A console for stdout that takes strings literally."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return _Stdout(width=width, markup=False, highlight=False, emoji=False)


def make_table(*columns, rule=True):
    """A plain table; a column whose name starts with "<" is left-aligned text, the others are numbers.

    Text columns but the first may wrap in a narrow terminal.
    """
    table = Table(box=box.SIMPLE_HEAD if rule else None, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for i, name in enumerate(columns):
        is_text = name.startswith("<")
        table.add_column(
            name.removeprefix("<"),
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=not is_text or i == 0,
        )
    return table


def let_first_column_wrap(console, table, least):
    """Let the first column of a table wrap beyond `least` columns, and beyond the room that the others leave it."""
    first = table.columns[0]
    first.no_wrap, first.max_width = False, least
    first.max_width += max(0, console.width - _natural_width(console, table))


def _natural_width(console, table):
    """The columns that a table takes where the terminal has them all."""
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def print_table(console, table):
    """Print a table and an empty line, its columns closer together where it is wider than the terminal."""
    if _natural_width(console, table) > console.width:
        table.padding = (0, 0, 0, 0)
    console.print(table)
    console.print()


class ProgressBar:
    """A bar on stderr where that is a terminal, nothing elsewhere: `with ProgressBar() as show: show(1, 9, "what")`."""

    def __init__(self):
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description:40.40}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self):
        self._start()
        return self

    def __exit__(self, *error):
        self._stop()

    def _start(self):
        if not self._bar.disable:  # before rich 15 a bar that is not shown ends with an empty line
            self._bar.start()

    def _stop(self):
        if not self._bar.disable:
            self._bar.stop()

    def __call__(self, done, total, what):
        """Show how far the work is."""
        self._bar.update(self._task, completed=done, total=total, description=printable(what))

    @contextmanager
    def hidden(self):
        """Hide the bar while the caller prints to the same terminal."""
        self._stop()
        yield
        self._start()
