"""The `refops` command: report, inspect, explain, check, golden, formats.

Arguments and exit codes. The work is done in `refops.report`, `refops.survey`, `refops.explain` and `refops.files`, and
shown by `refops.display`; check and golden are in `refops.commands`. Exit codes: 0 fine, 1 the report or the check
found a mismatch, 2 bad use (one line on stderr that names the argument, its value and the rule) or nothing to measure
or compare. Results go to stdout, progress bars to stderr. With `--json` stdout holds one JSON document and nothing
else.
"""

import argparse
import math
import os
import shutil
import sys
import textwrap
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path

import numpy as np

import refops
from refops.arguments import dimensions, require_high_precision_dtype
from refops.checkpoints import decoded
from refops.commands.arguments import add_set, changed
from refops.commands.check import add_check
from refops.commands.golden import add_golden
from refops.commands.usage import EXIT_BAD_USE, EXIT_FINE, EXIT_MISMATCH, UsageError, listed, match, match_one
from refops.display.console import ProgressBar, print_json, printable, stdout_console
from refops.display.explain import print_walk, walk_as_dict
from refops.display.formats import codes_as_dict, format_as_dict, print_codes, print_formats
from refops.display.inspect import (
    LEGEND,
    SUMMARY_LEGEND,
    inspection_as_dict,
    print_lines,
    print_skipped,
    print_summary,
    print_tensor,
    worst_first,
    write_csv,
)
from refops.display.inspect_page import write_page
from refops.display.plot import PlotError, draw, require_drawable, require_matplotlib
from refops.display.report import print_report
from refops.display.survey import TENSORS_ACROSS
from refops.explain import BlockError, as_tensor_of, explain_block
from refops.files import SUFFIXES, FileError, UnsupportedTensorError, open_tensors
from refops.formats import FORMATS
from refops.report import SECTIONS, has_vectors, make_report
from refops.survey import SCALINGS, WORTH_COMPILING, Meter

#: What a shell reports for a program that Ctrl-C or a closed pipe ended.
EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 130, 141
EXAMPLES = """\
examples:
  refops report
  refops inspect model.safetensors --tensor '*.weight' --plot survey.png
  refops inspect checkpoint/ --scaling mxfp8 --worst 10 --html survey.html
  refops explain --scaling mxfp8 --values 0.1,-0.25,1,3
  refops explain model.safetensors --tensor w --scaling nvfp4-1x16 --row 3
  refops check --op swiglu --scaling mxfp8 --input x.npy --data q.bin
  refops golden --op swiglu --scaling mxfp8 --shape 64x256 --out golden
  refops formats e2m1

exit codes: 0 fine or INCOMPLETE, 1 a mismatch, 2 bad use or nothing measured"""
#: What FILE may be where a command reads tensors.
TENSOR_FILES = (
    f"tensors: {', '.join(SUFFIXES)}; the index (.safetensors.index.json) or folder of a checkpoint in shards"
)
#: A tensor of more than two dimensions whose last one is below this is taken for the weight of a convolution, and its
#: last dimension for one of the kernel's, which no product sums along. The note that says so.
SHORT_OF_A_BLOCK, AS_CONVOLUTION = 32, "a convolution, as the matrix (first dimension, all others) of its product"
#: Columns of a help text, and of the names of scalings in it.
HELP_WIDTH, NAME_WIDTH = 80, 20
SCALING_LIST = "scalings:\n" + "\n".join(
    textwrap.fill(
        s.description,
        HELP_WIDTH,
        initial_indent=f"  {s.name}".ljust(NAME_WIDTH),
        subsequent_indent=" " * NAME_WIDTH,
    )
    for s in SCALINGS.values()
)


