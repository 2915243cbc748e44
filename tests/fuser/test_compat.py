"""`fuser.compat`: te.ops scripts run unchanged, in processes of their own because sys.modules is the subject.

The processes are forked from one that has imported `fuser.compat` and nothing else, which takes two seconds.
"""

import importlib
import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import fuser
from fuser import compat, quantization
from tiers import SWEEP

ROOT = Path(__file__).resolve().parent.parent.parent
USAGE = (Path(__file__).parent / "usage.py").read_text()

#: docs/spec/fuser.md, section 9: what an aliased package must offer.
NAMES = {
    "transformer_engine.common.recipe": "Recipe Format DelayedScaling Float8CurrentScaling MXFP8BlockScaling "
    "Float8BlockScaling NVFP4BlockScaling CustomRecipe",
    "transformer_engine.pytorch": "QuantizedTensor Float8BlockQuantizer Float8CurrentScalingQuantizer Float8Quantizer "
    "MXFP8Quantizer NVFP4Quantizer QuantizerRole DType autocast quantized_model_init fp8_autocast fp8_model_init "
    "is_bf16_available is_fp8_available is_mxfp8_available is_nvfp4_available is_fp8_block_scaling_available ops "
    "QuantizedTensorStorage Quantizer prepare_for_saving restore_from_saved restore_from_func_ctx",
    "transformer_engine.pytorch.ops": "Sequential Linear BasicLinear Bias Identity Reshape Quantize LayerNorm RMSNorm "
    "L2Normalization AddExtraInput MakeExtraOutput ConstantScale Dropout AllGather AllReduce ReduceScatter "
    "GroupedLinear GELU GEGLU GLU QGELU QGEGLU ReLU ReGLU SReLU SReGLU SiLU SwiGLU SiTUGLU ClampedSwiGLU ScaledSwiGLU "
    "ScaledSiTUGLU ScaledSReLU ScaledClampedQGeGLU BasicOperation FusedOperation FusibleOperation "
    "register_forward_fusion register_backward_fusion register_forward_backward_fusion basic fused fuser op",
    "transformer_engine.pytorch.ops.basic": "GELU BasicLinear Bias is_op_fuser_grouped_tensor_path_supported",
    "transformer_engine.pytorch.ops.basic.grouped_linear": "OUTPUT_BUFFER_KEY GRAD_INPUT_BUFFER_KEY GroupedLinear",
    "transformer_engine.pytorch.ops.fuser": "OperationFuser register_forward_fusion register_backward_fusion",
    "transformer_engine.pytorch.ops.op": "BasicOperation FusedOperation FusibleOperation OperationContext",
    "transformer_engine.pytorch.ops.fused": "BackwardActivationBias BackwardAddRMSNorm BackwardLinearAdd "
    "BackwardLinearScale ForwardLinearBiasActivation ForwardLinearBiasAdd ForwardLinearScaleAdd "
    "GroupedMLP_CuTeGEMMGLU GroupedMLP_CuTeGEMMUnary",
    "transformer_engine.pytorch._extra_state": "UNSAFE_PICKLE_EXTRA_STATE_ENV",
    "transformer_engine.pytorch.quantization": "FP8GlobalStateManager autocast RecipeState",
    "transformer_engine_torch": "DType gelu geglu glu qgelu qgeglu relu reglu srelu sreglu silu swiglu situglu "
    "clamped_swiglu dgelu dgeglu dglu dqgelu dqgeglu drelu dreglu dsrelu dsreglu dsilu dswiglu dsituglu "
    "clamped_dswiglu scaled_swiglu scaled_situglu scaled_clamped_swiglu scaled_srelu scaled_dswiglu scaled_dsituglu "
    "scaled_clamped_dswiglu scaled_dsrelu dbias_dgelu dbias_dsilu dbias_drelu dbias_dqgelu dbias_dsrelu "
    "bgrad_quantize quantize dequantize split_quantize group_quantize group_dequantize bgrad_group_quantize "
    "splits_to_offsets splits_to_offsets_multi",
    "transformer_engine.pytorch.tensor": "GroupedTensor GroupedTensorStorage",
    "transformer_engine.pytorch.tensor.grouped_tensor": "GroupedTensor",
    "transformer_engine.pytorch.tensor.storage": "GroupedTensorStorage",
    "transformer_engine.pytorch.tensor.storage.grouped_tensor_storage": "GroupedTensorStorage",
}


