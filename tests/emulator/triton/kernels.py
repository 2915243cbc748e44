"""Kernels in Triton whose PTX lies beside this file, `<name>.<target>.ptx`, for test_programs_of_others.py.

Made with Triton 3.5.0, which compiles without a GPU:

    pip install triton==3.5.0
    python tests/emulator/triton/kernels.py

The first line of each text says how it is launched: threads of a block, bytes of dynamic shared memory, and the names
of the parameters that are not compiled in: addresses and numbers, all of them divisible by 16. Two parameters of
Triton's own follow them, which these kernels ignore.
"""

from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {"sm_80": 80, "sm_90": 90}


@triton.jit
def silu(x, y, count, SIZE: tl.constexpr):
    """y = x / (1 + e^-x), bfloat16."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    v = tl.load(x + i, mask=i < count).to(tl.float32)
    tl.store(y + i, (v / (1 + tl.exp(-v))).to(tl.bfloat16), mask=i < count)


@triton.jit
def softmax(x, y, columns, SIZE: tl.constexpr):
    """Each row of x (rows, columns), float32, over its sum of exponentials."""
    row = tl.program_id(0)
    i = tl.arange(0, SIZE)
    v = tl.load(x + row * columns + i, mask=i < columns, other=-float("inf"))
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(y + row * columns + i, e / tl.sum(e, axis=0), mask=i < columns)


@triton.jit
def quantize_e4m3(x, codes, inverse, amax, count, SIZE: tl.constexpr):
    """codes = E4M3 of x * inverse[0], saturating; amax[0] = the largest |x|, by an atomic of the bits."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    v = tl.load(x + i, mask=i < count, other=0).to(tl.float32)
    tl.atomic_max(amax, tl.max(tl.abs(v), axis=0))
    scaled = tl.clamp(v * tl.load(inverse), -448.0, 448.0)
    tl.store(codes + i, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=i < count)


@triton.jit
def swiglu(x, y, columns, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """x (rows, 2 columns) = [act | gate] -> y (rows, columns), float16; a block takes ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, SIZE)[None, :]
    here = i < columns
    act = tl.load(x + row * 2 * columns + i, mask=here).to(tl.float32)
    gate = tl.load(x + row * 2 * columns + columns + i, mask=here).to(tl.float32)
    tl.store(y + row * columns + i, (act * tl.sigmoid(act) * gate).to(tl.float16), mask=here)


@triton.jit
def turned(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y (COLUMNS, ROWS) = the transposition of x (ROWS, COLUMNS), float32, through shared memory."""
    down, across = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    v = tl.load(x + down[:, None] * COLUMNS + across[None, :])
    tl.store(y + across[:, None] * ROWS + down[None, :], tl.trans(v))


@triton.jit
def sums(x, y, columns, SIZE: tl.constexpr):
    """y = the sum of each row of x (rows, columns), bfloat16 to float32, in pieces that are loaded ahead."""
    row = tl.program_id(0)
    total = tl.zeros((SIZE,), tl.float32)
    for first in tl.range(0, columns, SIZE, num_stages=3):
        i = first + tl.arange(0, SIZE)
        total += tl.load(x + row * columns + i, mask=i < columns, other=0).to(tl.float32)
    tl.store(y + row, tl.sum(total, axis=0))


#: name -> kernel, types of the parameters, constants
KERNELS = {
    "silu": (silu, {"x": "*bf16", "y": "*bf16", "count": "i32"}, {"SIZE": 512}),
    "softmax": (softmax, {"x": "*fp32", "y": "*fp32", "columns": "i32"}, {"SIZE": 1024}),
    "quantize_e4m3": (
        quantize_e4m3,
        {"x": "*bf16", "codes": "*u8", "inverse": "*fp32", "amax": "*fp32", "count": "i32"},
        {"SIZE": 1024},
    ),
    "swiglu": (swiglu, {"x": "*fp16", "y": "*fp16", "columns": "i32"}, {"ROWS": 4, "SIZE": 256}),
    "turned": (turned, {"x": "*fp32", "y": "*fp32"}, {"ROWS": 32, "COLUMNS": 64}),
    "sums": (sums, {"x": "*bf16", "y": "*fp32", "columns": "i32"}, {"SIZE": 512}),
}
#: Formats that a target lacks.
LEFT_OUT = {("quantize_e4m3", "sm_80")}


def main():
    """Write the PTX of every kernel for every target."""
    for name, (kernel, types, constants) in KERNELS.items():
        signature = {**types, **dict.fromkeys(constants, "constexpr")}
        for target, number in TARGETS.items():
            if (name, target) in LEFT_OUT:
                continue
            attributes = {(n,): [["tt.divisibility", 16]] for n in range(len(types))}
            source = ASTSource(kernel, signature, constants, attributes)
            made = triton.compile(source, target=GPUTarget("cuda", number, 32), options={"num_warps": 4})
            threads, shared = made.metadata.num_warps * 32, made.metadata.shared
            head = f"// threads {threads}, shared {shared}, parameters {' '.join(types)}; made by kernels.py\n"
            Path(__file__).with_name(f"{name}.{target}.ptx").write_text(head + without_debugging(made.asm["ptx"]))


def without_debugging(ptx):
    """PTX without the sections of DWARF and without the folders of the machine that compiled it."""
    text = ptx.partition("\t.section\t.debug")[0]
    lines = [line for line in text.splitlines() if not line.lstrip().startswith((".file", ".loc", "$L__tmp", "//"))]
    return "\n".join(line for line in lines if line.strip()) + "\n"


if __name__ == "__main__":
    main()
