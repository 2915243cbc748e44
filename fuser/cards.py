"""How products are computed: summed in float32, or bit for bit as the tensor cores of a card compute them.

    with fuser.products("hopper"):
        loss = model(x).sum()
    loss.backward()  # its products, too, as a Hopper card computes them

What decides, the first that says anything:

1. the innermost `with fuser.products(name)` around the call;
2. the field `products` of the recipe in force;
3. the environment variable FUSER_PRODUCTS;
4. "float32".

A backward pass computes products as its forward pass did, wherever it is called and whatever the variable holds by
then, and so does what `fuser.checkpoint` computes again.
`fuser.gemm` says which operands a card multiplies, and how.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from fuser.dispatch import Buffers
from fuser.quantization.state import FP8GlobalStateManager
from fuser.recipe import PRODUCTS
from fuser.scopes import Scope, scope
from fuser.tracing import rehearsing
from refops.arguments import require_choice, shown
from refops.products.units import UNITS, Unit, require_interval

VARIABLE = "FUSER_PRODUCTS"

#: Products between two promotions; None: nothing is promoted; "split": as `MMParams.use_split_accumulator` says.
Promotion: TypeAlias = int | Literal["split"] | None
#: Dtypes of plain operands that tensor cores multiply.
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
#: Card -> compute capabilities of its GPUs.
_CAPABILITIES = {"ampere": {(8, 0)}, "hopper": {(9, 0)}, "blackwell": {(10, 0), (10, 3)}}


@dataclass(frozen=True)
class Products:
    """How products are computed.

    Attributes:
        name: "float32" or a card; of `said_products` whatever FUSER_PRODUCTS holds.
        promotion: when FP8 sums of few bits are added to float32 ones, as for `products`.
    """

    name: str
    promotion: Promotion = "split"

    def __str__(self) -> str:
        if self.promotion == "split":
            return self.name
        return f"{self.name}, {'never promoted' if self.promotion is None else f'promoted every {self.promotion}'}"

    def promoting(self, use_split_accumulator: bool) -> dict[str, Any]:
        """The arguments of `refops.gemm` for a product, given its `use_split_accumulator`."""
        if self.promotion == "split":
            return {"use_split_accumulator": use_split_accumulator}
        return {"use_split_accumulator": self.promotion is not None, "split_interval": self.promotion}


_BY_NAME = {name: Products(name) for name in PRODUCTS}
#: What the innermost scope says; None outside.
selected_products: ContextVar[Products | None] = ContextVar("fuser_products", default=None)
#: The value of FUSER_PRODUCTS when what is recomputed now was computed first; None: the current value counts.
_variable_then: ContextVar[str | None] = ContextVar("fuser_products_variable", default=None)


# --- what is in force -------------------------------------------------------------------------------


def products(name: str, *, promotion: Promotion = "split") -> Scope[Products | None]:
    """Return a context manager (and decorator) in which products are computed as on a card.

    It nests, can be entered again, and holds for the current thread or task alone (a `contextvars.ContextVar`). A
    backward pass has what its forward pass had.

    Args:
        name: "float32", "ampere", "hopper" or "blackwell".
        promotion: Hopper's tensor cores sum FP8 products in 14 bits, the first one and 13 behind it. After this many
            products, a multiple of 32, software adds the sum to one in float32, and starts again at 0. None: never.
            "split": every 128 products where `use_split_accumulator` of the recipe's `MMParams` is True, else never.
            What scales of blocks multiply is each block's sum, whatever is said here. Other products have nothing to
            promote.

    Raises:
        TypeError: an interval that is no integer. ValueError: another name or interval.
    """
    name = require_choice(name, "name", PRODUCTS)
    if promotion != "split":
        for unit in UNITS:
            if unit.split_interval is not None:
                promotion = _require_promotion(promotion, unit)
    return _scope(Products(name, promotion))


def _require_promotion(promotion: Any, unit: Unit) -> int | None:
    try:
        return require_interval(promotion, unit, "promotion")
    except (TypeError, ValueError) as error:
        rule = f"promotion must be 'split', None or a positive multiple of {unit.products}"
        raise type(error)(f"{rule}; got {shown(promotion)}") from None


@scope
def _scope(selected: Products) -> Iterator[Products | None]:
    with products_in_force(selected):
        yield selected


@contextmanager
def products_in_force(selected: Products | None) -> Iterator[Products | None]:
    """Like `products`, to be entered once, for what `said_products` returned; None: outside of every scope."""
    token = selected_products.set(selected)
    try:
        yield selected
    finally:
        selected_products.reset(token)


def settings_of_products() -> tuple[Products | None, str]:
    """What the innermost scope says (None outside) and what FUSER_PRODUCTS holds, for `products_again`."""
    return selected_products.get(), _variable()


@contextmanager
def products_again(settings: tuple[Products | None, str]) -> Iterator[None]:
    """Restore what `settings_of_products` returned; the recipe in force ranks between scope and variable, as before."""
    selected, variable = settings
    token = _variable_then.set(variable)
    try:
        with products_in_force(selected):
            yield
    finally:
        _variable_then.reset(token)


def _variable() -> str:
    then = _variable_then.get()
    return os.environ.get(VARIABLE, "") if then is None else then


def said_products() -> Products:
    """What the innermost scope says, else the recipe in force, else FUSER_PRODUCTS, unchecked."""
    selected = selected_products.get()
    if selected is not None:
        return selected
    state = FP8GlobalStateManager._of_thread.state
    name = state.fp8_recipe.products if state.fp8_enabled and state.fp8_recipe is not None else None
    name = name or _variable() or "float32"
    return _BY_NAME.get(name) or Products(name)


def current_products() -> Products:
    """Return how a product would be computed now, by scope, recipe or environment: its `name` and `promotion`.

    Raises:
        ValueError: FUSER_PRODUCTS holds no name of `products`.
    """
    said = said_products()
    require_choice(said.name, VARIABLE, PRODUCTS)
    return said


# --- which operands ---------------------------------------------------------------------------------


def card_for(a: Any, b: Any) -> Products | None:
    """How a card should multiply two operands of `fuser.gemm`; None if their product is that of "float32".

    A card multiplies operands that are quantized, or of float16 or bfloat16: two alike, or a quantized one and such a
    one. A rehearsal has no values to multiply.
    """
    plain = [operand for operand in (a, b) if not isinstance(operand, Buffers)]
    for operand in plain:
        if not isinstance(operand, torch.Tensor) or operand.dtype not in _SIXTEEN_BITS:
            return None
    if len(plain) == 2 and a.dtype is not b.dtype:
        return None
    selected = current_products()
    return None if selected.name == "float32" or rehearsing() else selected


def is_card(device: torch.device, selected: Products) -> bool:
    """Whether a device is the card, and the scope leaves promotion to its library."""
    if device.type != "cuda" or selected.promotion != "split":
        return False
    return torch.cuda.get_device_capability(device) in _CAPABILITIES[selected.name]
