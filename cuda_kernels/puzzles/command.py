"""`python -m cuda_kernels puzzles`: writes the file with the holes, or checks it and explains what is wrong first."""

import argparse
import sys
import traceback
import types
from pathlib import Path

from cuda_kernels.accesses import draw
from cuda_kernels.puzzles import checker, holes, solutions
from cuda_kernels.puzzles.checker import WRONG, Verdict
from cuda_kernels.puzzles.stopping import call_within, ended_within
from cuda_kernels.puzzles.table import PUZZLES

#: Seconds beyond the limit of a kernel after which one that cannot be stopped ends the command.
GRACE = 10
DESCRIPTION = """Ten kernels with holes, checked on any machine. The first time, FILE is written; open it, fill a hole,
and run the command again: it says which hole fails, for which element, and why. FILE is never overwritten.
`puzzles transpose` is `puzzles --only transpose`, where no file has that name.
Exit code 0: all solved, 1: not yet, 2: bad use."""


def main(arguments=None):
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cuda_kernels puzzles", description=DESCRIPTION)
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="your kernels (puzzles.py)")
    parser.add_argument("--only", metavar="N", help="one puzzle, by number or name, with its memory accesses drawn")
    parser.add_argument("--solutions", action="store_true", help="check the solutions that come with the package")
    options = parser.parse_args(arguments)
    if options.file and puzzles_called(str(options.file)) and not options.file.exists():
        if options.only is not None:
            parser.error(f"{options.file} is a puzzle and no file, and --only {options.only} names one too")
        options.only, options.file = str(options.file), None
    chosen = list(PUZZLES.values()) if options.only is None else puzzles_called(options.only)
    if not chosen:
        parser.error(f"--only: no puzzle has the number or name {options.only!r}; names: {', '.join(PUZZLES)}")
    if options.solutions and options.file:
        parser.error("--solutions checks the package's own file; leave FILE out")
    path = Path(solutions.__file__) if options.solutions else options.file or Path("puzzles.py")
    try:
        checker.require_simulator()
        if not path.exists() and path.suffix != ".py":
            parser.error(
                f"no file and no puzzle has the name {str(path)!r}; puzzles: {', '.join(PUZZLES)}; "
                "a new file with the kernels is written where FILE ends in .py"
            )
        if not path.exists() and not path.parent.is_dir():
            parser.error(f"FILE must lie in a folder that exists; got {str(path)!r}: there is no {str(path.parent)!r}")
        if not path.exists():
            return write(path, chosen[0])
        source = path.read_text(encoding="utf-8")
    except BrokenPipeError:  # `... | head`: nothing to report, and nobody who reads it
        raise
    except (OSError, ImportError, RuntimeError, UnicodeDecodeError) as error:
        print(f"puzzles: {error}", file=sys.stderr)
        return 2
    return judge(path, source, chosen, draw_all=options.only is not None)


def puzzles_called(word):
    """The puzzle with this number or name, in a list, or an empty one."""
    return [puzzle for puzzle in PUZZLES.values() if word in (str(puzzle.number), puzzle.name)]


def write(path, first):
    """Write the file with the holes; `first` is the puzzle to begin with."""
    text = Path(holes.__file__).read_text(encoding="utf-8")
    with path.open("x", encoding="utf-8") as file:  # never over another one
        try:
            file.write(text)
            file.flush()
        except BaseException:  # half a file would be judged by the next run
            path.unlink()
            raise
    print(f"{path} is written: {len(PUZZLES)} kernels with holes. Open it, replace the `...` of `{first.name}`,")
    print("and run this command again.")
    return 1


def judge(path, source, chosen, *, draw_all):
    """Check a file's kernels; print a line for each, and the first one that is not solved in detail."""
    try:
        with ended_within(checker.SECONDS + GRACE, path):
            functions = load(path, source)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's file does
        print(f"{path} cannot be run: {explain(path, error)}")
        return 1
    verdicts = []
    for puzzle in chosen:
        with ended_within(checker.SECONDS + GRACE, puzzle.name):
            verdicts.append(verdict_on(puzzle, functions, path))
        line = f"{puzzle.number:3}  {puzzle.name:12} {verdicts[-1].status:8}"
        print(line if verdicts[-1].solved else f"{line} {verdicts[-1].reason}", flush=True)
    solved = sum(verdict.solved for verdict in verdicts)
    print(f"{solved} of {len(verdicts)} solved.")
    for puzzle, verdict in zip(chosen, verdicts, strict=True):
        if draw_all or not verdict.solved:
            detail(path, puzzle, verdict)
            break
    if not draw_all:
        print("\n`--only N`, a number or a name, shows one of them alone, with what its threads ask memory for.")
    return 0 if solved == len(verdicts) else 1


def detail(path, puzzle, verdict):
    """What is known about one kernel."""
    print(f"\n{puzzle.number}. {puzzle.title} ({path})")
    print(f"  {verdict}".replace("\n", "\n  "))
    if verdict.accesses:
        print("\nThe first warp's accesses (# where a thread touches a sector of 32 bytes):")
        print(draw(verdict.accesses))


def load(path, source):
    """Names of a file's functions -> functions."""
    module = types.ModuleType("puzzles")
    module.__file__ = str(path)
    program = compile(source, str(path), "exec")
    call_within(checker.SECONDS, lambda: exec(program, module.__dict__))
    return module.__dict__


def verdict_on(puzzle, functions, path):
    """The verdict on one kernel of the file, or on its absence."""
    kernel = functions.get(puzzle.name)
    if kernel is None:
        return Verdict(puzzle.name, WRONG, f"{path} has no function {puzzle.name}")
    if not isinstance(kernel, types.FunctionType):
        return Verdict(puzzle.name, WRONG, f"{puzzle.name} is no function but {type(kernel).__name__}")
    return checker.check(kernel)


def explain(path, error):
    """An error of the file as a whole in one line, with the line of the file."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}"
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"
