"""`install()` lets scripts written for TransformerEngine (TE) run unchanged: `import transformer_engine.pytorch as te`.

It puts modules named `transformer_engine...` and `transformer_engine_torch` into `sys.modules` whose names are this
package's objects: `te.ops.Linear is fuser.ops.Linear`. `uninstall()` takes them out again. Nothing of TE is loaded;
where TE itself has been imported already, `install()` refuses, since a program can't have both.

    import fuser.compat
    fuser.compat.install()
    import transformer_engine.pytorch as te
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

#: TE's module -> the module of this package whose names it shows; None for a package of modules only.
MODULES = {
    "transformer_engine": None,
    "transformer_engine.common": None,
    "transformer_engine.common.recipe": "fuser.recipe",
    "transformer_engine.pytorch": "fuser",
    "transformer_engine.pytorch._extra_state": "fuser.extra_state",
    "transformer_engine.pytorch.custom_recipes": None,
    "transformer_engine.pytorch.custom_recipes.quantization": "fuser.gemm",
    "transformer_engine.pytorch.distributed": "fuser.distributed",
    "transformer_engine.pytorch.export": "fuser.jit",
    "transformer_engine.pytorch.fp8": "fuser.fp8",
    "transformer_engine.pytorch.jit": "fuser.jit",
    "transformer_engine.pytorch.ops": "fuser.ops",
    "transformer_engine.pytorch.ops._common": "fuser.common",
    "transformer_engine.pytorch.ops.basic": "fuser.basic",
    "transformer_engine.pytorch.ops.basic.grouped_linear": "fuser.basic.grouped_linear",
    "transformer_engine.pytorch.ops.fused": "fuser.fused",
    "transformer_engine.pytorch.ops.fuser": "fuser.fuser",
    "transformer_engine.pytorch.ops.linear": "fuser.linear",
    "transformer_engine.pytorch.ops.op": "fuser.op",
    "transformer_engine.pytorch.ops.sequential": "fuser.sequential",
    "transformer_engine.pytorch.quantization": "fuser.quantization",
    "transformer_engine.pytorch.quantized_tensor": "fuser.quantization",
    "transformer_engine.pytorch.tensor": "fuser.quantization",
    "transformer_engine.pytorch.tensor.float8_blockwise_tensor": "fuser.quantization",
    "transformer_engine.pytorch.tensor.float8_tensor": "fuser.quantization",
    "transformer_engine.pytorch.tensor.grouped_tensor": "fuser.quantization",
    "transformer_engine.pytorch.tensor.mxfp8_tensor": "fuser.quantization",
    "transformer_engine.pytorch.tensor.nvfp4_tensor": "fuser.quantization",
    "transformer_engine.pytorch.tensor.storage": "fuser.quantization",
    "transformer_engine.pytorch.tensor.storage.grouped_tensor_storage": "fuser.quantization",
    "transformer_engine_torch": "fuser.functional",
    "transformer_engine.jax": "fuser.xla",
    "transformer_engine.jax.activation": "fuser.xla",
    "transformer_engine.jax.cpp_extensions": "fuser.xla",
    "transformer_engine.jax.cpp_extensions.activation": "fuser.xla",
    "transformer_engine.jax.quantize": "fuser.xla",
    "transformer_engine.jax.quantize.quantizer": "fuser.xla",
    "transformer_engine.jax.quantize.scaling_modes": "fuser.xla",
    "transformer_engine.jax.quantize.tensor": "fuser.xla",
}


class _Alias(ModuleType):
    """A module under TE's name; its attributes are those of a module of this package, imported when first needed."""

    def __init__(self, name, target):
        super().__init__(name, f"{target or 'fuser'} under TransformerEngine's name, by fuser.compat.")
        self.__spec__ = ModuleSpec(name, loader=None, origin="fuser.compat", is_package=True)
        self.__path__ = []  # a package, so that submodules are looked up in sys.modules, and none is loaded from disk
        self._target = target

    def __getattr__(self, attribute):
        if self._target is None or (attribute.startswith("__") and attribute != "__all__"):
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {attribute!r}; fuser.compat offers {', '.join(MODULES)}"
            )
        target = importlib.import_module(self._target)
        if attribute == "__all__":
            return getattr(target, "__all__", [name for name in dir(target) if not name.startswith("_")])
        try:
            return getattr(target, attribute)
        except AttributeError:
            ops = importlib.import_module("fuser.ops") if self._target == "fuser" else None
            hint = f"; transformer_engine.pytorch.ops has {attribute}" if hasattr(ops, attribute) else ""
            raise AttributeError(f"fuser.compat offers no {self.__name__}.{attribute}{hint}") from None

    def __dir__(self):
        target = [] if self._target is None else dir(importlib.import_module(self._target))
        return sorted({*super().__dir__(), *target})


def install():
    """Make `transformer_engine` and `transformer_engine_torch` importable; calling it again changes nothing.

    Raises:
        RuntimeError: if TransformerEngine itself has been imported in this process.
    """
    real = [name for name in ("transformer_engine", "transformer_engine_torch") if _is_foreign(name)]
    if real:
        raise RuntimeError(
            f"fuser.compat.install() needs a process without TransformerEngine; {', '.join(real)} is already imported "
            f"from {getattr(sys.modules[real[0]], '__file__', 'elsewhere')}"
        )
    for name, target in sorted(MODULES.items()):  # parents first
        if name in sys.modules:
            continue
        sys.modules[name] = _Alias(name, target)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])


def uninstall():
    """Undo `install()`: later imports find the installed TransformerEngine, or none. Objects in use stay valid."""
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Alias)]:
        del sys.modules[name]


def _is_foreign(name):
    return name in sys.modules and not isinstance(sys.modules[name], _Alias)
