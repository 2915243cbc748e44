"""Compile every kernel without a GPU and report what the hardware would run: `python -m cuda_kernels report`.

    kernel -> PTX (NVVM) -> SASS (ptxas, nvdisasm)

For each kernel of `catalogue` and each target: registers, spills, local and shared memory, wide accesses, instructions
for each byte of memory traffic, and the share of the issue rate that this takes where memory is the limit. Counts are
static: a loop that is not unrolled is counted once (and reported), slow paths that rarely run are counted in full.
It measures no time; a kernel may be slower than its counts suggest.

`problems` says what is wrong with a kernel: spills, local memory, float64, missing wide accesses, broken budgets.
"""

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from cuda_kernels import ptx_cache

TARGETS = ((8, 0), (9, 0), (10, 0, "a"), (12, 0, "a"))
#: Instructions that an SM's full issue rate allows for each byte at the memory rate, static estimate: H100 132 SM at
#: 1.7 GHz and 3.0 TB/s, B200 148 SM at 1.8 GHz and 7.2 TB/s; 128 thread-instructions a cycle and SM.
ISSUE_LIMIT = {(9, 0): 9.6, (10, 0, "a"): 4.7}
INSTALL = "pip install 'numba-cuda[cu13]' nvidia-cuda-nvcc nvidia-cuda-nvdisasm"


class MissingToolError(RuntimeError):
    """A compiler or disassembler is missing or too old; the message says what to install."""


# --- tools ------------------------------------------------------------------------------------------


def find_tool(name):
    """Path of ptxas or nvdisasm: of the pip packages beside Numba (as new as its NVVM), else on PATH.

    Raises:
        MissingToolError: neither has it.
    """
    for site in dict.fromkeys(Path(path) for path in [_site_packages(), *sys.path] if path):
        for path in sorted(site.glob(f"nvidia/cu*/bin/{name}"), reverse=True):
            if os.access(path, os.X_OK):
                return str(path)
    found = shutil.which(name)
    if found is None:
        raise MissingToolError(f"{name} is neither in site-packages/nvidia/cu*/bin nor on PATH: {INSTALL}")
    return found


@cache
def tool_version(name):
    """The version that the tool reports."""
    return _run(find_tool(name), "--version")


def _site_packages():
    try:
        return metadata.distribution("numba").locate_file("")
    except metadata.PackageNotFoundError:
        return None


def require_compiler():
    """Raise MissingToolError unless numba-cuda compiles here."""
    try:
        from numba import cuda
    except ImportError as error:
        raise MissingToolError(f"numba is missing: {INSTALL}") from error
    if getattr(cuda, "implementation", "") != "NVIDIA":
        raise MissingToolError(f"numba-cuda is missing, only numba's outdated numba.cuda is installed: {INSTALL}")
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1":
        raise MissingToolError("NUMBA_ENABLE_CUDASIM=1 is set: kernels would not be compiled; unset it")


def _run(*command):
    """stdout + stderr of a tool.

    Raises:
        MissingToolError: ptxas is older than NVVM. RuntimeError: it failed otherwise.
    """
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        if "Unsupported .version" in run.stderr:
            raise MissingToolError(
                f"{command[0]} is older than Numba's NVVM ({_first_line(run.stderr)}): "
                "pip install --upgrade nvidia-cuda-nvcc"
            )
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
    return run.stdout + run.stderr


def _first_line(text):
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


# --- compiling --------------------------------------------------------------------------------------


def architecture(target):
    """(10, 0, "a") -> "sm_100a"."""
    return "sm_" + "".join(str(part) for part in target)


@contextmanager
def pretended_device(target):
    """Stand in for the current device, whose capability Numba asks for when it compiles an overload."""
    device = SimpleNamespace(compute_capability=tuple(target[:2]))
    with mock.patch("numba.cuda.dispatcher.get_current_device", lambda: device):
        yield


def to_ptx(kernel, signature, target):
    """PTX of a kernel function for a tuple of Numba types.

    Numba caches compiled helpers without the target, so a process should serve one target only.

    Raises:
        MissingToolError: NVVM is missing.
    """
    require_compiler()
    from numba.cuda.cudadrv.error import NvvmSupportError

    from cuda_kernels.launch import compile_ptx

    try:
        with pretended_device(target):
            return compile_ptx(kernel, signature, target)
    except (NvvmSupportError, FileNotFoundError) as error:
        raise MissingToolError(f"NVVM is missing ({_first_line(str(error))}): {INSTALL}") from error


