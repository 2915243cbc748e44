"""The peers: who can be compared with, what each offers, and who is absent, with the reason.

A peer's module has `NAME`, `PACKAGES` (what to give versions of) and `offers()`, which imports the peer and returns its
`Offer`s. Any ImportError there makes the peer absent.
"""

import importlib
import importlib.metadata
import warnings
from dataclasses import dataclass, field

import numpy as np

#: Modules of this package that hold a peer each, in the order of tables.
MODULES = (
    "torch_casts",
    "torch_eager",
    "torch_compiled",
    "torchao_tensors",
    "compressed_tensors_schemes",
    "modelopt_tensors",
    "mlx_arrays",
    "quack_blocks",
    "transformers_fp8",
    "auto_round_types",
    "quark_casts",
    "microxcaling_blocks",
    "gfloat_rounding",
    "ml_dtypes_casts",
    "jnp_casts",
    "jnp_formulas",
)


@dataclass(frozen=True)
class Divergence:
    """One way in which a peer differs.

    Attributes:
        name: short, unique within the peer.
        sentence: what the peer does, and what refops does.
        predict: function of the NumPy input to the peer's arrays under this and all earlier divergences of the offer.
    """

    name: str
    sentence: str
    predict: object = field(repr=False)


@dataclass(frozen=True)
class Offer:
    """How a peer does one subject.

    Attributes:
        subject: name of the subject.
        run: function of the prepared inputs to the peer's own result.
        arrays: function of that result to name -> NumPy array, named as refops names them; or to {"values": float32}
            where a peer returns no codes: these compare with the dequantized result of refops.
        prepare: function of one NumPy input to the peer's own array, without a copy where the peer allows it.
        variant: distinguishes several offers of one subject.
        dtypes: names of the input dtypes that it takes.
        divergences: from the widest to the full account.
        rows: how many rows of a tensor are compared, None for all: slow peers.
        refuses: kind of special value, "NaN" or "infinity" -> type of the exception that the peer raises for it.
    """

    subject: str
    run: object = field(repr=False)
    arrays: object = field(repr=False)
    prepare: object = field(repr=False)
    variant: str = ""
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    divergences: tuple[Divergence, ...] = ()
    rows: int | None = None
    refuses: dict = field(default_factory=dict)

    def compute(self, *inputs):
        """Prepare, run and read."""
        return self.arrays(self.run(*(self.prepare(x) for x in inputs)))


@dataclass(frozen=True)
class Peer:
    """One peer.

    Attributes:
        name: as in tables.
        packages: distribution name -> version.
        offers: what it can do; empty where it is absent.
        absent: why it cannot be imported, or "".
        formulas: whether it is this project's own formulas in the peer's language, and not the peer's function.
    """

    name: str
    packages: dict
    offers: tuple[Offer, ...] = ()
    absent: str = ""
    formulas: bool = False

    def offer(self, subject, variant=None):
        """The first offer of a subject (and variant), or None."""
        return next((o for o in self.offers if o.subject == subject and variant in (None, o.variant)), None)


def load(*names):
    """Return the peers (those named, or all) in the order of `MODULES`."""
    return [_load(module) for module in MODULES if not names or module in names]


def _load(module_name):
    module = importlib.import_module(f"peers.{module_name}")
    formulas = getattr(module, "FORMULAS", False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the imported packages' own making
            offers = tuple(module.offers())
    except ImportError as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Peer(module.NAME, versions(module.PACKAGES), absent=reason, formulas=formulas)
    return Peer(module.NAME, versions(module.PACKAGES), offers, formulas=formulas)


def versions(packages):
    """Distribution name -> version, those that are not installed left out."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def as_torch(x):
    """A NumPy array, bfloat16 included, as a torch tensor that shares its memory; a `Quantized` as it is."""
    from fuser import dispatch

    return dispatch.as_torch(x) if isinstance(x, np.ndarray) else x


def as_numpy(tensor):
    """A torch tensor as NumPy: 8-bit floats as their codes, bfloat16 as ml_dtypes'."""
    import torch

    from fuser import dispatch

    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)
    return dispatch.as_numpy(tensor)
