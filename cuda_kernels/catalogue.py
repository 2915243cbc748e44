"""Every kernel once: what `compile_report` compiles and measures, with the budgets that tests assert.

What a kernel costs stands at the end of its family's file. Bytes are those that a thread with all of its elements reads
and writes in global memory. Budgets are instructions for each of these bytes, of kernels without loops, compiled for
(9, 0), an H100, and (10, 0, "a"), a B200.
"""

from collections import namedtuple
from dataclasses import replace

from cuda_kernels.families import (
    blocks,
    dequantize,
    elementwise,
    four_over_six,
    hadamard_transform,
    mxfp8,
    nvfp4,
    per_tensor,
    row_scaled,
    scales,
    squares,
    sums,
)
from cuda_kernels.launch import signature_of
from cuda_kernels.operands import FAST

FAMILIES = (
    elementwise,
    row_scaled,
    sums,
    per_tensor,
    blocks,
    squares,
    mxfp8,
    nvfp4,
    four_over_six,
    hadamard_transform,
    dequantize,
    scales,
)

#: name; spec, a `Spec`; build(target, fast_math) -> kernel; signature; bytes_per_thread; limits: "instr_per_byte" and
#: "instr_per_byte_fast_math", target -> budget, None: no claim; wide_loads, wide_stores: 128-bit accesses, or None;
#: used: number -> name of the flat arguments that the kernel must read.
Entry = namedtuple("Entry", "name spec build signature bytes_per_thread limits wide_loads wide_stores used")


def _entry_of(cost):
    """The `Entry` of a family's `operands.Cost`."""
    spec, accesses = cost.spec, (cost.wide_loads, cost.wide_stores)
    build = lambda target, fast_math: (_approximate(spec) if fast_math else spec).function(target)  # noqa: E731
    return Entry(
        cost.name, spec, build, signature_of(spec), cost.bytes_per_thread, _limits(cost), *accesses, _must_be_used(spec)
    )


def _approximate(spec):
    """A `Spec` whose formulas, if it has any, are fast ones."""
    values = getattr(spec, "values", None)
    if values is None or values.activation is None:
        return spec
    return replace(spec, values=replace(values, arithmetic=FAST))


def _limits(cost):
    """Which budget holds for which target, of either arithmetic."""
    if cost.budget is None:
        return {}
    cards = (9, 0), (10, 0, "a")
    accurate, fast = dict(zip(cards, cost.budget, strict=True)), cost.fast_budget or cost.budget
    return {"instr_per_byte": accurate, "instr_per_byte_fast_math": dict(zip(cards, fast, strict=True))}


def _must_be_used(spec):
    """Number of a flat argument -> its name, of those that a kernel must read."""
    used, number = {}, 0
    for kind, fields in spec.operands():
        if isinstance(kind, str):  # a pointer or a number by itself
            number += 1
            continue
        for field, (what, _) in fields.items():
            if what == "pointer" and spec.must_read(field):
                used[number] = f"{field} of {kind.__name__}"
            number += 1
    return used


def catalogue():
    """Return the `Entry` of every kernel."""
    return [_entry_of(cost) for family in FAMILIES for cost in family.costs()]
