"""`refops check` of a kernel that is given as code: run it here, on a software GPU, and take what it writes.

refops has no such GPU. A package that has one names a module as an entry point of the group `refops.runners`:

    run(source, entry, grid, block, arguments, *, shared, target, options, name, longest)
        -> what has `arrays`, the array arguments in their order as the kernel left them, and `described()`, one line of
        what it did
    is_ptx(text)                 whether a text is PTX
    Unwritten(shape, dtype)      an argument: an array that the kernel is to write
    DeviceError                  what `run` raises for a kernel that does something wrong
    TARGETS                      names of the GPUs that there are
"""

import math
import re
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

from refops.arguments import describe_array
from refops.commands.arguments import integer_argument, parse_file, read_file, read_raw
from refops.commands.usage import UsageError, listed, usage_errors
from refops.files import FileError
from refops.oracle.quantized_tensors import full_name

GROUP = "refops.runners"
KERNELS = """\
kernels: --ptx FILE or --cuda FILE is run here, on a software GPU, no GPU
  needed. --argument, once for each parameter of the kernel in its order:
  x, dy ...                      an input: a pointer to its elements
  rowwise_data, scale, y ...     an output: a pointer to memory for it, which
                                 nobody has written; scales with their padding
  amax_rowwise=0                 the same, every byte 0 at first
  amax_rowwise=FILE              the same, with the elements of a file at first,
                                 such as what an earlier launch wrote
  scratch:4096                   a pointer to 4096 bytes, 0 at first
  null                           a null pointer
  128, -1.5                      a number, as wide as the parameter
  The kernel is judged by what it wrote, and is WRONG where it touches memory
  that is not its own, reads what nobody wrote, races or hangs.

"""
#: Options that say something of a kernel, and nothing without one.
OPTIONS = ("entry", "grid", "block", "argument", "shared", "longest", "target", "compile_option")


def add_kernel(p):
    """Add the options that give a kernel as code."""
    size = "a size, or two or three joined by commas"
    p.add_argument("--ptx", metavar="FILE", help="run this kernel and judge what it writes")
    p.add_argument("--cuda", metavar="FILE", help="the same in CUDA C++, which NVRTC compiles")
    p.add_argument("--entry", metavar="NAME", help="the kernel's name; in CUDA C++ also NAME<...>")
    p.add_argument("--grid", metavar="N[,N[,N]]", type=_sizes, help=f"blocks of the grid: {size}")
    p.add_argument("--block", metavar="N[,N[,N]]", type=_sizes, help="threads of a block, likewise")
    p.add_argument("--argument", action="append", default=[], metavar="WORD", help="an argument of the kernel, below")
    p.add_argument("--shared", metavar="BYTES", type=_bytes, help="dynamic shared memory of a block (default 0)")
    p.add_argument(
        "--longest",
        metavar="N",
        type=_instructions,
        help="instructions of a warp in a block, after which its loop is taken to be endless (default 2^24)",
    )
    p.add_argument("--target", metavar="sm_NN", help="the GPU that runs it (default sm_90)")
    p.add_argument(
        "--compile-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="for --cuda, handed to NVRTC: --compile-option=-DROWS=32; repeatable",
    )


def _sizes(text):
    words = text.split(",")
    if len(words) > 3:
        integer_argument(text, "one to three sizes joined by commas")
    return tuple(integer_argument(word, "sizes above 0 joined by commas", lambda n: n > 0) for word in words)


def _bytes(text):
    return integer_argument(text, "a number of bytes", lambda n: n >= 0)


def _instructions(text):
    return integer_argument(text, "a number above 0", lambda n: n > 0)


# --- the options as a launch -----------------------------------------------------------------------------------------


def gives_kernel(arguments):
    """Whether the command line gives a kernel; without one, options that only a kernel can use are an error."""
    if arguments.ptx is not None or arguments.cuda is not None:
        return True
    for name in OPTIONS:
        if getattr(arguments, name) not in (None, []):
            raise UsageError(f"--{name.replace('_', '-')} needs a kernel, --ptx or --cuda; got neither")
    return False


@dataclass(frozen=True)
class Written:
    """What a kernel wrote.

    Attributes:
        outputs: output name -> array.
        described: one line of what the kernel did.
        changed: names of the inputs that it changed.
        fault: what it did wrong, "" for nothing; then there are no outputs.
    """

    outputs: dict[str, np.ndarray]
    described: str = ""
    changed: tuple[str, ...] = ()
    fault: str = ""


def run_kernel(arguments, case):
    """Run the kernel of the command line.

    Args:
        arguments: the command line's. case: `refops.oracle.operation.Case`, whose inputs it reads.

    Returns:
        `Written`.

    Raises:
        UsageError: an option that does not fit, or nothing on this machine to run it with.
    """
    for name in ("entry", "grid", "block"):
        if getattr(arguments, name) is None:
            raise UsageError(f"--{name} is needed with --ptx and --cuda; got none")
    runner = _runner()
    path, source = _source_of(arguments, runner)
    target = arguments.target or "sm_90"
    if target not in runner.TARGETS:
        raise UsageError(f"--target must be one of {', '.join(runner.TARGETS)}; got {target!r}")
    words = [_argument_of(text, case, runner) for text in arguments.argument]
    names = [word.output for word in words if word.output is not None]
    if not names:
        raise UsageError(f"--argument must give at least one output, {', '.join(case.slots)}; got none")
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise UsageError(f"--argument must give {repeated} once; got it {names.count(repeated)} times")
    try:
        with usage_errors(_option_of(arguments)):
            ran = runner.run(
                source,
                arguments.entry,
                arguments.grid,
                arguments.block,
                [word.value for word in words],
                shared=arguments.shared or 0,
                target=target,
                options=tuple(arguments.compile_option),
                name=path.name,
                **({} if arguments.longest is None else {"longest": arguments.longest}),
            )
    except runner.DeviceError as error:
        return Written({}, fault=re.sub(r"arguments\[(\d+)\]", lambda m: arguments.argument[int(m[1])], str(error)))
    except (RuntimeError, ImportError, OSError) as error:  # nothing here to run it with
        raise UsageError(" ".join(str(error).split())) from None
    arrays = [word for word in words if word.is_array]
    written = {word.output: array for word, array in zip(arrays, ran.arrays, strict=True) if word.output is not None}
    changed = tuple(
        word.text
        for word, array in zip(arrays, ran.arrays, strict=True)
        if word.text in case.inputs and array.tobytes() != word.value.tobytes()
    )
    return Written(written, ran.described(), changed)


