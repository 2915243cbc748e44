"""TE's constants and helper functions."""

import pytest
import torch

from fuser import DType, constants, ops, utils
from fuser import quantization as q
from fuser.common import get_dummy_wgrad


def test_dtypes_by_torch_s():
    for dtype in (torch.uint8, torch.int32, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2):
        assert constants.TE_DType_To_Torch[constants.TE_DType[dtype]] is dtype
    assert constants.TE_DType[torch.float8_e4m3fn] is DType.kFloat8E4M3
    assert (constants.MXFP8_BLOCK_SCALING_SIZE, constants.NVFP4_BLOCK_SCALING_SIZE) == (32, 16)


def test_positions_are_those_of_recipe_states():
    """What a position means is what `RecipeState` tells of it, without roles."""
    from fuser.recipe import DelayedScaling

    for positions, mode in ((constants.FP8FwdTensorIdx, "forward"), (constants.FP8BwdTensorIdx, "backward")):
        state = q.RecipeState.create(DelayedScaling(), mode=mode, num_quantizers=len(vars(positions)))
        for name, position in vars(positions).items():
            kind = state._slot_tensor_type(position)
            assert kind.upper() in name.rstrip("123").replace("GEMM", ""), (name, kind)
    assert constants.FP8FwdTensorIdx.GEMM2_WEIGHT == 4 and constants.FP8BwdTensorIdx.GRAD_INPUT2 == 3


def test_interleaved_rows_are_what_the_operation_reads():
    """A linear's weight, interleaved, before an activation of interleaved columns gives what they gave before."""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(256, 32), torch.randn(256), torch.randn(8, 32)
    expected = ops.SwiGLU()(x @ weight.T + bias)
    rows = utils.interleave_glu_tensor(weight, 32)
    interleaved = x @ rows.T + utils.interleave_glu_tensor(bias, 32)
    assert torch.equal(ops.SwiGLU(glu_interleave_size=32)(interleaved), expected)
    assert torch.equal(utils.deinterleave_glu_tensor(rows, 32), weight)
    assert torch.equal(rows[32:64], weight[128:160])
    with pytest.raises(ValueError, match=r"must divide dimension 0; got 48 and an input of shape \(256, 32\)"):
        utils.interleave_glu_tensor(weight, 48)


def test_sizes():
    assert utils.divide(12, 4) == 3 and utils.ceil_div(13, 4) == 4 and utils.round_up_to_nearest_multiple(13, 4) == 16
    with pytest.raises(ValueError, match="numerator must be divisible by denominator; got 13 and 4"):
        utils.divide(13, 4)
    assert utils.check_dim_for_fp8_exec(torch.empty(8, 16)) and not utils.check_dim_for_fp8_exec(torch.empty(8, 8))
    utils.assert_dim_for_fp8_exec(torch.empty(2, 4, 16), torch.empty(8, 32))
    with pytest.raises(ValueError, match=r"divisible by 16, .* got one of shape \(8, 24\)"):
        utils.assert_dim_for_fp8_exec(torch.empty(8, 16), torch.empty(8, 24))
    parts = utils.split_tensor_along_dim(torch.arange(12).view(2, 6), 1, 3, contiguous_split_chunks=True)
    assert [part.flatten().tolist() for part in parts] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert all(part.is_contiguous() for part in parts)


def test_tensors():
    x = torch.ones(3, requires_grad=True)
    assert utils.requires_grad(None, torch.ones(1), x) and not utils.requires_grad(None, torch.ones(1))
    assert utils.cast_if_needed(x, torch.float32) is x and utils.cast_if_needed(None, torch.float32) is None
    with torch.no_grad():
        assert utils.cast_if_needed(x, torch.float64).requires_grad
    assert utils.all_close(x.detach(), torch.ones(3))
    quantized = q.MXFP8Quantizer(DType.kFloat8E4M3)(torch.ones(32, 32))
    assert utils.needs_quantized_gemm(quantized) and not utils.needs_quantized_gemm(x)
    kept = torch.ones(4)
    kept._do_not_clear = True
    plain = torch.ones(4)
    utils.clear_tensor_data(None, plain, kept, quantized)
    assert plain.numel() == 0 and kept.numel() == 4 and not any(quantized.get_usages().values())


def test_initialization():
    torch.manual_seed(0)
    made = utils.get_default_init_method()(torch.empty(4000))
    assert made.std().item() == pytest.approx(0.023, rel=0.05)
    scaled = utils.scaled_init_method_normal(0.5, 8)(torch.empty(4000))
    assert scaled.std().item() == pytest.approx(0.125, rel=0.05)
    assert utils.init_method_constant(3.0)(torch.empty(2)).tolist() == [3.0, 3.0]


def test_the_machine(monkeypatch):
    monkeypatch.setattr(utils, "_compute_capability", lambda: (0, 0))
    assert not utils.is_bf16_compatible() and not utils.is_non_tn_fp8_gemm_supported()
    for capability, non_tn in (((9, 0), False), ((10, 0), True), ((12, 0), False), ((13, 0), True)):
        monkeypatch.setattr(utils, "_compute_capability", lambda capability=capability: capability)
        assert utils.get_device_compute_capability() == capability
        assert utils.is_non_tn_fp8_gemm_supported() == non_tn and utils.is_bf16_compatible()
    assert utils.is_bf16_available()


def test_stand_ins_for_gradients_share_memory():
    one = get_dummy_wgrad([3, 5], torch.float32, zero=True)
    assert one.data_ptr() == get_dummy_wgrad((3, 5), torch.float32).data_ptr() and not one.any()
    assert get_dummy_wgrad([3, 5], torch.bfloat16).dtype == torch.bfloat16
