"""What the kernels of one call do, counted on the software GPU: `python -m cuda_kernels profile --op swiglu`.

For each kernel that runs: instructions, sectors of global memory, passes through shared memory, barriers, divergence
and atomics, next to what the compilers made of it (`compile_report`). Nothing is timed. Executed instructions are
those of the PTX, static ones those of the hardware that ptxas makes of it, each counted once.

    profiled = profile(lambda: cuda_kernels.quantize(x, scaling), target="sm_90", elements=x.size)
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from cuda_kernels import compile_report, ptx_cache
from cuda_kernels.compile_report import Measured, MissingToolError, print_table
from cuda_kernels.emulator.build import CompilerMissingError
from cuda_kernels.emulator.counting import KernelCounters, counters
from cuda_kernels.emulator.settings import TARGETS
from cuda_kernels.errors import NoGPUError
from refops.activations import ACTIVATIONS
from refops.commands.arguments import DTYPES, VALUE_DTYPES, scaling_of, shape_argument
from refops.commands.usage import UsageError, match_one
from refops.oracle.operation import OPERATIONS
from refops.survey import SCALINGS

#: What `--op` calls the quantization of a tensor as it is.
NO_ACTIVATION = "none"
#: What `--op` takes -> the `Operation`.
OPS = {
    NO_ACTIVATION if one.kind == "quantize" else name: one
    for name, one in OPERATIONS.items()
    if one.kind in ("quantize", "activation", "activation_grad")
}
#: What the command reports in one line: a word that is wrong, or something that is not installed.
REPORTED = (UsageError, ValueError, TypeError, ImportError, NoGPUError, MissingToolError, CompilerMissingError)


@dataclass(frozen=True)
class KernelProfile:
    """What one kernel did in a call.

    Attributes:
        name: its kind, what it computes and what it stores.
        grid, block: shapes of its last launch.
        elements: of the tensor that the call was about.
        counters: what it did, summed over its launches in the call.
        static: what the compilers made of it.
    """

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    elements: int
    counters: KernelCounters
    static: Measured

    @property
    def bytes(self) -> int:
        """Bytes of global memory that the threads asked for and stored."""
        return self.counters.global_load_bytes + self.counters.global_store_bytes

    @property
    def per_element(self) -> float:
        """Instructions of threads for each element."""
        return self.counters.thread_instructions / max(self.elements, 1)

    @property
    def per_byte(self) -> float:
        """Instructions of threads for each byte of `bytes`."""
        return self.counters.thread_instructions / max(self.bytes, 1)

    @property
    def spills(self) -> int:
        """Bytes that ptxas spills, reloads and keeps on the stack."""
        return self.static.spill_stores + self.static.spill_loads + self.static.stack

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        counted = self.counters
        derived = {
            "bytes": self.bytes,
            "thread_instructions_per_element": self.per_element,
            "thread_instructions_per_byte": self.per_byte,
            "warp_instructions_per_element": counted.warp_instructions / max(self.elements, 1),
            "warp_instructions_per_byte": counted.warp_instructions / max(self.bytes, 1),
            "active_lanes": counted.active_lanes,
            "load_sectors_per_request": counted.load_sectors_per_request,
            "used_load_share": counted.used_load_share,
            "store_sectors_per_request": counted.store_sectors_per_request,
            "used_store_share": counted.used_store_share,
            "wavefronts_over_ideal": counted.wavefronts_over_ideal,
        }
        static = {**self.static.as_dict(), "spills": self.spills}
        kept = ("registers", "spills", "shared", "instructions", "accesses", "loops")
        return {
            "name": self.name,
            "grid": list(self.grid),
            "block": list(self.block),
            "elements": self.elements,
            "counted": asdict(counted),
            "derived": derived,
            "static": {name: static[name] for name in kept},
        }


# --- running ----------------------------------------------------------------------------------------


def profile(call: Callable[[], Any], *, target: str = "sm_90", elements: int = 0) -> list[KernelProfile]:
    """Run a call on the software GPU and return what each of its kernels did, in the order of their first launches.

    Args:
        call: function without arguments that calls something of `cuda_kernels` with NumPy arrays.
        target: a name of `settings.TARGETS`.
        elements: of the tensor that the call is about.

    Raises:
        MissingToolError: ptxas or nvdisasm is missing. What `emulated` and the call itself raise.
    """
    with _on_software_gpu(target), _launches() as launches:
        call()
        now = counters()
    return [one.profiled(now, elements) for one in launches.values()]


def _on_software_gpu(target: str) -> AbstractContextManager[Any]:
    from cuda_kernels.emulator.numpy_calls import emulated

    return emulated(target=target)


@dataclass
class _Launched:
    """A kernel that was launched, and its counts before the first launch.

    Attributes:
        spec: its `operands.Spec`. target: compute capability. grid, block: of the last launch.
        number: its place in `counters()`. before: its counts, None where it had not run.
    """

    spec: Any
    target: tuple
    grid: tuple[int, ...]
    block: tuple[int, ...]
    number: int
    before: KernelCounters | None

    def profiled(self, now: list[KernelCounters], elements: int) -> KernelProfile:
        """Its `KernelProfile`, when `counters()` is `now`."""
        counted = now[self.number].difference(self.before)
        return KernelProfile(str(self.spec), self.grid, self.block, elements, counted, self._compiled())

    def _compiled(self):
        """`Measured` of its PTX, which is on disk since its launch, unless nothing can be kept there."""
        from cuda_kernels.launch import ptx_of

        def measure():
            ptx = ptx_cache.get(self.spec, self.target, lambda: ptx_of(self.spec, self.target))
            return compile_report.measure(ptx, self.target)

        return compile_report.on_disk(("profile", self.spec), self.target, measure)


@contextmanager
def _launches() -> Iterator[dict[Any, _Launched]]:
    """A context that yields a dictionary: `Spec` of a kernel -> `_Launched`, of all launches in the context."""
    from cuda_kernels.gpu import GPU

    launches: dict[Any, _Launched] = {}
    original = GPU.launch

    def launch(self, spec, shape, *operands):
        before = counters()
        original(self, spec, shape, *operands)
        after = counters()
        ran = [i for i, one in enumerate(after) if i >= len(before) or one.launches > before[i].launches]
        grid, block = spec.grid(*shape)
        if ran and spec in launches:
            launches[spec].grid, launches[spec].block = grid, block
        elif ran:
            (number,) = ran
            first = before[number] if number < len(before) else None
            launches[spec] = _Launched(spec, self.launcher.target, grid, block, number, first)

    GPU.launch = launch  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        GPU.launch = original  # type: ignore[method-assign]


# --- the command ------------------------------------------------------------------------------------


def call_of(op: str, scaling: Any, x: np.ndarray, **options: Any) -> Callable[[], Any]:
    """Return the call of `cuda_kernels` for an operation.

    Args:
        op: a name of `OPS`. scaling: settings, or None.
        x: the input. options: of the call, such as columnwise, dbias, fast_math.
    """
    import cuda_kernels

    operation = OPS[op]
    if operation.kind == "quantize":
        return partial(cuda_kernels.quantize, x, scaling, **options)
    arrays = [x]
    if operation.kind == "activation_grad":
        columns = x.shape[-1] // (2 if ACTIVATIONS[operation.activation].gated else 1)
        arrays = [random_tensor((*x.shape[:-1], columns), x.dtype, seed=1), x]
    called = getattr(cuda_kernels, operation.kind if scaling is None else f"{operation.kind}_quantize")
    return partial(called, operation.activation, *arrays, *([] if scaling is None else [scaling]), **options)


def random_tensor(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Normally distributed values, always the same."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(prog="python -m cuda_kernels profile", description=__doc__.splitlines()[0])
    made.add_argument("--op", required=True, choices=OPS, metavar="NAME", help=", ".join(OPS))
    made.add_argument("--scaling", help=f"one of {', '.join(SCALINGS)}; without, the activation alone")
    made.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a setting of --scaling")
    made.add_argument("--target", default="sm_90", choices=TARGETS, metavar="sm_90", help=", ".join(TARGETS))
    made.add_argument("--shape", type=shape_argument, default=(256, 512), metavar="MxK", help="of x (256x512)")
    made.add_argument("--dtype", choices=VALUE_DTYPES, default="bfloat16", help="of x (bfloat16)")
    made.add_argument("--columnwise", action="store_true", help="the columnwise copy too")
    made.add_argument("--dbias", action="store_true", help="the sums of columns too")
    made.add_argument("--fast-math", action="store_true", help="approximate exponentials and reciprocals")
    made.add_argument("--json", action="store_true", help="plain data on stdout")
    return made


def main(arguments: list[str] | None = None) -> int:
    """`python -m cuda_kernels profile`; returns the exit code: 2 for bad use or a missing tool."""
    options = parser().parse_args(arguments)
    try:
        profiled = profile(_call(options), target=options.target, elements=int(np.prod(options.shape, dtype=np.int64)))
    except REPORTED as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    facts = {
        "op": options.op,
        "scaling": options.scaling,
        "target": options.target,
        "shape": list(options.shape),
        "dtype": options.dtype,
        "columnwise": options.columnwise,
        "dbias": options.dbias,
        "fast_math": options.fast_math,
    }
    if options.json:
        print(json.dumps({**facts, "kernels": [one.as_dict() for one in profiled]}, indent=1))
    else:
        show(profiled, facts)
    return 0


def _call(options):
    """The call that the options ask for, or a UsageError."""
    operation, scaling = OPS[options.op], scaling_of(options)
    if operation.kind == "quantize" and scaling is None:
        raise UsageError(f"--op {options.op} needs --scaling, one of {', '.join(SCALINGS)}")
    if options.dbias and operation.kind == "activation":
        raise UsageError(f"--dbias is for gradients and --op {NO_ACTIVATION}; got --op {options.op}")
    if options.columnwise and scaling is None:
        raise UsageError("--columnwise needs --scaling: there is no other copy of values that are not quantized")
    if not options.shape:
        raise UsageError("--shape must have at least one size; got none")
    given = {"fast_math": options.fast_math}
    if scaling is not None:
        named = SCALINGS[match_one(options.scaling, SCALINGS, "--scaling")]
        given["columnwise"] = options.columnwise or named.columnwise
    if operation.kind != "activation":
        given["dbias"] = options.dbias
    return call_of(options.op, scaling, random_tensor(options.shape, DTYPES[options.dtype]), **given)


# --- the table --------------------------------------------------------------------------------------

CAPTION = """\
executed    PTX instructions that ran; those of threads also for each element of x and each byte of global memory
request     one load or store by a warp; a sector has 32 bytes
wavefronts  passes through the 32 banks of shared memory
static      what ptxas made of the kernel"""


def show(profiled: list[KernelProfile], facts: dict[str, Any]) -> None:
    """Print a table with a column for each kernel."""
    shape = "x".join(map(str, facts["shape"]))
    more = [name.replace("_", " ") for name in ("columnwise", "dbias", "fast_math") if facts[name]]
    scaling = [facts["scaling"]] if facts["scaling"] else []
    print(" ".join([facts["op"], *scaling, f"{facts['dtype']} {shape} on {facts['target']}", *more]))
    headings = ("", *(one.name for one in profiled))
    rows = [(lines[0][0], *(text for _, text in lines)) for lines in zip(*map(_cells, profiled), strict=True)]
    if not rows:
        print("no kernel ran")
        return
    print_table(headings, rows, left=(0,), caption=CAPTION)


def _cells(one):
    """(name, text) of every row, of one kernel."""
    counted, static = one.counters, one.static
    yield "launches x blocks x threads", f"{counted.launches} x {_product(one.grid)} x {_product(one.block)}"
    yield "executed, of warps", f"{counted.warp_instructions:,}"
    yield "  of threads", f"{counted.thread_instructions:,}"
    yield "  for each element", f"{one.per_element:.1f}"
    yield "  for each byte", f"{one.per_byte:.1f}"
    yield "  active lanes of 32", f"{counted.active_lanes:.1f}"
    yield "divergent branches", f"{counted.divergent_branches:,}"
    yield "barriers", f"{counted.barriers:,}"
    yield "atomics", f"{counted.atomics:,}"
    yield "loads: requests", f"{counted.global_loads:,}"
    yield "  sectors a request", _if(counted.global_loads, f"{counted.load_sectors_per_request:.1f}")
    yield "  used", _if(counted.global_loads, f"{counted.used_load_share:.0%}")
    yield "stores: requests", f"{counted.global_stores:,}"
    yield "  sectors a request", _if(counted.global_stores, f"{counted.store_sectors_per_request:.1f}")
    yield "  used", _if(counted.global_stores, f"{counted.used_store_share:.0%}")
    yield "shared memory: wavefronts", f"{counted.shared_wavefronts:,}"
    yield "  over the ideal", _if(counted.shared_ideal, f"{counted.wavefronts_over_ideal:.2f}")
    yield "static: registers", str(static.registers)
    yield "  spilled bytes", str(one.spills)
    yield "  shared bytes", f"{static.shared:,}"
    yield "  instructions", f"{static.instructions:,}" + (" with loops" if static.loops else "")


def _product(sizes):
    return int(np.prod(sizes))


def _if(count, text):
    """A ratio of counts; nothing if there is nothing to divide by."""
    return text if count else ""
