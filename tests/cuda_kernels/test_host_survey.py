"""`cuda_kernels.host.survey` measures what `refops.survey` measures with NumPy, bit for bit."""

import configparser
import importlib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from host_cases import ALIGNED, DTYPES, RAGGED, takes, tensor

import refops
from cuda_kernels.host import get_num_threads, set_num_threads, survey
from refops.survey import ARRAYS, GROUP, SCALINGS, Meter, Surveyor, installed_surveyor, measure, tensor_facts
from tiers import sampled

ROOT = Path(refops.__file__).parent.parent
SHAPES = [shape for shape in [*ALIGNED, *RAGGED] if np.prod(shape)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_facts_are_those_of_numpy(dtype):
    for shape in SHAPES:
        x = tensor(shape, dtype)
        assert tensor_facts(x, survey) == tensor_facts(x)
    for value in (0.0, -0.0, np.nan, np.inf):
        x = np.full((3, 5), value, dtype)
        assert tensor_facts(x, survey) == tensor_facts(x)


@sampled(("name", "dtype"), [*product(SCALINGS, DTYPES)], 25, in_all=6)
def test_measurements_are_those_of_numpy(name, dtype):
    """Every number of every scaling: sums in the same order, the same largest ratio, the same counts."""
    named, several = SCALINGS[name], 0
    for shape in SHAPES:
        x = tensor(shape, dtype)
        assert measure(x, named, survey) == measure(x, named), shape
        several += takes(named.scaling, shape, named.columnwise)
    assert several > 1


@pytest.mark.parametrize("threads", [1, 3])
def test_errors_are_those_of_numpy_in_each_band(threads):
    """The sums themselves, of more than one piece in both directions, whoever shares the work."""
    x = tensor((300, 8200), np.dtype(np.float32))
    q = refops.quantize(x, SCALINGS["mxfp8"].scaling)
    expected = ARRAYS.errors(x, q)
    usual = get_num_threads()
    try:
        set_num_threads(threads)
        signal, noise, *others = survey.errors(x, q)
    finally:
        set_num_threads(usual)
    np.testing.assert_array_equal(signal, expected.signal)
    np.testing.assert_array_equal(noise, expected.noise)
    assert tuple(others) == expected[2:]


def test_tensors_that_do_not_lie_as_loops_read_them():
    """A transposed one, and one that begins at an odd address, as an array behind others in a file may."""
    x = tensor((160, 96), np.dtype(np.float32))
    shifted = np.frombuffer(b"?" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    assert not shifted.flags.aligned
    for one in (x.T, shifted):
        assert tensor_facts(one, survey) == tensor_facts(one)
        assert measure(one, SCALINGS["mxfp8"], survey) == measure(one, SCALINGS["mxfp8"])


def test_refops_finds_it():
    """The entry point that the package declares is a module with a surveyor's functions."""
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    (line,) = declared["options.entry_points"][GROUP].strip().splitlines()
    module = importlib.import_module(line.split("=")[1].strip())
    wanted = [name for name in vars(Surveyor) if not name.startswith("_")]
    assert module is survey and all(callable(getattr(module, name)) for name in wanted) and len(wanted) == 4


def test_a_hadamard_transform_is_left_to_refops():
    """Its bits are the reference's own: the compiled one may round otherwise."""
    taken = {name for name, named in SCALINGS.items() if survey.takes(named.scaling)}
    assert set(SCALINGS) - taken == {"nvfp4-rht"}


def test_installed(monkeypatch):
    """What `pip install` made of the declaration."""
    monkeypatch.setattr("refops.survey.WORTH_COMPILING", 0)
    if installed_surveyor() is ARRAYS:
        pytest.skip("the installed refops is older than this entry point: pip install --editable .")
    meter, x = Meter(1), tensor((96, 160))
    assert meter.facts(x) == tensor_facts(x) and meter.surveyor is survey
