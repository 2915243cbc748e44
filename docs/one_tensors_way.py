"""The pictures of `docs/guide/one_tensors_way.md`: a real tensor from its values to a product, every number computed.

    python docs/one_tensors_way.py            # exit code 1 where a picture is not up to date
    python docs/one_tensors_way.py --write    # draws them

`follow` computes with `refops`; the functions of PICTURES draw what it found.
"""

import argparse
import sys
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import refops  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
DATA = ROOT / "tests" / "data" / "minilm_ffn.safetensors"
#: Rows and columns of the corner of the tensors that is followed: its scales fill one tile of the swizzle.
SIZE = 128
BLOCK = 32
#: The element that is followed, and the row of the weight that its row is multiplied by.
ROW, COLUMN, OUTPUT = 37, 65, 1

#: Colours of lines and areas: what is computed, stored, followed, and the rest.
BLUE, PALE_BLUE = "#2b5c9e", "#e7effa"
GREEN, PALE_GREEN = "#2f7d43", "#e8f3ea"
ORANGE, PALE_ORANGE = "#b5651d", "#fdf1e3"
GREY, PALE_GREY, INK = "#666666", "#f4f4f4", "#222222"
#: Sizes of text, in pixels of a picture that is WIDTH wide.
TEXT, SMALL, TITLE = 16, 14, 19
WIDTH = 720
TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass
class Way:
    """A corner of a layer's input and of its weight, both quantized to MXFP8, and the path of one element."""

    x: np.ndarray
    weight: np.ndarray
    scaling: refops.MXFP8Scaling

    @cached_property
    def quantized(self):
        return refops.quantize(self.x, self.scaling)

    @cached_property
    def quantized_weight(self):
        return refops.quantize(self.weight, self.scaling)

    @property
    def block_index(self):
        return COLUMN // BLOCK

    @cached_property
    def block(self):
        """The 32 neighbours that share the element's scale, float32."""
        first = self.block_index * BLOCK
        return self.x[ROW, first : first + BLOCK].astype(np.float32)

    @cached_property
    def amax(self):
        return float(np.abs(self.block).max())

    @property
    def byte(self):
        return int(self.quantized.rowwise_scale_inv[ROW, self.block_index])

    @property
    def exponent(self):
        """The scale is 2 to this power."""
        return self.byte - 127

    @property
    def value(self):
        return float(self.x[ROW, COLUMN])

    @property
    def scaled(self):
        return self.value * 2.0**-self.exponent

    @property
    def code(self):
        return int(self.quantized.rowwise_data[ROW, COLUMN])

    @cached_property
    def codes(self):
        """The codes of the block."""
        return self.quantized.rowwise_data[ROW].reshape(-1, BLOCK)[self.block_index]

    @property
    def decoded(self):
        return float(refops.decode(np.uint8(self.code), self.scaling.fmt))

    @property
    def back(self):
        return float(refops.dequantize(self.quantized)[ROW, COLUMN])

    @cached_property
    def places(self):
        """(512,) which scale lies at each byte of the swizzled tile, as row * 4 + block."""
        numbers = np.arange(SIZE * SIZE // BLOCK).reshape(SIZE, -1)
        halves = [refops.swizzle((numbers // 256**half % 256).astype(np.uint8)) for half in (0, 1)]
        return halves[0].reshape(-1).astype(int) + 256 * halves[1].reshape(-1).astype(int)

    @property
    def place(self):
        """The byte of the swizzled tile that holds the block's scale."""
        return int(np.flatnonzero(self.places == ROW * SIZE // BLOCK + self.block_index)[0])

    @cached_property
    def terms(self):
        """For each block of the sum: products of values of codes summed, exponent of x's scale, of the weight's."""
        codes = [refops.decode(q.rowwise_data[row], self.scaling.fmt).astype(np.float64) for q, row in self.operands]
        sums = (codes[0] * codes[1]).reshape(-1, BLOCK).sum(axis=1)
        exponents = [q.rowwise_scale_inv[row].astype(int) - 127 for q, row in self.operands]
        return [(float(total), int(a), int(b)) for total, a, b in zip(sums, *exponents, strict=True)]

    @property
    def operands(self):
        return (self.quantized, ROW), (self.quantized_weight, OUTPUT)

    @cached_property
    def result(self):
        """The element of the product, as a Blackwell tensor core computes it."""
        y = refops.gemm(self.quantized_weight, self.quantized, "blackwell", out_dtype=np.float32)
        return float(y[ROW, OUTPUT])

    @cached_property
    def unquantized(self):
        """The same element of the product of the tensors as they were."""
        return float(self.x[ROW].astype(np.float64) @ self.weight[OUTPUT].astype(np.float64))


def follow():
    """Return the way of the corner of MiniLM's tensors in tests/data."""
    tensors = load_file(DATA)
    x, weight = (tensors[f"layer3.ffn.{name}"][:SIZE, :SIZE] for name in ("input", "up.weight"))
    return Way(x, weight, refops.MXFP8Scaling(refops.E4M3))


# --- drawing ----------------------------------------------------------------------------------------------------------


class Picture:
    """An SVG that grows by calls."""

    def __init__(self, title, height, width=WIDTH):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="{TEXT}">',
            f"  <title>{escape(title)}</title>",
            f'  <rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(self, x, y, width, height, fill, stroke=None, radius=0):
        line = f' stroke="{stroke}" stroke-width="1.5"' if stroke else ""
        rounded = f' rx="{radius}"' if radius else ""
        self.parts.append(
            f'  <rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{line}{rounded}/>'
        )

    def text(self, x, y, text, *, size=TEXT, fill=INK, anchor="start", bold=False):
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'  <text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def line(self, x1, y1, x2, y2, stroke=GREY, width=1.5):
        self.parts.append(
            f'  <path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{stroke}" stroke-width="{width:g}" fill="none"/>'
        )

    def arrow(self, x1, x2, y, stroke=INK):
        """From x1 to x2, to the right or to the left."""
        back = 8 if x2 > x1 else -8
        self.line(x1, y, x2 - back / 2, y, stroke, 2)
        self.parts.append(
            f'  <path d="M{x2 - back:g} {y - 5:g} L{x2:g} {y:g} L{x2 - back:g} {y + 5:g} Z" fill="{stroke}"/>'
        )

    def tick(self, x, y, number, below, taken=None):
        """A number on a number line, and what is written below it. `taken`: its colour if it is the one taken."""
        self.line(x, y - 8, x, y + 8, taken or GREY, 3 if taken else 1.5)
        self.text(x, y + 30, number, anchor="middle", fill=taken or INK, bold=bool(taken))
        self.text(x, y + 52, below, anchor="middle", size=SMALL, fill=taken or GREY)

    def svg(self):
        return "\n".join([*self.parts, "</svg>", ""])


def hexadecimal(byte):
    return f"0x{byte:02X}"


def power(exponent):
    """2 to a power, in signs that every font has."""
    digits = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"2{digits}"


def draw_block(way):
    """The values of the block as bars, the largest and the followed one marked."""
    picture = Picture(f"32 neighbours of row {ROW}; the largest magnitude is {way.amax:g}", 270)
    picture.text(24, 32, f"x[{ROW}, {COLUMN - 1}:{COLUMN - 1 + BLOCK}], bfloat16", size=TITLE, bold=True)
    zero, unit, step = 150, 85 / way.amax, 21
    largest = int(np.abs(way.block).argmax())
    followed = COLUMN % BLOCK
    for number, value in enumerate(way.block):
        colour = {largest: ORANGE, followed: GREEN}.get(number, BLUE)
        height = abs(float(value)) * unit
        picture.box(24 + step * number, zero - height if value > 0 else zero, step - 5, height, colour)
    picture.line(20, zero, 24 + step * BLOCK, zero)
    x = 24 + step * largest + (step - 5) / 2
    below = way.block[largest] < 0
    picture.text(x, zero + 105 if below else zero - 91, f"amax {way.amax:g}", fill=ORANGE, anchor="end", bold=True)
    picture.text(24, 258, f"x[{ROW}, {COLUMN}] = {way.value:g}", fill=GREEN, bold=True)
    picture.line(24 + step * followed + 8, zero + abs(way.value) * unit + 3, 24 + step * followed + 8, 240, GREEN)
    return picture.svg()


def draw_scale(way):
    """A line of powers of two; amax / 448 between two of them, the upper one taken."""
    quotient = way.amax / 448
    picture = Picture(f"amax / 448 is rounded up to {power(way.exponent)}, which is byte {hexadecimal(way.byte)}", 230)
    picture.text(24, 32, "The scale: the least power of two that brings amax within 448", size=TITLE, bold=True)
    left, right, axis = 60, 660, 130
    lowest, highest = way.exponent - 2, way.exponent + 1

    def place(number):
        return left + (right - left) * (np.log2(number) - lowest) / (highest - lowest)

    picture.line(left - 20, axis, right + 20, axis)
    for exponent in range(lowest, highest + 1):
        taken = ORANGE if exponent == way.exponent else None
        picture.tick(place(2.0**exponent), axis, power(exponent), f"byte {exponent + 127}", taken)
    start = place(quotient)
    picture.line(start, axis - 30, start, axis, BLUE, 2)
    picture.text(start - 8, axis - 36, f"{way.amax:g} / 448 = {quotient:.6f}", anchor="middle", fill=BLUE, bold=True)
    picture.arrow(start, place(2.0**way.exponent), axis - 18, ORANGE)
    picture.text(
        24, 216, f"stored: {way.byte} = {hexadecimal(way.byte)} (E8M0), with the exponent {way.exponent} + 127"
    )
    return picture.svg()


def draw_code(way):
    """The eight bits of the code, and the values of the format around the scaled one."""
    picture = Picture(f"{way.scaled:g} is rounded to {way.decoded:g}, whose code is {hexadecimal(way.code)}", 330)
    picture.text(24, 32, "The code: the nearest number of E4M3", size=TITLE, bold=True)
    picture.text(24, 66, f"{way.value:g} / {power(way.exponent)} = {way.scaled:g}", fill=BLUE, bold=True)
    codes = [way.code + step for step in (2, 1, 0, -1, -2)]
    values = [float(refops.decode(np.uint8(code), way.scaling.fmt)) for code in codes]
    left, right, axis = 90, 630, 132

    def place(number):
        return left + (right - left) * (number - values[0]) / (values[-1] - values[0])

    picture.line(left - 30, axis, right + 30, axis)
    for code, value in zip(codes, values, strict=True):
        picture.tick(place(value), axis, f"{value:g}", hexadecimal(code), GREEN if code == way.code else None)
    picture.line(place(way.scaled), axis - 30, place(way.scaled), axis, BLUE, 2)
    picture.arrow(place(way.scaled), place(way.decoded), axis - 20, GREEN)
    bits, exponent, mantissa = f"{way.code:08b}", (way.code >> 3) & 15, way.code & 7
    fields = [
        ("sign", 0, 1, PALE_GREY, GREY),
        ("exponent", 1, 5, PALE_ORANGE, ORANGE),
        ("mantissa", 5, 8, PALE_BLUE, BLUE),
    ]
    for name, start, end, fill, stroke in fields:
        for number in range(start, end):
            picture.box(24 + 34 * number, 212, 30, 36, fill, stroke)
            picture.text(39 + 34 * number, 237, bits[number], anchor="middle", size=TITLE)
        picture.text(24 + 34 * (start + end) / 2 - 2, 268, name, anchor="middle", size=SMALL, fill=stroke)
    sign = "-" if way.code >> 7 else ""
    picture.text(320, 237, f"= {sign}{power(exponent - 7)} {TIMES} (1 + {mantissa}/8) = {way.decoded:g}", size=TITLE)
    error = way.back - way.value
    picture.text(
        24, 312, f"read back: {way.decoded:g} {TIMES} {power(way.exponent)} = {way.back:g}, off by {error:.2g}"
    )
    return picture.svg()


def draw_layout(way):
    """Data and scales as they are stored, the block and its byte marked."""
    picture = Picture(f"The codes of the block and its byte, in row {ROW} of both arrays", 330)
    picture.text(24, 32, "Stored: a byte for each element, a byte for each block", size=TITLE, bold=True)
    side, top = 256, 56
    picture.box(24, top, side, side, PALE_BLUE, BLUE)
    blocks = SIZE // BLOCK
    for number in range(1, blocks):
        picture.line(24 + side * number / blocks, top, 24 + side * number / blocks, top + side, "#b9cde8", 1)
    y = top + side * ROW / SIZE
    left = 24 + side * way.block_index / blocks
    picture.box(left, y, side / blocks, 5, GREEN)
    picture.text(36, top + 28, f"data ({SIZE}, {SIZE})", fill=BLUE)
    scales = 430
    picture.box(scales, top, 64, side, PALE_ORANGE, ORANGE)
    for number in range(1, blocks):
        picture.line(scales + 16 * number, top, scales + 16 * number, top + side, "#edd2b0", 1)
    picture.box(scales + 16 * way.block_index, y, 16, 5, ORANGE)
    picture.text(scales + 80, top + 28, f"scales ({SIZE}, {blocks})", fill=ORANGE)
    picture.text(
        left + side / blocks, y + 28, f"row {ROW}, block {way.block_index}", fill=GREEN, bold=True, anchor="end"
    )
    picture.text(scales + 80, y + 28, f"[{ROW}, {way.block_index}] = {hexadecimal(way.byte)}", fill=ORANGE, bold=True)
    return picture.svg()


def draw_swizzle(way):
    """The 128 x 4 scales and the 32 x 16 bytes of the tile, a colour for each 32 rows."""
    picture = Picture(f"Scale [{ROW}, {way.block_index}] is byte {way.place} of the swizzled tile", 380)
    picture.text(24, 32, "Swizzled: the order in which a tensor core reads the bytes", size=TITLE, bold=True)
    colours = ("#d6e4f5", "#d9eedd", "#f9e3c8", "#e6dcf0")
    top, cell, height = 60, 22, 272 / SIZE
    for group, colour in enumerate(colours):
        picture.box(40, top + 68 * group, 4 * cell, 68, colour)
        picture.text(40 + 4 * cell + 10, top + 68 * group + 40, f"rows {32 * group} to {32 * group + 31}", size=SMALL)
    picture.box(40 + cell * way.block_index, top + height * ROW - 2, cell, 5, ORANGE)
    picture.arrow(262, 312, top + height * ROW + 1, ORANGE)
    picture.text(40, 356, f"{SIZE} rows of 4 bytes", fill=GREY)
    left, across, down = 330, 22, 8.5
    for number, scale in enumerate(way.places):
        row, block = divmod(int(scale), SIZE // BLOCK)
        x, y = left + across * (number % 16), top + down * (number // 16)
        followed = (row, block) == (ROW, way.block_index)
        picture.box(x, y, across - 1, down - 1, ORANGE if followed else colours[row // 32])
    picture.text(
        left, 356, f"32 lines of 16 bytes: [{ROW}, {way.block_index}] is byte {way.place}", fill=ORANGE, bold=True
    )
    return picture.svg()


def draw_product(way):
    """The sum of the blocks' terms, and what the card makes of it."""
    picture = Picture(f"Four blocks of 32 products, scaled and summed: {way.result:.6g}", 330)
    picture.text(24, 32, f"y[{ROW}, {OUTPUT}]: row {ROW} of x times row {OUTPUT} of the weight", size=TITLE, bold=True)
    columns = (24, 150, 385, 470, 696)
    for x, words in zip(
        columns, ("block", "sum of 32 products of codes", "scale of x", "scale of the weight"), strict=False
    ):
        picture.text(x, 68, words, size=SMALL, fill=GREY)
    picture.text(columns[-1], 68, "term", size=SMALL, fill=GREY, anchor="end")
    for number, (total, first, second) in enumerate(way.terms):
        y = 84 + 40 * number
        followed = number == way.block_index
        picture.box(20, y, 680, 34, PALE_GREEN if followed else PALE_GREY, GREEN if followed else None, 4)
        cells = (str(number), f"{total:.10g}", f"{TIMES} {power(first)}", f"{TIMES} {power(second)}")
        for x, words in zip(columns, cells, strict=False):
            picture.text(x + 8, y + 23, words, bold=followed)
        picture.text(columns[-1] - 4, y + 23, f"{total * 2.0 ** (first + second):.6f}", anchor="end", bold=followed)
    picture.line(560, 250, 700, 250, INK, 2)
    picture.text(columns[-1] - 4, 276, f"{way.result:.6f}", anchor="end", bold=True, size=TITLE)
    picture.text(24, 276, "summed by the tensor core, float32", fill=INK)
    picture.text(24, 312, f"of the tensors before they were quantized: {way.unquantized:.6f}", fill=GREY)
    return picture.svg()


def draw_overview(way):
    """The whole way in six boxes."""
    picture = Picture("One tensor's way: values, amax, scale byte, codes, swizzled scales, product", 250, 960)
    steps = [
        ("x", "32 neighbours", [*(f"{value:.3f}" for value in way.block[:3]), "..."], PALE_BLUE, BLUE),
        ("amax", "largest magnitude", [f"{way.amax:g}"], PALE_BLUE, BLUE),
        ("byte", "E8M0, rounded up", [power(way.exponent), hexadecimal(way.byte)], PALE_ORANGE, ORANGE),
        ("codes", "x / scale, E4M3", [*(hexadecimal(int(c)) for c in way.codes[:3]), "..."], PALE_GREEN, GREEN),
        (
            "swizzle",
            "the GEMM's order",
            [f"scale [{ROW}, {way.block_index}]", f"byte {way.place}"],
            PALE_ORANGE,
            ORANGE,
        ),
        ("GEMM", f"codes {TIMES} scales", ["summed", f"{way.result:.4f}"], PALE_GREY, GREY),
    ]
    width, gap = 136, 24
    for number, (name, words, lines, fill, stroke) in enumerate(steps):
        x = 12 + (width + gap) * number
        picture.box(x, 16, width, 218, fill, stroke, 8)
        picture.text(x + width / 2, 48, name, size=TITLE, bold=True, anchor="middle", fill=stroke)
        picture.text(x + width / 2, 76, words, size=SMALL, anchor="middle")
        for place, line in enumerate(lines):
            picture.text(x + width / 2, 162 + 30 * (place - (len(lines) - 1) / 2), line, size=18, anchor="middle")
        if number:
            picture.arrow(x - gap + 3, x - 3, 156)
    return picture.svg()


#: File -> function that draws it.
PICTURES = {
    "way.svg": draw_overview,
    "way_1_block.svg": draw_block,
    "way_2_scale.svg": draw_scale,
    "way_3_code.svg": draw_code,
    "way_4_layout.svg": draw_layout,
    "way_5_swizzle.svg": draw_swizzle,
    "way_6_product.svg": draw_product,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the pictures, else only compare")
    write, way, stale = parser.parse_args().write, follow(), False
    for name, draw in PICTURES.items():
        path, drawn = FOLDER / name, draw(way)
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            stale = True
            print(f"{'written' if write else 'not up to date'}: {path.relative_to(ROOT)}")
            if write:
                path.write_text(drawn, encoding="utf-8")
    return int(stale and not write)


if __name__ == "__main__":
    sys.exit(main())
