"""The public surface: every function and class that docs/reference promises, and which of it no target calls."""

import importlib
import sys

from harness import ROOT, TARGETS, resolve

sys.path.append(str(ROOT / "tests" / "docs"))
import reference_pages

#: Public names that have no target of their own, and why.
EXEMPT = {
    "cuda_kernels.emulator.CompilerMissingError": "an error",
    "cuda_kernels.emulator.DeviceError": "an error",
    "cuda_kernels.emulator.KernelCounters": "what counters returns",
    "cuda_kernels.emulator.Ran": "what run returns",
    "cuda_kernels.emulator.Unordered": "what unordered returns",
    "cuda_kernels.emulator.load": "what the first call of the others does",
    "refops.products.Accumulator": "a part of a unit",
    "refops.products.Operands": "what check_operands returns",
    "refops.products.Product": "what product_of returns",
    "refops.products.Unit": "what unit returns",
    "fuser.dispatch.one_backend": "for the calls of a pipeline, which have targets",
    "fuser.DType": "an enumeration",
    "fuser.Quantizer": "a base class, used through its subclasses",
    "fuser.QuantizedTensor": "a base class, used through its subclasses",
    "fuser.QuantizedTensorStorage": "a base class, used through its subclasses",
    "fuser.quantization.KeepsQuantizedParameters": "a mix-in of operations, used through them",
    "fuser.quantization.RecipeState": "a base class, used through its subclasses",
    "fuser.quantization.BufferStorage": "a base class, used through its subclasses",
    "fuser.QuantizerRequest": "a base class, used through its subclasses",
    "fuser.custom_recipes.reference.Fp4Formats": "an enumeration",
    "fuser.gemm.GEMMType": "an enumeration",
    "fuser.ops.BasicOperation": "a base class, used through its subclasses",
    "fuser.ops.FusedOperation": "a base class, used through the fusions of pipelines",
    "fuser.ops.FusibleOperation": "a base class, used through its subclasses",
    "fuser.xla.GroupedNoScaleTensor": "what grouped_quantize returns",
    "fuser.xla.GroupedScaledTensor1x": "what grouped_quantize returns",
    "fuser.xla.QuantizeConfig": "what get_quantize_config_with_recipe returns",
    "fuser.xla.Quantizer": "a base class, used through its subclasses",
    "fuser.xla.QuantizerSet": "what QuantizerFactory.create_set returns",
    "fuser.xla.fp8_autocast": "a deprecated name: it warns, and calls autocast",
    "fuser.xla.is_fp8_available": "a deprecated name: it warns, and calls is_scaling_mode_supported",
    "fuser.dispatch.repeated": "what functions of activations ask first; a call that it answers is one of theirs",
    "fuser.recipe.constant_of_graph": "what torch.compile asks a recipe for",
    "fuser.comparison.Comparison": "what compare returns",
    "fuser.comparison.LayerComparison": "a part of it",
    "fuser.comparison.RecipeComparison": "a part of it",
    "fuser.conversion.ConvertedConv1D": "made by convert",
    "fuser.conversion.ConvertedGELU": "made by convert",
    "fuser.conversion.ConvertedLayerNorm": "made by convert",
    "fuser.conversion.ConvertedLinear": "made by convert",
    "fuser.conversion.ConvertedRMSNorm": "made by convert",
    "fuser.conversion.ConvertedReLU": "made by convert",
    "fuser.conversion.ConvertedSequential": "made by convert",
    "fuser.conversion.ConvertedSiLU": "made by convert",
    "fuser.dispatch.Engine": "a base class, used through its subclasses",
    "fuser.dispatch.Reference": "what the functions of fuser.dispatch choose themselves",
    "fuser.dispatch.Kernels": "the same for tensors on a GPU",
    "fuser.fused.BackwardActivationBias": "made by the fusions of pipelines",
    "fuser.fused.BackwardAddRMSNorm": "made by the fusions of pipelines",
    "fuser.fused.BackwardLinearAdd": "made by the fusions of pipelines",
    "fuser.fused.BackwardLinearScale": "made by the fusions of pipelines",
    "fuser.fused.ForwardLinearBiasActivation": "made by the fusions of pipelines",
    "fuser.fused.ForwardLinearBiasAdd": "made by the fusions of pipelines",
    "fuser.fused.ForwardLinearScaleAdd": "made by the fusions of pipelines",
    "fuser.fused.GroupedMLP": "made by the fusions of pipelines",
    "fuser.recording.QuantizationRecord": "what statistics records",
    "fuser.recording.Statistics": "what statistics returns",
    "fuser.fp8_autocast": "a deprecated name: it warns, and calls autocast",
    "fuser.fp8_model_init": "a deprecated name: it warns, and calls quantized_model_init",
}


def public_names():
    """Dotted name -> object of every public function and class; an object of several names under the first."""
    found, seen = {}, set()
    for module_name in reference_pages.PUBLIC:
        module = importlib.import_module(module_name)
        for name in reference_pages.public_names(module_name):
            value = getattr(module, name)
            if callable(value) and id(value) not in seen:
                seen.add(id(value))
                found[f"{module_name}.{name}"] = value
    return found


def uncovered():
    """Public names that no target covers and that are not exempt."""
    covered = {id(resolve(name)) for target in TARGETS.values() for name in target.covers}
    exempt = {id(resolve(name)) for name in EXEMPT}
    return sorted(name for name, value in public_names().items() if id(value) not in covered | exempt)