def main(argv=None):
    """Run the command line; return the exit code.

    Args:
        argv: arguments without the program's name; default `sys.argv[1:]`.
    """
    if sys.stdout is None:  # `refops ... >&-`
        print("refops: error: stdout must be open; got none", file=sys.stderr)
        return EXIT_BAD_USE
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # a replaced stream cannot be reconfigured
            stream.reconfigure(errors="backslashreplace")  # names from files print under any encoding
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except (UsageError, FileError, PlotError) as error:
        argument = "FILE " if isinstance(error, FileError) else ""
        print(f"refops: error: {argument}{printable(str(error))}", file=sys.stderr)
        return EXIT_BAD_USE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `refops ... | head`: nobody reads on
        _discard_stdout()
        return EXIT_PIPE_CLOSED
    except OSError as error:  # a full disk behind `refops ... > file`
        print(f"refops: error: stdout must be writable; got {printable(str(error))}", file=sys.stderr)
        _discard_stdout()
        return EXIT_BAD_USE


def _discard_stdout():
    """Let the interpreter's last flush go nowhere: it would fail once more, with a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv):
    try:
        arguments, unknown = _parser().parse_known_args(_join_values(argv))
    except SystemExit as leave:  # argparse: --help, --version
        return leave.code or EXIT_FINE
    if unknown:  # argparse's own error names no command
        command = arguments.command
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)} (see refops {command} --help)")
    return arguments.run(arguments)


# --- the parser ------------------------------------------------------------------------------------------------------


def _join_values(argv):
    """Write `--values -1,2` as `--values=-1,2`: argparse would take the list for an option."""
    joined = []
    for word in argv:
        if joined and joined[-1] == "--values":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


class _Parser(argparse.ArgumentParser):
    """argparse with errors in one line and no abbreviated options."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=_help_formatter, **options)

    def error(self, message):
        raise UsageError(f"{message} (see {self.prog} --help)")


def _help_formatter(prog):
    width = min(HELP_WIDTH, shutil.get_terminal_size().columns - 2)
    return argparse.RawDescriptionHelpFormatter(prog, width=width)


