"""Places: FP4 packing, transposed bytes and the order of scales for GEMMs move every code to a place of its own."""

from functools import reduce

import numpy as np
import z3
from claims import Claim, one_more, traced
from solvers import Query
from terms import COMPILED, NUMPY, Term, arithmetic, checks_pass, choose, constant, variable

import refops
from cuda_kernels import directions
from cuda_kernels.host import casting
from refops import formats

#: Codes, and bytes, that are packed at once: each byte is made of two codes, whatever stands beside it.
CODES, BYTES = 8, 4


class Memory:
    """An array of bytes, or a view of it as wider words, lowest byte first, as routines of the CPU take it."""

    def __init__(self, cells, size=1):
        self.cells, self.size = cells, size

    def __getitem__(self, i):
        parts = [one.node for one in self.cells[i * self.size : (i + 1) * self.size]]
        return Term(f"u{self.size}", z3.Concat(*parts[::-1]) if len(parts) > 1 else parts[0])

    def __setitem__(self, i, value):
        assert self.size == 1
        self.cells[i] = value.astype(np.uint8)

    def view(self, dtype):
        """The same bytes as words."""
        return Memory(self.cells, np.dtype(dtype).itemsize)


def numbered(count, dtype=np.uint8):
    """Variables, by name."""
    return {f"{'abcdefghijklmnop'[k]}": variable("abcdefghijklmnop"[k], dtype) for k in range(count)}


class Objects(np.ndarray):
    """An array of terms."""

    @classmethod
    def of(cls, terms):
        """Terms as an array."""
        return np.array(list(terms), object).view(cls)

    def max(self):
        """The largest."""
        return reduce(lambda a, b: choose(a >= b, a, b), self)


def nibbles(packed):
    """The definition: two codes of a byte, the low half first."""
    return [one for byte in packed for one in (byte & np.uint8(15), byte >> np.uint8(4))]


def packing_claim():
    """`refops.pack_fp4`, `unpack_fp4` and the CPU's `pack`."""

    def below_16(codes):
        return [z3.ULE(one.node, 15) for one in codes.values()]

    def pack(seeded):
        codes, fault = numbered(CODES), {4: one_more} if seeded else None
        with checks_pass() as known:
            packed = traced(formats.pack_fp4, Objects.of(codes.values()), rule=NUMPY, fault=fault)
        return Query(codes, tuple(nibbles(list(packed))), tuple(codes.values()), known)

    def unpack(seeded):
        packed = numbered(BYTES)
        fault = {0xF: one_more, 4: one_more} if seeded else None
        empty = {np.empty: lambda shape, dtype: np.empty(shape, object)}
        codes = traced(formats.unpack_fp4, Objects.of(packed.values()), rule=NUMPY, fault=fault, replaced=empty)
        return Query(packed, tuple(codes), tuple(nibbles(packed.values())))

    def pack_on_cpu(seeded):
        codes = numbered(CODES)
        target = Memory([constant(np.uint8(0))] * BYTES)
        fault = {4: one_more} if seeded else None
        traced(casting.pack, Memory(list(codes.values())), CODES, target, rule=COMPILED, fault=fault)
        return Query(codes, tuple(nibbles(target.cells)), tuple(codes.values()), below_16(codes))

    def reference(part, **given):
        stored = np.array(list(given.values()), np.uint8)
        return list(refops.unpack_fp4(stored) if part == "unpack_fp4" else refops.unpack_fp4(refops.pack_fp4(stored)))

    queries = {"pack_fp4": pack, "unpack_fp4": unpack, "host's pack": pack_on_cpu}
    text = "FP4 packing and unpacking undo each other: refops = CPU = definition"
    return Claim(text, "all codes, all bytes", queries, reference)


def transposition_claim():
    """Eight words of eight bytes, transposed by exchanges."""
    names = "abcdefgh"

    def query(seeded):
        words = {one: variable(one, np.uint64) for one in names}
        fault = {8: one_more} if seeded else None
        turned = traced(casting.transpose_8x8, *words.values(), rule=COMPILED, fault=fault)
        byte = lambda word, k: Term(np.uint8, z3.Extract(8 * k + 7, 8 * k, word.node))  # noqa: E731
        got = tuple(byte(word, k).simplified() for word in turned for k in range(8))
        return Query(words, got, tuple(byte(words[one], k) for k in range(8) for one in names))

    def reference(part, **words):
        stored = np.array([words[one] for one in names], "<u8").view(np.uint8).reshape(8, 8)
        return list(stored.T.ravel())

    return Claim("8 x 8 bytes are transposed by exchanges", "all bytes", {"CPU": query}, reference)


def published_place(row, block, columns):
    """The position that cuBLAS publishes for "1D block scaling factors", of integers or terms."""
    tile = (row // 128) * (columns // 4) + block // 4
    return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + block % 4


def gemm_order_claim():
    """Where a scale lies for a GEMM: the published position, from which tile, row and block follow.

    Tiles are numbered row by row: a number has one quotient and one remainder, so no two scales share a place.
    """
    rows_limit, columns_limit = 1 << 20, 1 << 16

    def at(names, seeded):
        """The kernels' place of a row and a block of a tensor with so many columns of scales, and what is known."""
        row, block, columns = (variable(one, np.int32) for one in names)
        fault = {512: lambda value: value // 2} if seeded else None
        place = traced(directions.scale_swizzled, columns, row, block, rule=COMPILED, fault=fault)
        known = [z3.ULT(row.node, rows_limit), z3.ULE(columns.node, columns_limit), columns.node & 3 == 0]
        return (row, block, columns), place, [*known, z3.ULT(block.node, columns.node)]

    def formula(seeded):
        names = ("row", "block", "columns")
        inputs, place, known = at(names, seeded)
        with arithmetic(NUMPY):
            expected = published_place(*(one.astype(np.uint64) for one in inputs))
        return Query(dict(zip(names, inputs, strict=True)), place.astype(np.uint64), expected, known)

    def undone(seeded):
        """Tile, row in the tile and block in the tile follow from the place."""
        names = ("row", "block", "columns")
        (row, block, columns), place, known = at(names, seeded)
        with arithmetic(NUMPY):
            inside = place & 511
            found = place >> 9, (inside >> 4) + ((inside >> 2) & 3) * 32, inside & 3
        with arithmetic(NUMPY):
            i, j, width = (one.astype(np.int64) for one in (row, block, columns))
            expected = (i >> 7) * (width >> 2) + (j >> 2), i & 127, j & 3
        return Query(dict(zip(names, (row, block, columns), strict=True)), found, expected, known)

    def reference(part, row, block, columns):
        """`refops.swizzle` of a matrix in which one place is marked, of the tile row of that row."""
        marked = np.zeros((128, int(columns)), np.uint8)
        marked[int(row) % 128, int(block)] = 1
        place = int(np.flatnonzero(refops.swizzle(marked))[0]) + int(row) // 128 * 128 * int(columns)
        return [place] if part == "place" else [place // 512, int(row) % 128, int(block) % 4]

    domain = f"rows below {rows_limit:,}, up to {columns_limit:,} columns of scales"
    queries = {"place": formula, "tile, row and block": undone}
    return Claim("kernels' GEMM order = cuBLAS's position, and a bijection", domain, queries, reference)


CLAIMS = [packing_claim(), transposition_claim(), gemm_order_claim()]