def _source_of(arguments, runner):
    """(path, text) of the kernel's file."""
    if arguments.ptx is not None and arguments.cuda is not None:
        raise UsageError("give either --ptx or --cuda; got both")
    option, given = ("--ptx", arguments.ptx) if arguments.ptx is not None else ("--cuda", arguments.cuda)
    if option == "--ptx" and arguments.compile_option:
        raise UsageError(f"--compile-option goes with --cuda; got {arguments.compile_option[0]!r} with --ptx")
    path = Path(given)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} must be a text file that can be read; got {given!r}: {error}") from None
    if option == "--ptx" and not runner.is_ptx(text):
        raise UsageError(f"--ptx must be PTX, which has a line .version; got {given!r}, which has none")
    if option == "--cuda" and runner.is_ptx(text):
        raise UsageError(f"--cuda must be CUDA C++; got {given!r}, which is PTX: give it with --ptx")
    return path, text


def _runner():
    """The module that runs kernels."""
    for found in entry_points(group=GROUP):
        try:
            return found.load()
        except ImportError as error:
            raise UsageError(
                f"--ptx and --cuda need the software GPU: pip install '.[emulator]' in a clone; got: {error}"
            ) from None
    raise UsageError("--ptx and --cuda need a package that runs kernels; got none: install this one, pip install .")


def _option_of(arguments):
    """Function from the name of an argument of the runner to the option that gave it."""

    def option(name):
        place = re.fullmatch(r"arguments\[(\d+)\]", name)
        if place:
            return f"--argument {arguments.argument[int(place[1])]!r}"
        return {"arguments": "--argument", "source": "--cuda", "options": "--compile-option"}.get(name, f"--{name}")

    return option


# --- arguments -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Argument:
    """One argument of the kernel.

    Attributes:
        text: the word. value: what the runner takes.
        is_array: whether the runner gives an array back for it.
        output: the output of the operation that it is, None for everything else.
    """

    text: str
    value: Any
    is_array: bool
    output: str | None = None


def _argument_of(text, case, runner):
    """The argument that a word of --argument stands for."""
    if text == "null":
        return _Argument(text, None, False)
    if text in case.inputs:
        return _Argument(text, np.ascontiguousarray(case.inputs[text]), True)
    name, equals, _ = text.partition("=")
    full = full_name(name, case.slots)
    if full in case.slots:
        slot = case.slots[full]
        array = _initial(text, full, slot) if equals else runner.Unwritten(slot.shape, slot.dtype)
        return _Argument(text, array, True, full)
    scratch = re.fullmatch(r"scratch:(\d+)", text, re.ASCII)
    if scratch:
        try:
            return _Argument(text, np.zeros(int(scratch[1]), np.uint8), True)
        except (ValueError, MemoryError) as error:
            raise UsageError(f"--argument scratch must fit into memory; got {text!r}: {error}") from None
    for number in (lambda word: int(word, 0), float):
        try:
            return _Argument(text, number(text), False)
        except ValueError:
            continue
    known = [*case.inputs, *case.slots, "null", "scratch:BYTES"]
    raise UsageError(f"--argument must be a number or one of {listed(known, len(known))}; got {text!r}")


def _initial(text, full, slot):
    """What an output, given as NAME=0 or NAME=FILE, holds at first."""
    name, _, initial = text.partition("=")
    if initial == "0":
        return np.zeros(slot.shape, slot.dtype)
    option = f"--argument {name}"
    try:
        spec = parse_file(initial, option)
        if not Path(spec.path).is_file():
            rule = f"{name}, {name}=0 for zeros at first, or {name}=FILE for the elements of a file"
            raise UsageError(f"{option} must be {rule}; got {text!r}, and there is no such file")
        if spec.raw and spec.shape is None:
            return read_raw(spec, option, ((slot.shape, slot.dtype),))
        found = read_file(spec, option, full)
    except FileError as error:
        raise UsageError(f"{option} {error}") from None
    if len(found) != 1:
        raise UsageError(f"{option} must name one of {listed(found)} after :; got {initial!r}")
    (array,) = found.values()
    bytes_alike = array.dtype.itemsize == slot.dtype.itemsize == 1
    if array.size != math.prod(slot.shape) or not (bytes_alike or array.dtype == slot.dtype):
        wanted = f"{slot.dtype} of shape {slot.shape}"
        raise UsageError(f"{option} must hold {wanted}; got {describe_array(array)} in {initial!r}")
    return np.ascontiguousarray(array).view(slot.dtype).reshape(slot.shape)
