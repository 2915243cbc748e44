"""`install()` lets scripts written for TransformerEngine (TE) run unchanged: `import transformer_engine.pytorch as te`.

It puts modules named `transformer_engine...` and `transformer_engine_torch` into `sys.modules` whose names are this
package's objects: `te.ops.Linear is fuser.ops.Linear`. `uninstall()` takes them out again. Nothing of TE is loaded;
where TE itself has been imported already, `install()` refuses, since a program can't have both. What TE has and this
package has not is an error that says why (`REFUSED`).

    import fuser.compat
    fuser.compat.install()
    import transformer_engine.pytorch as te
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from refops.arguments import did_you_mean, shown

#: TE's module -> the module of this package whose names it shows; None for a package of modules only. Those of 2.20,
#: and former names of some (`custom_recipes.quantization*`).
MODULES = {
    "transformer_engine": None,
    "transformer_engine.common": None,
    "transformer_engine.common.recipe": "fuser.recipe",
    "transformer_engine.pytorch": "fuser",
    "transformer_engine.pytorch._extra_state": "fuser.extra_state",
    "transformer_engine.pytorch.constants": "fuser.constants",
    "transformer_engine.pytorch.custom_recipes": None,
    "transformer_engine.pytorch.custom_recipes.gemm": "fuser.gemm",
    "transformer_engine.pytorch.custom_recipes.quantization": "fuser.gemm",
    "transformer_engine.pytorch.custom_recipes.quantization_current_scaling": "fuser.custom_recipes.reference",
    "transformer_engine.pytorch.custom_recipes.quantization_nvfp4": "fuser.custom_recipes.reference",
    "transformer_engine.pytorch.custom_recipes.quantizer_factories": "fuser.custom_recipes.quantizer_factories",
    "transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo": "fuser.custom_recipes.quantizer_factory_zoo",
    "transformer_engine.pytorch.custom_recipes.reference_current_scaling": "fuser.custom_recipes.reference",
    "transformer_engine.pytorch.custom_recipes.reference_nvfp4": "fuser.custom_recipes.reference",
    "transformer_engine.pytorch.custom_recipes.reference_utils": "fuser.custom_recipes.reference",
    "transformer_engine.pytorch.distributed": "fuser.distributed",
    "transformer_engine.pytorch.export": "fuser.jit",
    "transformer_engine.pytorch.fp8": "fuser.fp8",
    "transformer_engine.pytorch.jit": "fuser.jit",
    "transformer_engine.pytorch.module": None,
    "transformer_engine.pytorch.module.base": "fuser.common",
    "transformer_engine.pytorch.ops": "fuser.ops",
    "transformer_engine.pytorch.ops._common": "fuser.common",
    "transformer_engine.pytorch.ops.basic": "fuser.basic",
    "transformer_engine.pytorch.ops.basic.activation": "fuser.basic",
    "transformer_engine.pytorch.ops.basic.add_extra_input": "fuser.basic.residual",
    "transformer_engine.pytorch.ops.basic.all_gather": "fuser.basic.collectives",
    "transformer_engine.pytorch.ops.basic.all_reduce": "fuser.basic.collectives",
    "transformer_engine.pytorch.ops.basic.basic_linear": "fuser.basic.basic_linear",
    "transformer_engine.pytorch.ops.basic.bias": "fuser.basic.bias",
    "transformer_engine.pytorch.ops.basic.constant_scale": "fuser.basic.constant_scale",
    "transformer_engine.pytorch.ops.basic.dropout": "fuser.basic.dropout",
    "transformer_engine.pytorch.ops.basic.grouped_linear": "fuser.basic.grouped_linear",
    "transformer_engine.pytorch.ops.basic.identity": "fuser.basic.structural",
    "transformer_engine.pytorch.ops.basic.l2normalization": "fuser.basic.l2_normalization",
    "transformer_engine.pytorch.ops.basic.layer_norm": "fuser.basic.normalization",
    "transformer_engine.pytorch.ops.basic.make_extra_output": "fuser.basic.residual",
    "transformer_engine.pytorch.ops.basic.quantize": "fuser.basic.quantize",
    "transformer_engine.pytorch.ops.basic.reduce_scatter": "fuser.basic.collectives",
    "transformer_engine.pytorch.ops.basic.reshape": "fuser.basic.structural",
    "transformer_engine.pytorch.ops.basic.rmsnorm": "fuser.basic.normalization",
    "transformer_engine.pytorch.ops.basic.swiglu": "fuser.basic",
    "transformer_engine.pytorch.ops.fused": "fuser.fused",
    "transformer_engine.pytorch.ops.fused.backward_activation_bias": "fuser.fused.backward_activation_bias",
    "transformer_engine.pytorch.ops.fused.backward_add_rmsnorm": "fuser.fused.backward_add_rmsnorm",
    "transformer_engine.pytorch.ops.fused.backward_linear_add": "fuser.fused.linear",
    "transformer_engine.pytorch.ops.fused.backward_linear_scale": "fuser.fused.linear",
    "transformer_engine.pytorch.ops.fused.forward_linear_bias_activation": "fuser.fused.linear",
    "transformer_engine.pytorch.ops.fused.forward_linear_bias_add": "fuser.fused.linear",
    "transformer_engine.pytorch.ops.fused.forward_linear_scale_add": "fuser.fused.linear",
    "transformer_engine.pytorch.ops.fused.grouped_mlp": "fuser.fused",
    "transformer_engine.pytorch.ops.fuser": "fuser.fuser",
    "transformer_engine.pytorch.ops.linear": "fuser.linear",
    "transformer_engine.pytorch.ops.op": "fuser.op",
    "transformer_engine.pytorch.ops.sequential": "fuser.sequential",
    "transformer_engine.pytorch.quantization": "fuser.quantization",
    "transformer_engine.pytorch.quantized_tensor": "fuser.quantization",
    "transformer_engine.pytorch.tensor": "fuser.quantization",
    "transformer_engine.pytorch.tensor.storage": "fuser.quantization",
    "transformer_engine.pytorch.tensor.utils": "fuser.quantization.master_weights",
    "transformer_engine.pytorch.utils": "fuser.utils",
    "transformer_engine_torch": "fuser.functional",
    "transformer_engine.jax": "fuser.xla",
    "transformer_engine.jax.activation": "fuser.xla",
    "transformer_engine.jax.cpp_extensions": "fuser.xla",
    "transformer_engine.jax.quantize": "fuser.xla",
    "transformer_engine.jax.quantize.helper": "fuser.xla.helper",
}
MODULES |= {
    f"transformer_engine.pytorch.tensor.{module}": "fuser.quantization"
    for kind in ("float8_blockwise", "float8", "grouped", "hybrid", "identity", "mxfp8", "nvfp4")
    for module in (f"{kind}_tensor", f"storage.{kind}_tensor_storage")
}
MODULES |= {
    f"transformer_engine.jax.{package}.{module}": "fuser.xla"
    for package, modules in {
        "cpp_extensions": ("activation", "amax", "quantization"),
        "quantize": ("metadata", "misc", "quantizer", "scaling_modes", "tensor"),
    }.items()
    for module in modules
}

_ATTENTION = "attention is not here"
_USERBUFFERS = "communication is not overlapped with products here (no Userbuffers)"

#: What is refused, a module of TE, a name in one, or everything else below it -> the reason. The longest path decides.
REFUSED = {
    "transformer_engine": "this package has te.ops, quantization, TE's compiled functions and JAX activations",
    "transformer_engine.common.recipe": "not one of TE 2.20's recipes",
    "transformer_engine.pytorch": "models are written with te.ops here; TE's modules (te.Linear ...), attention, MoE "
    "permutations, optimizers and CUDA graphs are not here",
    "transformer_engine.pytorch._extra_state": "extra state is tensors and JSON here, never a pickle",
    "transformer_engine.pytorch.attention": _ATTENTION,
    "transformer_engine.pytorch.constants": _ATTENTION,
    "transformer_engine.pytorch.cpp_extensions": "products are in fuser.gemm, activations and casts in "
    "transformer_engine_torch",
    "transformer_engine.pytorch.cpu_offload": "torch's hooks of saved tensors offload them",
    "transformer_engine.pytorch.custom_recipes.gemm": "fuser.gemm itself asks a quantizer for its product",
    "transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo": _ATTENTION,
    "transformer_engine.pytorch.custom_recipes.reference_nvfp4": "refops has casts to any format, fuser.gemm has "
    "products",
    "transformer_engine.pytorch.distributed": "torch.distributed has it, te.checkpoint recomputes, or TE's modules "
    "alone need it",
    "transformer_engine.pytorch.export": "only the flag that `jit` reads is here",
    "transformer_engine.pytorch.float8_tensor": "TE keeps it for old pickles, which are never loaded here",
    "transformer_engine.pytorch.fp8": "use what transformer_engine.pytorch.quantization has",
    "transformer_engine.pytorch.module": "TE's modules are not here: use te.ops",
    "transformer_engine.pytorch.ops": "not in TE 2.20.0.dev0, which this package is checked against: newer, or no name "
    "of TE's",
    "transformer_engine.pytorch.ops._common": "te.ops do not need it here",
    "transformer_engine.pytorch.ops.fused.UserbuffersBackwardLinear": _USERBUFFERS,
    "transformer_engine.pytorch.ops.fused.UserbuffersForwardLinear": _USERBUFFERS,
    "transformer_engine.pytorch.ops.fused.grouped_mlp": "it chooses cuDNN's kernels, which are not here",
    "transformer_engine.pytorch.ops.fused.userbuffers_backward_linear": _USERBUFFERS,
    "transformer_engine.pytorch.ops.fused.userbuffers_forward_linear": _USERBUFFERS,
    "transformer_engine.pytorch.ops.fuser": "a name for type hints",
    "transformer_engine.pytorch.quantization": "every format works on every machine, and "
    "is_fp8_available(return_reason=True) says how; a quantizer knows its dtype",
    "transformer_engine.pytorch.quantized_tensor": "torch.compile does not trace into quantized tensors here",
    "transformer_engine.pytorch.tensor": "an internal name",
    "transformer_engine.pytorch.tensor.nvfp4_tensor": "NVFP4Quantizer(with_rht=True, ...).rht_matrix has it",
    "transformer_engine.pytorch.utils": "a helper of TE's modules, of attention or of profiling",
    "transformer_engine_torch": "only activations and casts of TE's extension are here; products are in fuser.gemm",
    "transformer_engine.jax": "only activations and quantizers of TE's JAX package are here",
}


class _Alias(ModuleType):
    """A module under TE's name with the attributes of a module of this package, which is imported when first needed."""

    def __init__(self, name, target):
        super().__init__(name, f"{target or 'fuser'} under TransformerEngine's name, by fuser.compat.")
        self.__spec__ = ModuleSpec(name, loader=None, origin="fuser.compat", is_package=True)
        self.__path__ = []  # a package, so that submodules are looked up in sys.modules, and none is loaded from disk
        self._target = target

    def __getattr__(self, attribute):
        if attribute.startswith("__") and (attribute != "__all__" or self._target is None):
            raise AttributeError(f"module {self.__name__!r} has no attribute {attribute!r}")
        if self._target is not None:
            target = importlib.import_module(self._target)
            if attribute == "__all__":
                return getattr(target, "__all__", [name for name in dir(target) if not name.startswith("_")])
            if hasattr(target, attribute):
                return getattr(target, attribute)
        raise AttributeError(_refusal(f"{self.__name__}.{attribute}"))

    def __dir__(self):
        target = [] if self._target is None else dir(importlib.import_module(self._target))
        return sorted({*super().__dir__(), *target})


