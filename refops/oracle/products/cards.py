"""The bits that cards compute for a product: `refops.products` on some of its rows and columns."""

from dataclasses import dataclass

import numpy as np

from refops.products import CARDS, matmul, product_of
from refops.products import Product as CardProduct
from refops.products.cards import operand_format
from refops.rounding import multiply_add, stored
from refops.tiles import ceil_div

#: Products after which accumulators of few bits may be emptied, other than the 128 of CUTLASS and DeepGEMM.
OTHER_INTERVALS = (32, 64, 256, 512, 1024)


@dataclass(frozen=True)
class Order:
    """One order in which a card computes a product.

    Attributes:
        card: its name.
        product: what the card has for the operands.
    """

    card: str
    product: CardProduct

    def __str__(self):
        interval = self.product.promotion
        return self.card if interval is None else f"{self.card}, promoted after every {interval} products"

    def sums(self, product, rows, columns):
        """float32, what the card adds up for a `Product` at some rows and columns, slices or arrays of indices."""
        a, b, mine = product.a, product.b, self.product
        kinds = [operand_format(kind_of(operand)) for operand in (a, b)]
        return matmul(
            a.elements[rows].astype(np.float32),
            b.elements[columns].astype(np.float32),
            mine.unit,
            a_format=kinds[0],
            b_format=kinds[1],
            a_scale=_block_scales(a, rows, mine.block),
            b_scale=_block_scales(b, columns, mine.block),
            promotion=mine.promotion,
        )

    def stored(self, product, rows, columns):
        """What the card stores for these sums: with scales of tensors, alpha and addends, rounded once."""
        a, b, sums = product.a, product.b, self.sums(product, rows, columns)
        with np.errstate(all="ignore"):
            factors = np.float32(product.alpha) * _factor(b, columns).T * _factor(a, rows)
            result = multiply_add(sums, factors * np.float32(1 / (a.top * b.top)), np.float32(0))
            for addend in product.addends(rows, columns):
                result = result + addend.astype(np.float32)
            return stored(result, product.dtype)


def orders_of(product, card=None, split_accumulator=None):
    """Every `Order` in which cards compute a product; an empty list where none has it.

    Args:
        card: of this card alone.
        split_accumulator: whether its accumulator is emptied; None: both, and with no card at other intervals, too.
    """
    found = []
    for name in CARDS if card is None else (card,):
        try:
            mine = {split: _product_of(product, name, split) for split in (False, True)}
        except (TypeError, ValueError):  # the card has no such product
            continue
        wanted = (False, True) if split_accumulator is None else (split_accumulator,)
        found += [Order(name, one) for one in dict.fromkeys(mine[split] for split in wanted)]
        if card is None and mine[False] != mine[True]:
            intervals = [interval for interval in OTHER_INTERVALS if interval < product.k]
            found += [Order(name, CardProduct(mine[True].unit, None, interval)) for interval in intervals]
    return found


def half_orders_of(product):
    """The `Order` of each card with a unit that adds up a product in float16."""
    found = []
    for name in CARDS:
        try:
            mine = product_of(name, *map(kind_of, (product.a, product.b)), accumulator=np.float16)
        except (TypeError, ValueError):  # the card has no such unit
            continue
        found.append(Order(name, mine))
    return found


def require_card(product, card):
    """Raise TypeError or ValueError, which name the cards that have the product, if a card does not have it."""
    _product_of(product, card, False)


def _product_of(product, card, split):
    return product_of(card, *map(kind_of, (product.a, product.b)), use_split_accumulator=split)


def kind_of(operand):
    """What `product_of` takes for an operand: its scaling, or the dtype of a plain one."""
    return operand.elements.dtype if operand.scaling is None else operand.scaling


def has_short_sums(product):
    """Whether a card has a unit of few bits for a product: Hopper, for FP8."""
    return bool(short_orders_of(product))


def short_orders_of(product):
    """Every `Order` of a unit that keeps fewer bits of its sums than float32 does."""
    return [order for order in orders_of(product) if order.product.unit.accumulator.fraction_bits < 23]


def _block_scales(operand, rows, block):
    """float32 (rows, blocks), each of the operand's scales repeated for the blocks that the card reads; or None."""
    if block is None:
        return None
    scales = operand.scales[rows]
    if operand.scale_format is not None:
        scales = np.abs(scales)  # a unit ignores the sign of NVFP4's
    repeated = np.repeat(scales, operand.block // block, axis=1)
    return np.ascontiguousarray(repeated[:, : ceil_div(operand.k, block)])


def _factor(operand, rows):
    factor = operand.factor if len(operand.factor) == 1 else operand.factor[rows]
    return factor.astype(np.float32)