@pytest.fixture(scope="module")
def run():
    """Call run(code): it runs in a process that has imported `fuser.compat` alone. A failure shows its traceback."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fuser.compat"])

    def call(code):
        with ProcessPoolExecutor(1, context) as pool:
            pool.submit(exec, code, {"__name__": "__main__"}).result(timeout=300)

    return call


WITHOUT_JAX = "import sys\nsys.modules['jax'] = None\n"


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="as installed", marks=pytest.mark.full),
        pytest.param(WITHOUT_JAX, id="without jax", marks=SWEEP),
    ],
)
def test_the_usage_script_runs(before):
    """In a new interpreter."""
    code = f"{before}exec(compile({USAGE!r}, 'usage.py', 'exec'))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "all five components answered\n"


def test_jax_names_without_jax_are_an_import_error(run):
    run(
        f"{WITHOUT_JAX}import fuser.compat\nfuser.compat.install()\n"
        "import transformer_engine.jax\n"
        "try: from transformer_engine.jax.cpp_extensions.activation import act_lu\n"
        "except ImportError as error: assert 'jax' in str(error)\n"
        "else: raise AssertionError"
    )


def test_star_imports(run):
    run(
        "import fuser.compat\nfuser.compat.install()\n"
        "from transformer_engine.pytorch.ops import *\n"
        "from transformer_engine.common.recipe import *\n"
        "Linear, Sequential, DelayedScaling, Format"
    )


def test_fp8_is_deprecated(run):
    run(
        "import warnings, fuser.compat\nfuser.compat.install()\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    from transformer_engine.pytorch.fp8 import DelayedScaling, autocast\n"
        "assert [w.category for w in caught] == [DeprecationWarning], caught"
    )


def test_every_name_is_there(run):
    checks = "\n".join(f"from {module} import {', '.join(names.split())}" for module, names in NAMES.items())
    run(f"import fuser.compat\nfuser.compat.install()\n{checks}")


def test_names_of_te_are_imported_or_refused_with_a_reason(run):
    """As scripts import them. fuser/README.md has which: `docs/te_names.py`."""
    run(
        "import importlib, json, warnings, fuser.compat\n"
        "fuser.compat.install()\n"
        "warnings.simplefilter('ignore')\n"
        "imported = refused = 0\n"
        f"for module, names in json.load(open({str(ROOT / 'docs' / 'te_names.json')!r})).items():\n"
        "    for code in [f'import {module}', *(f'from {module} import {name}' for name in names)]:\n"
        "        try:\n"
        "            exec(code)\n"
        "            imported += 1\n"
        "        except ImportError as error:\n"
        "            assert str(error).startswith(f'fuser.compat offers no {module}'), (code, error)\n"
        "            refused += 1\n"
        "assert imported > 250 and refused > 100, (imported, refused)"
    )


def test_reasons_are_those_of_te_s_names():
    """No reason is given for a module that TE does not have, or for a name that works."""
    names = json.loads((ROOT / "docs" / "te_names.json").read_text())
    known = {*names, *(f"{module}.{name}" for module in names for name in names[module])}
    known |= {path.rpartition(".")[0] for path in known} | {"transformer_engine", "transformer_engine.jax"}
    assert set(compat.REFUSED) <= known, set(compat.REFUSED) - known
    others = {name for name in compat.MODULES if ".jax" in name or ".custom_recipes.quantization" in name}
    assert set(compat.MODULES) - known == others - {"transformer_engine.jax"}
    assert compat.reason("transformer_engine.pytorch.attention.rope.X") == "attention is not here"
    for module, name in (path.rpartition(".")[::2] for path in compat.REFUSED.keys() - compat.MODULES):
        home = compat.MODULES.get(module)
        assert home is None or not hasattr(importlib.import_module(home), name), f"{module}.{name} works"


def test_attributes_say_why_too(run):
    run(
        "import fuser.compat\nfuser.compat.install()\n"
        "import transformer_engine.pytorch as te\n"
        "assert not hasattr(te, 'TransformerLayer') and hasattr(te, 'HybridQuantizer')\n"
        "try: te.constants.QKVLayouts\n"
        "except AttributeError as error: assert str(error).endswith('.QKVLayouts: attention is not here'), error\n"
        "else: raise AssertionError"
    )


def test_objects_are_this_package_s_own(run):
    run(
        "import fuser, fuser.compat, fuser.ops\n"
        "fuser.compat.install(); fuser.compat.install()\n"
        "import transformer_engine, transformer_engine.pytorch as te\n"
        "from transformer_engine.pytorch.ops.basic import BasicLinear\n"
        "assert transformer_engine.pytorch is te\n"
        "assert te.ops.BasicLinear is BasicLinear is fuser.ops.BasicLinear\n"
        "assert 'Linear' in dir(te.ops)\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('transformer_engine').origin == 'fuser.compat'"
    )


def test_uninstall_restores(run):
    run(
        "import sys, fuser.compat\n"
        "before = set(sys.modules)\n"
        "fuser.compat.install()\n"
        "import transformer_engine.pytorch as te\n"
        "fuser.compat.uninstall()\n"
        "assert not [name for name in set(sys.modules) - before if name.startswith('transformer_engine')]\n"
        "assert fuser.compat._Refusals not in sys.meta_path\n"
        "try:\n    import transformer_engine\n"
        "except ModuleNotFoundError: pass\n"
        "else: raise AssertionError\n"
        "assert te.ops.Linear(16, 16)\n"
        "fuser.compat.install()\n"
        "import transformer_engine.pytorch"
    )


def test_a_real_transformer_engine_is_an_error(run):
    run(
        "import sys, types, fuser.compat\n"
        "sys.modules['transformer_engine'] = types.ModuleType('transformer_engine')\n"
        "try: fuser.compat.install()\n"
        "except RuntimeError as error: assert 'transformer_engine is already imported' in str(error)\n"
        "else: raise AssertionError\n"
        "assert not isinstance(sys.modules['transformer_engine'], fuser.compat._Alias)\n"
        "assert 'transformer_engine_torch' not in sys.modules"
    )


@pytest.mark.parametrize("name", ["transformer_engine.pytorch.no_such_module", "transformer_engine.no_such_package"])
def test_a_module_that_is_not_offered_is_not_found(run, name):
    run(
        f"import fuser.compat\nfuser.compat.install()\n"
        f"try:\n    import {name}\n"
        f"except ModuleNotFoundError as error: assert {name!r} in str(error)\n"
        f"else: raise AssertionError"
    )


@pytest.mark.parametrize("name, near", [("NoSuch", "or no name of TE's"), ("LayerNrom", "(did you mean LayerNorm?)")])
def test_a_name_that_te_has_not_either(run, name, near):
    run(
        f"import fuser.compat\nfuser.compat.install()\n"
        f"try: from transformer_engine.pytorch.ops import {name}\n"
        f"except ImportError as error: assert str(error).endswith({near!r}), error\n"
        f"else: raise AssertionError"
    )


@pytest.mark.parametrize(
    "name, hint",
    [
        ("Linear", ": it is in fuser.ops"),
        ("MXFP8BlockScaling", ": it is in fuser.recipe"),
        ("BlockScaledTensorStorage", ": it is in fuser.quantization"),
        ("dgelu", ": it is in fuser.functional"),
        ("autocst", " (did you mean autocast or fp8_autocast?)"),
        ("Dropuot", " (did you mean fuser.ops.Dropout?)"),
        ("no_such", ""),
        ("__no_such__", ""),
    ],
)
def test_a_name_that_fuser_itself_has_not(name, hint):
    with pytest.raises(AttributeError) as caught:
        getattr(fuser, name)
    assert str(caught.value) == f"module 'fuser' has no attribute {name!r}{hint}"


@pytest.mark.parametrize(
    "name, hint",
    [
        ("MXFP4BlockScaling", " (did you mean fuser.recipe.BlockScaledRecipe(refops.MXFP4Scaling())?)"),
        ("MXFP8Scaling", " (did you mean fuser.recipe.MXFP8BlockScaling()?)"),
        ("no_such", ""),
        ("__no_such__", ""),
    ],
)
def test_a_recipe_that_is_not_there(name, hint):
    with pytest.raises(AttributeError) as caught:
        getattr(fuser.recipe, name)
    assert str(caught.value) == f"module 'fuser.recipe' has no attribute {name!r}{hint}"


def test_names_of_a_distributed_optimizer_are_in_fuser():
    assert fuser.quantize_master_weights is quantization.quantize_master_weights
    assert fuser.post_all_gather_processing is quantization.post_all_gather_processing
    assert fuser.GroupedTensor is quantization.GroupedTensor


def test_a_missing_name_says_where_to_look(run):
    run(
        "import fuser.compat\nfuser.compat.install()\n"
        "import transformer_engine.pytorch as te\n"
        "try: te.Linear\n"
        "except AttributeError as error: assert 'transformer_engine.pytorch.ops has Linear' in str(error)\n"
        "else: raise AssertionError"
    )
