"""The `refops` command: report, inspect, explain, formats.

Arguments and exit codes. The work is done in `refops.report`, `refops.survey`, `refops.explain` and `refops.files`, and
shown by `refops.display`. Exit codes: 0 fine, 1 the report found a mismatch, 2 bad use (one line on stderr that names
the argument, its value and the rule). Results go to stdout, progress bars to stderr. With `--json` stdout holds one
JSON document and nothing else.
"""

import argparse
import os
import sys
from contextlib import suppress

import numpy as np

import refops
from refops.arguments import require_high_precision_dtype
from refops.display.console import print_json, printable, progress_bar
from refops.display.explain import print_walk, walk_as_dict
from refops.display.formats import codes_as_dict, format_as_dict, print_codes, print_formats
from refops.display.inspect import inspection_as_dict, print_inspection
from refops.display.numbers import dimensions
from refops.display.plot import PlotError, draw, require_drawable
from refops.display.report import print_report
from refops.explain import BlockError, as_tensor_of, explain_block
from refops.files import SUFFIXES, FileError, UnsupportedTensorError, open_tensors
from refops.formats import FORMATS
from refops.report import REAL_TENSORS, SECTIONS, VECTORS, make_report
from refops.survey import SCALINGS, match_names, measure, tensor_facts

EXIT_FINE, EXIT_MISMATCH, EXIT_BAD_USE = 0, 1, 2
#: What a shell reports for a program that Ctrl-C or a closed pipe ended.
EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 130, 141
EXAMPLES = """\
examples:
  refops report
  refops inspect model.safetensors --tensor '*.weight' --plot survey.png
  refops explain --scaling mxfp8 --values 0.1,-0.25,1,3
  refops explain model.safetensors --tensor w --scaling nvfp4-1x16 --row 3 --block 2
  refops formats e2m1

exit codes: 0 fine, 1 the report found a mismatch, 2 bad use"""
SCALING_LIST = "scalings:\n" + "\n".join(f"  {s.name:17} {s.description}" for s in SCALINGS.values())


class UsageError(Exception):
    """Bad use; the message is one line that names the argument, its value and the rule."""


def main(argv=None):
    """Run the command line; return the exit code.

    Args:
        argv: arguments without the program's name; default `sys.argv[1:]`.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # a replaced stream cannot be reconfigured
            stream.reconfigure(errors="backslashreplace")  # names from files print under any encoding
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except (UsageError, FileError, PlotError) as error:
        print(f"refops: error: {printable(str(error))}", file=sys.stderr)
        return EXIT_BAD_USE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `refops ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED


def _run(argv):
    try:
        arguments = _parser().parse_args(_join_values(argv))
    except SystemExit as leave:  # argparse: --help, --version
        return leave.code or EXIT_FINE
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
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message):
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parser():
    parser = _Parser(
        prog="refops",
        description="The golden reference for fused activations and low-precision scaling.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"refops {refops.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name, run, text, epilog=None):
        added = commands.add_parser(name, help=text, description=text, epilog=epilog)
        added.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
        added.set_defaults(run=run)
        return added

    p = command("report", run_report, "Check every operation and path, survey real tensors, end with a verdict.")
    p.add_argument("--vectors", metavar="DIR", default=str(VECTORS), help="golden vectors (default: the repository's)")
    p.add_argument("--data", metavar="FILE", default=str(REAL_TENSORS), help="real tensors (default: the repository's)")
    p.add_argument("--section", action="append", choices=list(SECTIONS), default=[], help="only this one; repeatable")

    p = command("inspect", run_inspect, "Show what each scaling does to each tensor in a file.", epilog=SCALING_LIST)
    p.add_argument("file", metavar="FILE", help=f"tensors: {', '.join(SUFFIXES)}")
    p.add_argument("--tensor", action="append", default=[], metavar="NAME", help="only this one; glob, repeatable")
    p.add_argument("--scaling", action="append", default=[], metavar="NAME", help="only this one; glob, repeatable")
    p.add_argument("--dtype", choices=["bfloat16"], help="read raw 2-byte elements (npy cannot say so) as bfloat16")
    p.add_argument(
        "--plot", metavar="FILE", help="draw SQNR and flushed share; the suffix gives the format (.png, .pdf, .svg)"
    )

    p = command(
        "explain", run_explain, "Walk one block: amax, scale bits, each element's code and error.", epilog=SCALING_LIST
    )
    p.add_argument("file", metavar="FILE", nargs="?", help=f"tensors: {', '.join(SUFFIXES)}")
    p.add_argument("--values", metavar="LIST", help='numbers instead of a file, such as "0.1,-0.25,1,nan"')
    p.add_argument("--scaling", metavar="NAME", required=True, help="one of the scalings below")
    p.add_argument("--tensor", metavar="NAME", help="which tensor of the file")
    p.add_argument(
        "--row", type=_index, default=0, metavar="R", help="row of the (M, K) tensor; with --columnwise a column"
    )
    p.add_argument("--block", type=_index, default=0, metavar="B", help="number of the block along it")
    p.add_argument("--columnwise", action="store_true", help="the columnwise copy, blocks along M (nvfp4-rht: always)")
    p.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        help="round --values to it (default float32); bfloat16 also reads a file's raw 2-byte elements",
    )

    p = command("formats", run_formats, "Show the number formats, or every code of one.")
    p.add_argument("format", metavar="FORMAT", nargs="?", type=str.lower, help=f"one of {', '.join(FORMATS)}")
    return parser


def _index(text):
    """argparse type: an integer >= 0."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be an integer >= 0; got {text!r}")
    return value


