"""The oracle of products of matrices: `refops.oracle.check("matmul", ...)`.

`case` binds a call, `operands` reads what is multiplied, `product` derives the bounds, `cards` replays the orders of
cards, `judge` compares; of a wrong product `diagnosis` names one of the `faults`.
"""

from refops.oracle.products.case import ProductCase
from refops.oracle.products.judge import ProductReport, check_product

__all__ = ["ProductCase", "ProductReport", "check_product"]