def to_sass(ptx, target, *, max_registers=None):
    """(what ptxas -v prints, disassembly) of PTX."""
    options = [] if max_registers is None else [f"-maxrregcount={max_registers}"]
    with tempfile.TemporaryDirectory() as directory:
        source, binary = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx)
        arch = f"-arch={architecture(target)}"
        usage = _run(find_tool("ptxas"), "-v", arch, *options, str(source), "-o", str(binary))
        return usage, _run(find_tool("nvdisasm"), "-c", str(binary))


# --- reading what was compiled ----------------------------------------------------------------------


@dataclass
class Measured:
    """What one kernel is for one target.

    Attributes:
        name, target, fast_math: which kernel.
        registers, stack, spill_stores, spill_loads, shared: bytes (registers: a count), as reported by ptxas.
        instructions: of the whole kernel, padding excluded, calls included.
        called: those of them in subroutines that ptxas keeps out of line (slow paths of divisions).
        accesses: opcode -> count of global memory accesses, for example {"LDG.E.128": 2}; constant and cache-hint
            suffixes are left out.
        local: count of accesses to local memory.
        loops: backward branches; with any, `instructions` says little.
        float64: whether the PTX computes in float64.
        bytes_per_thread: memory traffic of one thread, as the catalogue says.
        unused: arguments that the kernel should read and does not.
    """

    name: str
    target: tuple
    fast_math: bool
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    instructions: int
    called: int
    accesses: dict = field(default_factory=dict)
    local: int = 0
    loops: int = 0
    float64: bool = False
    bytes_per_thread: float = 0.0
    unused: list = field(default_factory=list)

    @property
    def instr_per_byte(self):
        """Instructions for each byte of memory traffic, out-of-line ones included."""
        return self.instructions / self.bytes_per_thread

    @property
    def issue_share(self):
        """Estimated share of the issue rate at full memory rate; None without a known limit or with loops."""
        limit = ISSUE_LIMIT.get(tuple(self.target))
        return None if limit is None or self.loops else self.instr_per_byte / limit

    def wide(self, kind, bits=128):
        """How many global "LDG" or "STG" of so many bits there are."""
        return self.accesses.get(f"{kind}.E.{bits}", 0)

    def as_dict(self):
        """Plain data, for JSON."""
        derived = {"instr_per_byte": self.instr_per_byte, "issue_share": self.issue_share}
        return {**asdict(self), "target": architecture(self.target), **derived}


_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_LABEL = re.compile(r"^\s*(\.L_x_\d+|\$?[\w$]+):\s*$")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


def instructions_of(sass):
    """List of (address, opcode, operands, whether in a subroutine), and the addresses of labels; padding left out."""
    found, labels, waiting, subroutine = [], {}, [], False
    for line in sass.splitlines():
        instruction = _INSTRUCTION.match(line)
        if instruction:
            address, opcode, operands = int(instruction[1], 16), instruction[2], instruction[3]
            labels.update(dict.fromkeys(waiting, address))
            waiting = []
            found.append((address, opcode, operands, subroutine))
        elif label := _LABEL.match(line):
            waiting.append(label[1])
            subroutine |= "__internal_" in label[1]
    while found and found[-1][1] == "NOP":
        found.pop()
    if found and found[-1][1] == "BRA" and labels.get(_branch_target(found[-1][2])) == found[-1][0]:
        found.pop()  # the branch to itself that ends the code
    return [one for one in found if one[1] != "NOP"], labels


def _branch_target(operands):
    match = _TARGET.search(operands)
    return match[1] if match else None


def count_loops(instructions, labels):
    """Branches to an earlier address within the kernel proper."""
    return sum(
        opcode.startswith("BRA") and not inside and labels.get(_branch_target(operands), address + 1) <= address
        for address, opcode, operands, inside in instructions
    )


_WIDTHS = ("U8", "S8", "U16", "S16", "64", "128", "256")


def access_of(opcode):
    """The part of LDG.E.128.CONSTANT that counts, LDG.E.128; None for anything but a global access."""
    name, *suffixes = opcode.split(".")
    if name not in ("LDG", "STG"):
        return None
    return f"{name}.E.{next((suffix for suffix in suffixes if suffix in _WIDTHS), 32)}"


def _number(pattern, text):
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def unused_arguments(ptx, used):
    """Names of the arguments of `used` (number -> name) that the kernel never reads, so that their purpose is lost."""
    read = {int(number) for number in re.findall(r"ld\.param\.\w+\s+%\w+, \[\w+_param_(\d+)\]", ptx)}
    return [name for number, name in used.items() if number not in read]


