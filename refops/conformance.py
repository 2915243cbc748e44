"""placeholder"""
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """What one comparison with another implementation's arrays found.

    Attributes:
        file: vector file that the arrays came from.
        peer: who made them.
        subject: what was compared, for example "MXFP8 rowwise codes, e4m3 from bf16".
        elements: how many codes, scales or values.
        differing: how many are not bit-equal (NaN codes compare as a class).
        explained: how many of those a documented divergence accounts for, element by element.
        divergence: the documented divergence, or "".
    """

    file: str
    peer: str
    subject: str
    elements: int
    differing: int
    explained: int = 0
    divergence: str = ""

    @property
    def ok(self):
        """Whether every difference is a documented one."""
        return self.differing == self.explained


def compare_vectors(directory):
    """Return the comparisons with every vector file in `directory`."""
    raise NotImplementedError
