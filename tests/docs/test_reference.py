"""Every public name is in the reference pages. What Sphinx makes of them: `make docs`."""

import importlib
import inspect

import pytest
from reference_pages import PUBLIC, described, public_names

DESCRIBED = described()


@pytest.mark.parametrize("module_name", PUBLIC)
def test_every_public_name_is_described(module_name):
    """Here, or, where the same object is public in two places, there."""
    module = importlib.import_module(module_name)

    def there(name):
        value = getattr(module, name)
        others = (getattr(importlib.import_module(other), name, None) for other, same in DESCRIBED if same == name)
        return any(value is other for other in others)

    missing = [name for name in public_names(module_name) if (module_name, name) not in DESCRIBED and not there(name)]
    assert not missing


@pytest.mark.parametrize("module_name", PUBLIC)
def test_every_public_function_and_class_has_a_docstring_of_its_own(module_name):
    module = importlib.import_module(module_name)
    for name in public_names(module_name):
        value = getattr(module, name)
        if inspect.isclass(value):
            assert value.__doc__, f"{module_name}.{name}"
        elif callable(value):
            assert inspect.getdoc(value), f"{module_name}.{name}"


def test_every_described_name_exists():
    """Sphinx says so too, but not in `make test`."""
    for module_name, name in DESCRIBED:
        assert hasattr(importlib.import_module(module_name), name), f"{module_name}.{name}"