def _parser():
    parser = _Parser(
        prog="refops",
        description="The golden reference for fused activations and low-precision scaling.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"refops {refops.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name, run, text, more="", epilog=None):
        added = commands.add_parser(name, help=text, description=text + more, epilog=epilog)
        added.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
        added.set_defaults(run=run)
        return added

    p = command("report", run_report, "Check every operation and path, survey real tensors, end with a verdict.")
    p.add_argument("--vectors", metavar="DIR", help="golden vectors (default: the clone's)")
    p.add_argument("--data", metavar="FILE", help="real tensors (default: the clone's)")
    p.add_argument(
        "--processes",
        type=_at_least(1),
        default=_available_cpus(),
        metavar="N",
        help="number of processes that share the work (default: one per CPU)",
    )
    p.add_argument(
        "--section",
        action="append",
        choices=list(SECTIONS),
        default=[],
        metavar="NAME",
        help=f"only this one of {', '.join(SECTIONS)}; repeatable",
    )

    p = command(
        "inspect",
        run_inspect,
        "Show what each scaling does to each tensor in a file.",
        "\nUp to ten tensors get a table each, more a line each, the worst first. Codes\n"
        "of a quantized checkpoint are dequantized where their scales are known.\n"
        "One core measures about 20 million elements a second and scaling. More than\n"
        f"{WORTH_COMPILING / 1e6:.0f} million in a file are measured some ten times as fast where compiled code\n"
        "is installed (pip install '.[host]'), once that is compiled: seconds a scaling.",
        epilog=SCALING_LIST,
    )
    p.add_argument("file", metavar="FILE", help=TENSOR_FILES)
    p.add_argument("--tensor", action="append", default=[], metavar="NAME", help="only this one; glob, repeatable")
    p.add_argument(
        "--scaling", action="append", type=str.lower, default=[], metavar="NAME", help="only this one; glob, repeatable"
    )
    add_set(p)
    shown = p.add_mutually_exclusive_group()
    shown.add_argument("--tables", action="store_true", help="a table for each tensor, however many there are")
    shown.add_argument(
        "--summary", action="store_true", help="SQNR alone: one table, or a line each beyond ten tensors"
    )
    shown.add_argument(
        "--worst",
        metavar="N",
        type=_at_least(1),
        help="only the N tensors of lowest SQNR, a line each; so with --json and --plot, but --csv and --html have all",
    )
    p.add_argument("--dtype", choices=["bfloat16"], help="read raw 2-byte elements (npy cannot say so) as bfloat16")
    p.add_argument(
        "--plot", metavar="FILE", help="draw SQNR and flushed share; the suffix gives the format (.png, .pdf, .svg)"
    )
    p.add_argument("--csv", metavar="FILE", help="write a row for each tensor and scaling")
    p.add_argument("--html", metavar="FILE", help="write one page with plots and all numbers")

    p = command(
        "explain", run_explain, "Walk one block: amax, scale bits, each element's code and error.", epilog=SCALING_LIST
    )
    p.add_argument("file", metavar="FILE", nargs="?", help=TENSOR_FILES)
    p.add_argument("--values", metavar="LIST", help='numbers instead of a file, such as "0.1,-0.25,1,nan"')
    p.add_argument("--scaling", metavar="NAME", type=str.lower, required=True, help="one of the scalings below")
    add_set(p)
    p.add_argument("--tensor", metavar="NAME", help="which tensor of the file; a glob that matches one")
    p.add_argument(
        "--row", type=_at_least(0), default=0, metavar="R", help="row of the (M, K) tensor; with --columnwise a column"
    )
    p.add_argument("--block", type=_at_least(0), default=0, metavar="B", help="number of the block along it")
    p.add_argument("--columnwise", action="store_true", help="the columnwise copy, blocks along M (nvfp4-rht: always)")
    p.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        help="round --values to it (default float32); bfloat16 also reads a file's raw 2-byte elements",
    )

    add_check(command, SCALING_LIST)
    add_golden(command, SCALING_LIST)

    p = command("formats", run_formats, "Show the number formats, or every code of one.")
    p.add_argument("format", metavar="FORMAT", nargs="?", type=str.lower, help=f"one of {', '.join(FORMATS)}")
    return parser


def _at_least(least):
    """argparse type: an integer >= `least`."""

    def parse(text):
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be an integer >= {least}; got {text!r}")
        return value

    return parse


def _available_cpus():
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- report ----------------------------------------------------------------------------------------------------------


def run_report(arguments):
    """`refops report`: all checks, the survey, one line of verdict."""
    vectors, data = arguments.vectors, arguments.data
    if vectors is not None and not has_vectors(vectors):
        raise UsageError(f"--vectors must be a directory of golden vectors (*.npz); got {vectors!r}")
    if data is not None and not Path(data).exists():
        raise UsageError(f"--data must be an existing file; got {data!r}")
    try:
        with ProgressBar() as show:
            report = make_report(
                vectors=vectors,
                data=data,
                sections=[s for s in SECTIONS if not arguments.section or s in arguments.section],
                progress=show,
                processes=arguments.processes,
            )
    except FileError as error:
        raise UsageError(f"--data {error}") from None
    except BrokenProcessPool:
        rule = "each must live until its work is done (is memory short?); try --processes 1"
        raise UsageError(f"--processes {arguments.processes}: one of them was ended: {rule}") from None
    if arguments.json:
        print_json(report.as_dict())
    else:
        print_report(report)
    if report.unexplained:
        return EXIT_MISMATCH
    return EXIT_FINE if report.ok else EXIT_BAD_USE


# --- inspect ---------------------------------------------------------------------------------------------------------


