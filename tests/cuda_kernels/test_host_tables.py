"""Functions of 16-bit numbers that are read from tables have the bits of the functions, of every number."""

import ml_dtypes
import numpy as np
import pytest

from arrays import assert_same_bits
from cuda_kernels import host
from cuda_kernels.host import tables
from cuda_kernels.host.tables import Part, is_tabulated, table_of
from cuda_kernels.operands import PARAMETERS
from refops.activations import ACTIVATIONS, DEFAULT_PARAMETERS

STORAGES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
PARTS = {name: tuple(Part) if row.gated else (Part.VALUE, Part.DERIVATIVE) for name, row in ACTIVATIONS.items()}
READ = [
    (name, storage)
    for name in ACTIVATIONS
    for storage in STORAGES
    if any(is_tabulated(name, part, storage) for part in PARTS[name])
]


def every_number(storage, rows=16):
    """All 65,536 numbers of a dtype as float32, which is exact."""
    return np.arange(1 << 16, dtype=np.uint16).view(STORAGES[storage]).reshape(rows, -1)


def narrowed(x, storage):
    """float32 rounded to a dtype, NaN as the kernels store it."""
    with np.errstate(all="ignore"):
        return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(STORAGES[storage]).view(np.uint16))


def gates(x):
    """`x`, and beside it numbers of all magnitudes as gates, in any order."""
    return np.concatenate([x, np.random.default_rng(1).permutation(x.reshape(-1)).reshape(x.shape)], -1)


@pytest.mark.parametrize(("name", "storage"), READ)
def test_values_are_those_of_float32(name, storage):
    x = every_number(storage)
    x = gates(x) if ACTIVATIONS[name].gated else x
    got, computed = host.activation(name, x), host.activation(name, x.astype(np.float32))
    assert_same_bits(got.view(np.uint16), narrowed(computed, storage))


@pytest.mark.parametrize(("name", "storage"), READ)
def test_gradients_are_those_of_float32(name, storage):
    x, dy = every_number(storage), np.random.default_rng(2).permutation(every_number(storage))
    x = gates(x) if ACTIVATIONS[name].gated else x
    got = host.activation_grad(name, dy, x)
    computed = host.activation_grad(name, dy.astype(np.float32), x.astype(np.float32))
    assert_same_bits(got.view(np.uint16), narrowed(computed, storage))


def test_what_is_read_is_what_costs():
    assert is_tabulated("gelu", Part.VALUE, "bfloat16") and is_tabulated("situglu", Part.GATE, "float16")
    assert not is_tabulated("gelu", Part.VALUE, "float32")  # of 2^32 numbers
    for name, part in (("relu", Part.VALUE), ("srelu", Part.DERIVATIVE), ("swiglu", Part.GATE)):
        assert not is_tabulated(name, part, "bfloat16")


def test_each_setting_of_the_parameters_has_its_table():
    x = np.linspace(-4, 4, 64, dtype=np.float32).astype(STORAGES["bfloat16"]).reshape(2, 32)
    tight, loose = (host.activation("clamped_swiglu", x, limit=limit) for limit in (1.0, 3.0))
    for limit, got in ((1.0, tight), (3.0, loose)):
        computed = host.activation("clamped_swiglu", x.astype(np.float32), limit=limit)
        assert_same_bits(got.view(np.uint16), narrowed(computed, "bfloat16"))
    assert (tight.view(np.uint16) != loose.view(np.uint16)).any()


def test_tables_are_kept_and_not_without_end():
    numbers = [np.float32(DEFAULT_PARAMETERS[name]) for name in PARAMETERS]
    first = table_of("silu", Part.VALUE, "bfloat16", numbers)
    assert first is table_of("silu", Part.VALUE, "bfloat16", numbers)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    assert tables._table_of.cache_info().maxsize == tables.MOST_TABLES
