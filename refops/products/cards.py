"""Which product a card has for two scalings: its unit, where scales apply, and when software empties the accumulator.

| scales of the operands            | hopper                                   | blackwell                           |
|-----------------------------------|------------------------------------------|-------------------------------------|
| none: float16, bfloat16           | unit of 16 bits                          | unit of 16 bits                     |
| one for the tensor                | FP8 unit; the sums times both scales     | f8f6f4 unit; likewise               |
| float32 or E8M0 for 128           | FP8 unit; partial sums times both scales | mxf8f6f4, if they are powers of two |
| E8M0 for 32: MXFP8, MXFP6         | none                                     | mxf8f6f4                            |
| E8M0 for 32 or 16, MXFP4 by MXFP4 | none                                     | mxf4                                |
| E4M3 for 16: NVFP4                | none                                     | nvf4; the sums times both amaxes    |

Ampere has a unit of 16 bits alone. What no row has is an error that names the cards that can.

What is software's, and from whom:

- *Split accumulator*, of Hopper's FP8 sums: CUTLASS and DeepGEMM add the accumulator to a float32 sum after 128
  products. So does cuBLAS 12.8 on an H100 unless it splits k among blocks, say the recorded calls that `mmaemu` replays
  (tests/peers compares). TE asks for it (`use_split_accumulator`) in dgrad and wgrad, in forward products where the
  recipe says so. Where cuBLAS splits k it adds the parts in an order that depends on card and version: not modelled.
- *Blocks of 128 on Hopper*: DeepGEMM multiplies both scales, and adds partial sum times that product in one FMA. TE's
  products of this kind are cuBLAS's, whose order nobody has published.
- *Blocks of 128 on Blackwell*: TE repeats each scale, a power of two, as an E8M0 byte for each 32 elements
  (`common/swizzle/swizzle_block_scaling.cu`).
- *A factor of the tensor* multiplies the sums in float32, and an exact zero is +0: alpha * a * b, from left to right,
  as `mmaemu` has it of cuBLAS; of NVFP4 times float32 1 / (top_a * top_b), as in TE's `common/recipe/nvfp4.cu`. Then
  comes the bias, in float32, and one rounding.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from refops.arguments import require_choice, require_dtype, require_flag
from refops.formats import E8M0
from refops.hints import DTypeLike
from refops.products.units import (
    CARDS,
    SIXTEEN_BITS,
    UNITS,
    OperandFormat,
    Unit,
    format_name,
    no_unit,
    require_accumulator,
    require_interval,
)
from refops.scalings import Scaling, require_scaling

#: What an operand is quantized with, or its dtype, float16 or bfloat16, where it is plain.
OperandKind: TypeAlias = Scaling | DTypeLike


@dataclass(frozen=True)
class Product:
    """How a card multiplies two operands.

    Attributes:
        unit: the unit.
        block: elements along k of a scale as it is read, by the unit where that has a `scale_format`, else by software
            for each partial sum. Scales of larger blocks are repeated. None: no scales of blocks.
        promotion: products after which the accumulator is added to a float32 sum, or None.
    """

    unit: Unit
    block: int | None = None
    promotion: int | None = None


def product_of(
    card: str,
    a: OperandKind,
    b: OperandKind,
    *,
    use_split_accumulator: bool = False,
    split_interval: int | None = None,
    accumulator: DTypeLike = np.float32,
) -> Product:
    """Return the product that a card has for two operands, in any order.

    Args:
        card: "ampere", "hopper" or "blackwell".
        a, b: scalings; or np.float16 or ml_dtypes.bfloat16 for a plain operand.
        use_split_accumulator: promote Hopper's FP8 sums. With scales of blocks they always are, after each block;
            elsewhere it changes nothing.
        split_interval: after how many products, a multiple of 32; None: 128.
        accumulator: np.float32, or np.float16 where nothing has scales of blocks.

    Raises:
        TypeError: neither a scaling nor such a dtype, an interval that is no integer. ValueError: no such card, another
            interval; a card that has no such product, with the cards that do.
    """
    card = require_choice(card, "card", CARDS)
    kinds = _require_kind(a, "a"), _require_kind(b, "b")
    split, dtype = require_flag(use_split_accumulator, "use_split_accumulator"), require_accumulator(accumulator)
    for unit in UNITS:
        if unit.split_interval is not None:  # whether or not this product is one of them
            split_interval = require_interval(split_interval, unit, "split_interval")
    found = {name: product for name in CARDS if (product := _product_on(name, kinds, split, dtype)) is not None}
    if card in found:
        product = found[card]
        if split_interval is None or product.promotion is None or product.block is not None:
            return product
        return replace(product, promotion=split_interval)
    asked = " and ".join(dict.fromkeys(map(_described, kinds)))
    raise no_unit(card, f"{asked}, accumulated in {dtype}", list(found))


def operand_format(kind: Any) -> OperandFormat:
    """The format of the elements of an operand."""
    return kind.fmt if isinstance(kind, Scaling) else kind


def _require_kind(kind, name):
    if isinstance(kind, Scaling):
        return require_scaling(kind)
    return require_dtype(kind, name, SIXTEEN_BITS, "a scaling, float16 or bfloat16")


def _product_on(card, kinds, split, accumulator):
    """The product of a card, or None."""
    units = [unit for unit in UNITS if unit.card == card and unit.accumulator.dtype == accumulator]
    units = [unit for unit in units if unit.takes(*map(operand_format, kinds))]
    edges = [_block_edge(kind) for kind in kinds]
    if edges == [None, None]:
        plain = (unit for unit in units if unit.scale_format is None)
        return next((Product(unit, None, unit.split_interval if split else None) for unit in plain), None)
    if None in edges:
        return None
    formats = {_scale_format(kind) for kind in kinds}
    for unit in units:
        if formats == {unit.scale_format}:
            for block in unit.scale_blocks:
                if not any(edge % block for edge in edges):
                    return Product(unit, block)
    for unit in units:
        interval = unit.split_interval
        if interval is not None and not any(edge % interval for edge in edges):
            return Product(unit, interval, interval)
    return None


def _block_edge(kind):
    """Elements of a block along the contracted dimension; None without blocks."""
    return kind.layout.block[1] if isinstance(kind, Scaling) and kind.layout.block is not None else None


def _scale_format(kind):
    """The format of a unit's scales that holds those of a scaling's blocks, or None."""
    return E8M0 if kind.layout.scale_format is None and kind.power_2_scale else kind.layout.scale_format


def _described(kind):
    """What an error calls an operand."""
    if not isinstance(kind, Scaling):
        return format_name(kind)
    if kind.layout.block is None:
        return f"{kind.fmt!r} with one scale"
    scales = kind.layout.scale_format or f"float32 {'power-of-two ' * kind.power_2_scale}".strip()
    return f"{kind.fmt!r} in blocks of {_block_edge(kind)} with {scales} scales"