def run_inspect(arguments):
    """`refops inspect FILE`: a table of measurements for each tensor, a line for each of many, or the SQNR of all."""
    if arguments.json and (arguments.summary or arguments.tables):
        raise UsageError(f"give either --json or {'--summary' if arguments.summary else '--tables'}; got both")
    scalings = [SCALINGS[name] for name in match(arguments.scaling, SCALINGS, "--scaling")]
    if arguments.set and len(scalings) != 1:
        raise UsageError(f"--set needs --scaling that names one scaling; got {arguments.set[0]!r} with {len(scalings)}")
    scalings = [changed(named, arguments.set) for named in scalings]
    _require_writable(arguments)
    console, inspected, skipped = stdout_console(), [], []
    with open_tensors(arguments.file) as tensors, ProgressBar() as show:
        by_name = {t.name: t for t in decoded(tensors)}
        names = match(arguments.tensor, by_name, "--tensor")
        if arguments.plot:
            require_drawable(arguments.plot, min(len(names), arguments.worst or len(names)))
        meter = Meter(sum(math.prod(shape) for shape in (by_name[name].shape for name in names) if shape is not None))
        in_lines = arguments.worst or (len(names) > TENSORS_ACROSS and not arguments.tables)
        in_tables = not (in_lines or arguments.summary or arguments.json)
        for number, name in enumerate(names):

            def progress(done, scaling, number=number, name=name):
                show(number * len(scalings) + done, len(names) * len(scalings), f"{name}, {scaling}")

            try:
                inspected.append(_inspected(by_name[name], arguments, scalings, meter, progress))
            except UnsupportedTensorError as reason:
                skipped.append((name, str(reason)))
                continue
            if in_tables:
                with show.hidden():
                    print_tensor(console, *inspected[-1])
    measured = any(not m.reason for *_, measurements in inspected for m in measurements)
    shown = worst_first(inspected)[: arguments.worst] if arguments.worst else inspected
    written = _write_inspection(arguments, inspected, shown, skipped) if measured else []
    if arguments.json:
        print_json(inspection_as_dict(arguments.file, shown, skipped))
    else:
        if in_lines:
            print_lines(console, inspected, skipped, arguments.worst)
        elif arguments.summary:
            print_summary(console, inspected)
        print_skipped(console, skipped)
        if measured:
            console.print(LEGEND if in_tables else SUMMARY_LEGEND, style="dim")
        for what, path in written:
            console.print(f"\n{what} {printable(path)}")
    if not measured:
        raise UsageError("nothing was measured" + ("" if names else ": the file holds no tensors"))
    return EXIT_FINE


def _inspected(tensor, arguments, scalings, meter, progress):
    """(name, note, facts, measurements) of a stored tensor, which is not kept."""
    x, note = tensor.load(raw_bfloat16=arguments.dtype == "bfloat16")
    if isinstance(x, np.ndarray) and x.ndim > 2 and x.shape[-1] < SHORT_OF_A_BLOCK:
        x, note = x.reshape(len(x), -1), "; ".join(filter(None, [note, AS_CONVOLUTION]))
    facts, measurements = meter.facts(x), []
    for done, named in enumerate(scalings):
        progress(done, named.name)
        measurements.append(meter.measure(x, named))
    return tensor.name, note, facts, measurements


def _require_writable(arguments):
    """Fail before the work where what it comes to cannot be written."""
    if arguments.html:
        require_matplotlib("--html")
    for option, path in (("--csv", arguments.csv), ("--html", arguments.html)):
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"{option} must name a file in an existing directory; got {path!r}")


def _write_inspection(arguments, inspected, shown, skipped):
    """Write the files that were asked for; return (what was done, path) of each."""
    written = []
    if arguments.plot:
        draw(arguments.plot, [(name, measurements) for name, _, _, measurements in shown])
        written.append(("drawn in", arguments.plot))
    for option, path, write in (("--csv", arguments.csv, write_csv), ("--html", arguments.html, write_page)):
        if path:
            try:
                write(path, arguments.file, inspected, skipped)
            except OSError as error:
                rule = f"{option} must name a file that can be written"
                raise UsageError(f"{rule}; got {path!r}: {error.strerror or error}") from None
            written.append(("written to", path))
    return written


