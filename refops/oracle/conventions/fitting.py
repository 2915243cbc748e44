"""Numbers that a convention fits to a dump: the simplest one in the interval that the written entries allow."""

import numpy as np


def simplest_number(low, high):
    """The number in [low, high] with the fewest decimal digits, eight at most; None where the interval is empty."""
    if not (np.isfinite(low) and np.isfinite(high)) or low > high:
        return None
    middle = (low + high) / 2
    for digits in range(1, 9):
        number = float(f"{middle:.{digits}g}")
        if low <= number <= high:
            return number
    return middle
