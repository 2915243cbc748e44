"""Golden files: inputs and what an operation must write for them, for programs in any language.

A golden file is a safetensors file: arrays "input.*", "output.*" and "intermediate.*" and a JSON header that names the
operation and its settings and describes every array. The same arguments give the same bytes on every machine, with
every version of NumPy: inputs are integers from Philox times powers of two, and `refops` itself is exact.

    matrix.py     what a golden file is made from, and the matrix of all of them
    inputs.py     the numbers, row by row
    probes.py     numbers among them whose results show faults: ties, subnormal codes, negative amaxes
    dump.py       inputs, reference outputs, intermediate amaxes and scales
    header.py     what made them, and what each array is
    storage.py    bytes and files: written whole or not at all, verified when read
    damage.py     what differs in a file that was changed
"""

from refops.golden.dump import Golden, build_golden
from refops.golden.inputs import INPUT_KINDS
from refops.golden.matrix import Recipe, golden_matrix
from refops.golden.storage import GoldenWriter, golden_bytes, read_golden, write_golden

__all__ = [
    "INPUT_KINDS",
    "Golden",
    "GoldenWriter",
    "Recipe",
    "build_golden",
    "golden_bytes",
    "golden_matrix",
    "read_golden",
    "write_golden",
]