# --- explain ---------------------------------------------------------------------------------------------------------


def run_explain(arguments):
    """`refops explain`: one block, step by step."""
    named = changed(SCALINGS[match_one(arguments.scaling, SCALINGS, "--scaling")], arguments.set)
    if (arguments.file is None) == (arguments.values is None):
        got = "neither" if arguments.file is None else "both"
        raise UsageError(f"give either FILE or --values; got {got} (see refops explain --help)")
    columnwise = arguments.columnwise or named.columnwise
    if arguments.file is None:
        x, origin = _tensor_of_values(arguments, named.scaling, columnwise)
    else:
        x, origin = _tensor_of_file(arguments)
    try:
        walk = explain_block(x, named.scaling, columnwise=columnwise, row=arguments.row, block=arguments.block)
    except BlockError as error:
        raise UsageError(f"--{error}") from None
    except ValueError as error:  # a shape that the scaling does not take
        raise UsageError(f"--scaling {named.name} does not fit the tensor: {error}") from None
    if arguments.json:
        print_json(walk_as_dict(named, origin, x, walk))
    else:
        print_walk(named, origin, walk)
    return EXIT_FINE


def _tensor_of_values(arguments, scaling, columnwise):
    """Return (tensor, what it is) for --values and --dtype."""
    if arguments.tensor is not None:
        raise UsageError(f"--tensor goes with FILE, not with --values; got {arguments.tensor!r}")
    text, dtype = arguments.values, arguments.dtype or "float32"
    numbers = []
    for word in text.replace(";", ",").split(","):
        if word.strip():
            try:
                numbers.append(float(word))
            except ValueError:
                wrong = f"got {word.strip()!r} in {text!r}"
                raise UsageError(f"--values must be numbers separated by commas; {wrong}") from None
    if not numbers:
        raise UsageError(f"--values must hold at least one number; got {text!r}")
    with np.errstate(over="ignore"):
        values = np.array(numbers, np.float64).astype(require_high_precision_dtype(dtype, "--dtype"))
    x, note = as_tensor_of(values, scaling, columnwise=columnwise)
    return x, f"--values rounded to {dtype}, {note}"


def _tensor_of_file(arguments):
    """Return (tensor, what it is) for FILE and --tensor."""
    if arguments.dtype not in (None, "bfloat16"):
        raise UsageError(f"--dtype with FILE must be bfloat16, for raw 2-byte elements; got {arguments.dtype!r}")
    with open_tensors(arguments.file) as tensors:
        by_name = {t.name: t for t in decoded(tensors)}
        if arguments.tensor is None and len(by_name) != 1:
            raise UsageError(f"--tensor must be one of {listed(by_name)}; got none")
        name = next(iter(by_name)) if arguments.tensor is None else match_one(arguments.tensor, by_name, "--tensor")
        try:
            x, note = by_name[name].load(raw_bfloat16=arguments.dtype == "bfloat16")
            x = np.asarray(x)
        except UnsupportedTensorError as reason:
            raise UsageError(f"--tensor must be one that refops can quantize; got {name!r}: {reason}") from None
    return x, f"{name}, {x.dtype} {dimensions(x.shape)}" + (f" ({note})" if note else "")


# --- formats ---------------------------------------------------------------------------------------------------------


def run_formats(arguments):
    """`refops formats [FORMAT]`: the formats, or the codes of one."""
    if arguments.format is None:
        if arguments.json:
            print_json({"formats": [format_as_dict(fmt) for fmt in FORMATS.values()]})
        else:
            print_formats(FORMATS.values())
        return EXIT_FINE
    if arguments.format not in FORMATS:
        raise UsageError(f"FORMAT must be one of {', '.join(FORMATS)}; got {arguments.format!r}")
    fmt = FORMATS[arguments.format]
    if arguments.json:
        print_json(codes_as_dict(fmt))
    else:
        print_codes(fmt)
    return EXIT_FINE
