"""Names for the type hints of the public calls.

bfloat16 is no dtype that NumPy's own hints know, so arrays are `NDArray[Any]`; the checks at run time say which dtypes
a call takes.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

__all__ = ["Array", "ArrayLike", "DTypeLike", "Number"]

#: A NumPy array of any dtype, ml_dtypes' included.
Array: TypeAlias = NDArray[Any]
#: A number of Python or NumPy: a scale, a parameter of an activation.
Number: TypeAlias = float | np.floating[Any]
