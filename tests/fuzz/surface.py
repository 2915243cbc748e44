"""The public surface: every function and class in the `__all__` of each package, and which of it no target calls."""

import importlib
import inspect

from harness import TARGETS, resolve

#: Modules whose `__all__` is public.
MODULES = (
    "refops",
    "refops.oracle",
    "refops.golden",
    "cuda_kernels.host",
    "cuda_kernels",
    "fuser",
    "fuser.functional",
    "fuser.ops",
    "fuser.quantization",
    "fuser.jit",
    "fuser.xla",
)
#: Modules without `__all__`, whose own functions and classes are public.
OPEN_MODULES = ("fuser.recipe", "fuser.gemm", "fuser.distributed")
#: Public names that have no target of their own, and why.
EXEMPT = {
    "fuser.DType": "an enumeration",
    "fuser.Quantizer": "a base class, used through its subclasses",
    "fuser.QuantizedTensor": "a base class, used through its subclasses",
    "fuser.QuantizedTensorStorage": "a base class, used through its subclasses",
    "fuser.quantization.KeepsQuantizedParameters": "a mix-in of operations, used through them",
    "fuser.quantization.RecipeState": "a base class, used through its subclasses",
    "fuser.ops.BasicOperation": "a base class, used through its subclasses",
    "fuser.ops.FusedOperation": "a base class, used through the fusions of pipelines",
    "fuser.ops.FusibleOperation": "a base class, used through its subclasses",
    "fuser.xla.Quantizer": "a base class, used through its subclasses",
    "fuser.fp8_autocast": "a deprecated name: it warns, and calls autocast",
    "fuser.fp8_model_init": "a deprecated name: it warns, and calls quantized_model_init",
}


def public_names():
    """Dotted name -> object of every public function and class; an object of several names under the first."""
    found, seen = {}, set()
    for module_name in (*MODULES, *OPEN_MODULES):
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        for name in names:
            value = getattr(module, name)
            own = module_name in MODULES or getattr(value, "__module__", None) == module_name
            if own and callable(value) and not inspect.ismodule(value) and id(value) not in seen:
                seen.add(id(value))
                found[f"{module_name}.{name}"] = value
    return found


def uncovered():
    """Public names that no target covers and that are not exempt."""
    covered = {id(resolve(name)) for target in TARGETS.values() for name in target.covers}
    exempt = {id(resolve(name)) for name in EXEMPT}
    return sorted(name for name, value in public_names().items() if id(value) not in covered | exempt)