def measure(ptx, target, *, name="", fast_math=False, bytes_per_thread=1.0, max_registers=None, used=None):
    """`Measured` of a kernel's PTX."""
    usage, sass = to_sass(ptx, target, max_registers=max_registers)
    instructions, labels = instructions_of(sass)
    opcodes = Counter(opcode for _, opcode, _, _ in instructions)
    accesses = Counter()
    for opcode, count in opcodes.items():
        if access := access_of(opcode):
            accesses[access] += count
    return Measured(
        name,
        tuple(target),
        fast_math,
        registers=_number(r"Used (\d+) registers", usage),
        stack=_number(r"(\d+) bytes stack frame", usage),
        spill_stores=_number(r"(\d+) bytes spill stores", usage),
        spill_loads=_number(r"(\d+) bytes spill loads", usage),
        shared=_number(r"(\d+) bytes smem", usage),
        instructions=len(instructions),
        called=sum(inside for *_, inside in instructions),
        accesses=dict(accesses),
        local=sum(count for opcode, count in opcodes.items() if re.match(r"(LDL|STL)\b", opcode)),
        loops=count_loops(instructions, labels),
        float64=".f64" in ptx,
        bytes_per_thread=bytes_per_thread,
        unused=unused_arguments(ptx, used or {}),
    )


# --- judging ----------------------------------------------------------------------------------------


def problems(measured, entry=None):
    """What is wrong with a kernel: a list of sentences, empty if nothing is."""
    found = []
    if measured.spill_stores or measured.spill_loads:
        found.append(f"spills {measured.spill_stores} bytes, reloads {measured.spill_loads}")
    if measured.stack or measured.local:
        found.append(f"has a stack of {measured.stack} bytes and {measured.local} local accesses")
    if measured.float64:
        found.append("computes in float64 (a Python number where a constant of fixed width belongs?)")
    if measured.unused:
        found.append(f"never reads {', '.join(measured.unused)}: what it should load or store is lost")
    return found if entry is None else found + _broken_promises(measured, entry)


def _broken_promises(measured, entry):
    found = []
    for kind, expected in (("LDG", entry.wide_loads), ("STG", entry.wide_stores)):
        if expected is not None and measured.wide(kind) != expected:
            found.append(f"has {measured.wide(kind)} {kind}.E.128, not {expected}: {measured.accesses}")
    registers = entry.limits.get("registers")
    if registers is not None and measured.registers > registers:
        found.append(f"takes {measured.registers} registers, more than {registers}")
    budget = budget_of(entry, measured.target, measured.fast_math)
    if budget is not None and measured.loops:
        found.append(f"has a budget but {measured.loops} loops, so its instructions are not what runs")
    elif budget is not None and measured.instr_per_byte > budget:
        found.append(f"takes {measured.instr_per_byte:.2f} instructions for each byte, more than {budget}")
    return found


def budget_of(entry, target, fast_math):
    """Instructions for each byte that a kernel may take; None if there is no claim."""
    budgets = entry.limits.get("instr_per_byte_fast_math" if fast_math else "instr_per_byte") or {}
    return budgets.get(tuple(target))


# --- the catalogue ----------------------------------------------------------------------------------


def catalogue(pattern="*"):
    """Entries of `cuda_kernels.catalogue` whose name matches: shell wildcards, or any part of the name."""
    from cuda_kernels.catalogue import catalogue as every

    wanted = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    return [entry for entry in every() if fnmatch.fnmatchcase(entry.name, wanted)]


def compile_entry(entry, target, fast_math):
    """`Measured` of a catalogue entry."""

    def compile_and_measure():
        ptx = to_ptx(entry.build(target, fast_math), entry.signature, target)
        return measure(
            ptx,
            target,
            name=entry.name,
            fast_math=fast_math,
            bytes_per_thread=entry.bytes_per_thread,
            used=entry.used,
        )

    return on_disk(("report", entry.name, fast_math), target, compile_and_measure)


def on_disk(key, target, make):
    """`Measured` for a key, from disk if sources and compilers are unchanged, else made by `make`."""
    key = (*key, find_tool("ptxas"), tool_version("ptxas"))
    plain = json.loads(ptx_cache.get(key, target, lambda: json.dumps(asdict(make()))))
    return Measured(**{**plain, "target": tuple(target)})


def _compile_share(job):
    """[(Measured, problems)] of some entries for one target: the work of one process."""
    target, fast_math, names = job
    require_compiler()
    results = []
    for entry in catalogue():
        if entry.name in names:
            measured = _compile_or_name(entry, target, fast_math)
            results.append((measured, problems(measured, entry)))
    return results


