"""A `Spec` is the key of its kernel, in memory and on disk: whatever changes the kernel changes the key."""

import importlib
import inspect
import pkgutil
from dataclasses import dataclass, fields, is_dataclass, replace

import numpy as np
import pytest

from cuda_kernels import families, ptx_cache
from cuda_kernels.directions import Direction, direction_of
from cuda_kernels.operands import Coded, Spec, Stored, Values, described, pointer, scalar
from refops import E4M3, E5M2, MXFP8Scaling

MODULES = [
    importlib.import_module(f"cuda_kernels.families.{one.name}") for one in pkgutil.iter_modules(families.__path__)
]
#: name -> the `Spec` of each cost.
SPECS = {cost.name: cost.spec for module in MODULES for cost in module.costs()}


def another(value):
    """Another value of a field."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value ^ 1
    if isinstance(value, Direction):
        return direction_of(MXFP8Scaling(E4M3 if value.fmt == "e5m2" else E5M2), value.columnwise)
    if isinstance(value, Values):
        return replace(value, arithmetic="exact" if value.arithmetic == "fast" else "fast")
    if value is None:  # no sign mask
        return 1
    return "float16" if value == "bfloat16" else "bfloat16"
    return {"bfloat16": "float16", "float32": "float16"}[value]


@pytest.mark.parametrize("name", SPECS)
def test_another_field_is_another_kernel(name):
    spec = SPECS[name]
    assert type(spec).__dataclass_params__.frozen
    assert replace(spec) == spec and hash(replace(spec)) == hash(spec) and repr(replace(spec)) == repr(spec)
    for field in fields(spec):
        changed = replace(spec, **{field.name: another(getattr(spec, field.name))})
        assert changed != spec and hash(changed) != hash(spec) and repr(changed) != repr(spec), field.name


def test_every_spec_of_the_families_has_a_cost():
    classes = {one for module in MODULES for _, one in inspect.getmembers(module, inspect.isclass)}
    kernels = {one for one in classes if issubclass(one, Spec) and "title" in vars(one)}
    assert kernels == {type(spec) for spec in SPECS.values()} and all(map(is_dataclass, kernels))


def test_equal_specs_share_a_kernel():
    for spec in SPECS.values():
        assert spec.function((9, 0)) is replace(spec).function((9, 0))
    alike = {type(one).__name__ for one in SPECS.values() if one.function((9, 0)) is one.function((10, 0, "a"))}
    assert alike == {"Swizzle"}  # a naive kernel, which asks for no target


def named_alike(module):
    """A class of one name, in a module."""

    @dataclass(frozen=True)
    class Rows(Spec):
        whole: bool

    Rows.__module__, Rows.__qualname__ = module, "Rows"
    return Rows


def test_classes_of_one_name_in_two_modules_are_two_files(monkeypatch, tmp_path):
    monkeypatch.setattr(ptx_cache, "folder", lambda: tmp_path)
    first, second = named_alike("families.first")(True), named_alike("families.second")(True)
    assert first != second and repr(first) == "families.first.Rows(whole=True)"
    texts = [ptx_cache.get(spec, (9, 0), lambda spec=spec: f"of {spec!r}") for spec in (first, second, first)]
    assert texts == [f"of {spec!r}" for spec in (first, second, first)]
    assert len(list(tmp_path.iterdir())) == 2


def test_operands_are_described_field_by_field():
    kind, found = described(Coded, scales=np.float32)
    assert kind is Coded and tuple(found) == Coded._fields
    assert found["codes"] == pointer(np.uint8) and found["scales"] == pointer(np.float32)
    assert found["scale_stride"] == found["inner"] == scalar(np.int32)
    with pytest.raises(KeyError, match="data"):
        described(Stored)
