"""Vector files of other implementations, and counts of how refops compares with them."""

import json
from dataclasses import dataclass

import numpy as np

from refops.arguments import BFLOAT16
from refops.formats import decode

DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": BFLOAT16}


@dataclass(frozen=True)
class Comparison:
    """What one comparison with another implementation's arrays found.

    Attributes:
        file: vector file that the arrays came from.
        peer: who made them.
        subject: what was compared, for example "MXFP8 rowwise codes, e4m3".
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


class Vectors:
    """One vector file: its metadata, its arrays, and the comparisons made with them so far."""

    def __init__(self, path):
        with np.load(path, allow_pickle=False) as arrays:
            self.arrays = {name: arrays[name] for name in arrays.files}
        self.meta = json.loads(self.arrays.pop("meta_json").tobytes())
        if str(self.meta["input"].get("generator", "")).startswith("exhaustive"):
            self.arrays["x_bits"] = np.arange(1 << 16, dtype=np.uint16)
        self.name = path.name
        self.comparisons = []

    @property
    def peer(self):
        """Name and version of who made the arrays."""
        peers = self.meta["peer"] if isinstance(self.meta["peer"], list) else [self.meta["peer"]]
        return "; ".join(f"{peer['name']} {peer['version']}" for peer in peers)

    @property
    def variants(self):
        """Settings that the arrays of this file were made with, one dict each; "id" is the arrays' prefix."""
        return self.meta.get("variants", [])

    def tensor(self, name="x_bits", dtype=None):
        """Bit patterns as a tensor of the file's input dtype."""
        return self.arrays[name].view(DTYPES[dtype or self.meta["input"]["dtype"]])

    def compare(self, subject, ours, theirs, *, same_class=None, divergence="", expected=None):
        """Record how `ours` compares with `theirs`.

        Args:
            same_class: bool array, True where both are of a class (NaN) whose bits are not compared.
            divergence, expected: name of a documented divergence, and the array (or the mask of elements) that it
            predicts for
                `theirs`: differing elements that match it are explained.
        """
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        if ours.shape != theirs.shape:
            raise ValueError(f"{self.name}: {subject}: shape {ours.shape} against {theirs.shape}")
        differs = ours != theirs
        if same_class is not None:
            differs &= ~same_class
        explained = np.zeros_like(differs)
        if expected is not None:
            explained = differs & (expected if expected.dtype == bool else expected == theirs)
        self.comparisons.append(
            Comparison(
                self.name,
                self.peer,
                subject,
                ours.size,
                int(differs.sum()),
                int(explained.sum()),
                divergence if explained.any() else "",
            )
        )

    def compare_codes(self, subject, ours, theirs, fmt, **documented):
        """`compare` for codes of `fmt`, NaN codes as one class."""
        both_nan = np.isnan(decode(ours, fmt)) & np.isnan(decode(theirs, fmt))
        self.compare(subject, ours, theirs, same_class=both_nan, **documented)

    def compare_floats(self, subject, ours, their_bits, **documented):
        """`compare` for float values given as bit patterns, NaN as one class."""
        theirs = np.asarray(their_bits).view(ours.dtype).reshape(ours.shape)
        bits = np.uint16 if ours.dtype.itemsize == 2 else np.uint32
        both_nan = np.isnan(ours.astype(np.float32)) & np.isnan(theirs.astype(np.float32))
        self.compare(
            subject, np.ascontiguousarray(ours).view(bits), theirs.view(bits), same_class=both_nan, **documented
        )


def leading(padded, like):
    """Return the leading part of `padded` that has the shape of `like`."""
    return padded[: like.shape[0], : like.shape[1]]


def bits_of(dtype):
    """The unsigned integer type as wide as a float dtype."""
    return np.uint16 if dtype.itemsize == 2 else np.uint32