class _Refusals:
    """Explains a refused import: `from module import name` drops the error of an attribute."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Called by `import` for modules, and for names that a module does not have."""
        if name.partition(".")[0] in ("transformer_engine", "transformer_engine_torch"):
            raise ModuleNotFoundError(_refusal(name))


def _refusal(path):
    name, of_torch = path.rpartition(".")[2], path.startswith("transformer_engine.pytorch.")
    has_it = of_torch and name[0].isupper() and hasattr(importlib.import_module("fuser.ops"), name)
    target = MODULES.get(path.rpartition(".")[0])
    offered = [] if target is None else dir(importlib.import_module(target))
    hint = f"; transformer_engine.pytorch.ops has {name}" if has_it else did_you_mean(name, offered)
    return f"fuser.compat offers no {path}: {reason(path)}{hint}"


def reason(path: str) -> str:
    """Why a module or name of TE is refused, e.g. `"transformer_engine.pytorch.Linear"`; `ValueError` if it isn't."""
    parts = path.split(".") if isinstance(path, str) else []
    for count in range(len(parts), 0, -1):
        if ".".join(parts[:count]) in REFUSED:
            return REFUSED[".".join(parts[:count])]
    raise ValueError(f"path must be a module or name that is refused, or within one; got {shown(path)}")


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
    if _Refusals not in sys.meta_path:
        sys.meta_path.insert(0, _Refusals)


def uninstall():
    """Undo `install()`: later imports find the installed TransformerEngine, or none. Objects in use stay valid."""
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Alias)]:
        del sys.modules[name]
    if _Refusals in sys.meta_path:
        sys.meta_path.remove(_Refusals)


def _is_foreign(name):
    return name in sys.modules and not isinstance(sys.modules[name], _Alias)
