"""SQNR of many tensors under every scaling, in few lines: for `refops report` and `refops inspect --summary`."""

from refops.arguments import dimensions
from refops.display.console import make_table, print_table, printable
from refops.display.numbers import decibels

#: Tensors beside each other in one table.
TENSORS_ACROSS = 10


def print_survey(console, survey):
    """Print one row a scaling, one lettered column a tensor, `TENSORS_ACROSS` tensors a table.

    Args:
        survey: list of (tensor name, `TensorFacts`, list of `Measurement`).
    """
    for start in range(0, len(survey), TENSORS_ACROSS):
        tensors = survey[start : start + TENSORS_ACROSS]
        letters = "abcdefghij"[: len(tensors)]
        for letter, (name, facts, _) in zip(letters, tensors, strict=True):
            shape = dimensions(facts.shape)
            console.print(f"  {letter}  {printable(name)}, {facts.dtype} {shape}, amax {facts.amax:.3g}")
        table = make_table("<scaling", *letters)
        for of_tensors in zip(*(measurements for _, _, measurements in tensors), strict=True):
            table.add_row(of_tensors[0].scaling, *map(decibels, of_tensors))
        print_table(console, table)