# --- report ----------------------------------------------------------------------------------------------------------


def run_report(arguments):
    """`refops report`: all checks, the survey, one line of verdict."""
    with progress_bar() as show:
        report = make_report(
            vectors=arguments.vectors,
            data=arguments.data,
            sections=[s for s in SECTIONS if not arguments.section or s in arguments.section],
            progress=show,
        )
    if arguments.json:
        print_json(report.as_dict())
    else:
        print_report(report)
    return EXIT_FINE if report.ok else EXIT_MISMATCH


# --- inspect ---------------------------------------------------------------------------------------------------------


def run_inspect(arguments):
    """`refops inspect FILE`: a table of measurements for each tensor."""
    scalings = [SCALINGS[name] for name in _match(arguments.scaling, SCALINGS, "--scaling")]
    if arguments.plot:
        require_drawable(arguments.plot)
    inspected, skipped = [], []
    with open_tensors(arguments.file) as tensors, progress_bar() as show:
        by_name = {t.name: t for t in tensors}
        names = _match(arguments.tensor, by_name, "--tensor")
        for done, name in enumerate(names):
            show(done, len(names), name)
            try:
                x, note = by_name[name].load(raw_bfloat16=arguments.dtype == "bfloat16")
            except UnsupportedTensorError as reason:
                skipped.append((name, str(reason)))
            else:
                inspected.append((name, note, tensor_facts(x), [measure(x, named) for named in scalings]))
    if arguments.plot:
        draw(arguments.plot, [(name, measurements) for name, _, _, measurements in inspected])
    if arguments.json:
        print_json(inspection_as_dict(arguments.file, inspected, skipped))
    else:
        print_inspection(inspected, skipped, drawn_in=arguments.plot)
    return EXIT_FINE


def _match(patterns, names, argument):
    """Names that match, or a UsageError that lists what there is."""
    try:
        return match_names(patterns, list(names))
    except LookupError as error:
        raise UsageError(f"{argument} must match one of {_listed(names)}; got {error.args[0]!r}") from None


def _listed(names, most=20):
    names = list(names)
    if not names:
        return "no names (there are none)"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# --- explain ---------------------------------------------------------------------------------------------------------


def run_explain(arguments):
    """`refops explain`: one block, step by step."""
    if arguments.scaling not in SCALINGS:
        raise UsageError(f"--scaling must be one of {', '.join(SCALINGS)}; got {arguments.scaling!r}")
    if (arguments.file is None) == (arguments.values is None):
        got = "neither" if arguments.file is None else "both"
        raise UsageError(f"give either FILE or --values; got {got} (see refops explain --help)")
    named = SCALINGS[arguments.scaling]
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
    with open_tensors(arguments.file) as tensors:
        by_name = {t.name: t for t in tensors}
        name = arguments.tensor
        if name is None and len(by_name) == 1:
            (name,) = by_name
        if name not in by_name:
            got = "none" if name is None else repr(name)
            raise UsageError(f"--tensor must be one of {_listed(by_name)}; got {got}")
        try:
            x, note = by_name[name].load(raw_bfloat16=arguments.dtype == "bfloat16")
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