def _compile_or_name(entry, target, fast_math):
    try:
        return compile_entry(entry, target, fast_math)
    except MissingToolError:
        raise
    except Exception as error:  # Numba's own errors do not say which kernel, and some cannot be pickled
        message = f"{entry.name!r} does not compile for {architecture(target)}: {type(error).__name__}: {error}"
        raise RuntimeError(message) from None


def report(pattern="*", targets=TARGETS, fast_math=(False,), workers=None):
    """[(Measured, problems)] of all entries that match, for every target and arithmetic.

    Every process serves one target; `workers` is how many run at a time.
    """
    require_compiler()
    find_tool("ptxas"), find_tool("nvdisasm")
    names = [entry.name for entry in catalogue(pattern)]
    jobs = [(tuple(target), fast, names[half::2]) for target in targets for fast in fast_math for half in (0, 1)]
    jobs = [job for job in jobs if job[2]]
    workers = workers or os.cpu_count()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        results = [one for share in pool.map(_compile_share, jobs) for one in share]
    order = {name: i for i, name in enumerate(names)}
    return sorted(results, key=lambda one: (order[one[0].name], one[0].fast_math, str(one[0].target)))


# --- the command ------------------------------------------------------------------------------------


def parse_target(text):
    """ "sm_100a", "10.0a" or "9.0" -> (10, 0, "a") or (9, 0)."""
    match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)([af]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"a target is sm_90, 9.0, sm_100a, ...; got {text!r}")
    return (int(match[1]), int(match[2]), *match[3])


def _rows(results):
    for measured, wrong in results:
        wide = [f"{measured.wide('LDG', bits)}/{measured.wide('STG', bits)}" for bits in (128, 64)]
        per_byte = "loops" if measured.loops else f"{measured.instr_per_byte:.1f}"
        share = "" if measured.issue_share is None else f"{measured.issue_share:.0%}"
        spills = measured.spill_stores + measured.spill_loads + measured.stack
        yield (
            measured.name + (" (fast)" if measured.fast_math else ""),
            architecture(measured.target),
            str(measured.registers),
            str(spills or ""),
            str(measured.shared or ""),
            *wide,
            str(measured.instructions),
            str(measured.called or ""),
            per_byte,
            share,
            "; ".join(wrong),
        )


HEADINGS = ("kernel", "target", "regs", "spill", "shared", "128", "64", "instr", "called", "/byte", "issue", "problems")


def show(results):
    """Print the results as a table."""
    caption = "128, 64: wide loads/stores. issue: of the rate where memory is the limit, static estimate."
    rows = list(_rows(results))
    print_table(HEADINGS, rows, left=(0, 1, len(HEADINGS) - 1), caption=caption, red=lambda row: bool(row[-1]))


def print_table(headings, rows, *, left=(0,), caption="", red=lambda row: False):
    """Print a table, and a caption below it: with rich if it is installed, else columns of text.

    Args:
        headings, rows: text of the cells. left: numbers of the columns that are not flush right. red: of which rows.
    """
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
        for row in (headings, *rows):
            cells = zip(row, widths, strict=True)
            print("  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(cells)).rstrip())
        print(caption)
        return
    table = Table()
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i in left else "right")
    for row in rows:
        table.add_row(*row, style="red" if red(row) else None)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(caption, markup=False, highlight=False)


def main(arguments=None):
    """`python -m cuda_kernels report`; returns the exit code: 1 if a kernel has a problem, 2 if a tool is missing."""
    parser = argparse.ArgumentParser(prog="python -m cuda_kernels report", description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", default="*", metavar="PATTERN", help="part of a name, or shell wildcards")
    parser.add_argument("--target", action="append", type=parse_target, metavar="sm_90", help="may be repeated")
    parser.add_argument("--fast-math", action="store_true", help="the kernels with approximate units")
    parser.add_argument("--json", action="store_true", help="plain data on stdout")
    options = parser.parse_args(arguments)
    try:
        results = report(options.kernel, options.target or TARGETS, (options.fast_math,))
    except MissingToolError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    if not results:
        names = "; ".join(entry.name for entry in catalogue())
        print(f"report: no kernel's name has {options.kernel!r}; names: {names}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([{**measured.as_dict(), "problems": wrong} for measured, wrong in results], indent=1))
    else:
        show(results)
    return 1 if any(wrong for _, wrong in results) else 0
