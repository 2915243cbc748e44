"""Identity, ConstantScale, Reshape, AddExtraInput, MakeExtraOutput, Quantize, Bias."""

import pytest
import torch
from one_rounding import assert_one_rounding

import fuser
from fuser import ops, recipe
from fuser.fuser import OperationFuser

pytestmark = pytest.mark.check

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TestIdentity:
    def test_quantized_input_stays(self):
        x = fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)(torch.randn(32, 32))
        with torch.no_grad():
            assert ops.Identity()(x) is x


class TestConstantScale:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("scale", [0, 0.3, -2])
    def test_against_torch(self, dtype, scale):
        x = torch.randn(3, 5, dtype=dtype, requires_grad=True)
        y = ops.ConstantScale(scale)(x)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert y.dtype is dtype
        assert torch.equal(y, x * scale)
        assert torch.equal(dx, dy * scale)

    def test_integer_input_follows_torch(self):
        assert ops.ConstantScale(0.5)(torch.arange(3)).dtype is torch.float32


class TestReshape:
    @pytest.mark.parametrize("shape", [(6, 4), (-1,), (2, -1, 2), [24]])
    def test_shapes(self, shape):
        x = torch.randn(2, 3, 4, requires_grad=True)
        y = ops.Reshape(shape)(x)
        assert torch.equal(y, x.reshape(*shape))
        dy = torch.randn_like(y)
        assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy.reshape(2, 3, 4))

    def test_non_contiguous(self):
        x = torch.randn(4, 3).t().requires_grad_()
        y = ops.Reshape(iter((2, 6)))(x)
        assert torch.equal(y, x.reshape(2, 6))
        assert torch.autograd.grad(y.sum(), x)[0].shape == (3, 4)


class TestAddExtraInput:
    @pytest.mark.parametrize("in_place", [True, False])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_values_and_gradients(self, in_place, dtype):
        x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
        extra = torch.randn(3, 4, dtype=dtype, requires_grad=True)
        wanted = extra.detach() + x.detach()
        y = ops.AddExtraInput(in_place=in_place)(x, extra)
        assert torch.equal(y, wanted)
        assert (y.data_ptr() == extra.data_ptr()) is in_place
        dy = torch.randn_like(y)
        for grad in torch.autograd.grad(y, [x, extra], dy):
            assert torch.equal(grad, dy)

    def test_only_the_extra_input_requires_grad(self):
        extra = torch.ones(3, requires_grad=True)
        ops.AddExtraInput()(torch.ones(3), extra).sum().backward()
        assert torch.equal(extra.grad, torch.ones(3))

    def test_order_in_a_pipeline(self):
        fuser_ = OperationFuser([ops.AddExtraInput(), ops.ConstantScale(10.0), ops.AddExtraInput()])
        y = fuser_(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0]))
        assert y.item() == 33.0


class TestMakeExtraOutput:
    @pytest.mark.parametrize("in_place", [True, False])
    def test_gradients_add_up(self, in_place):
        x = torch.randn(3, 4, requires_grad=True)
        y, extra = ops.MakeExtraOutput(in_place=in_place)(x)
        assert torch.equal(y, x)
        assert torch.equal(extra, x)
        assert y.data_ptr() == extra.data_ptr() == x.data_ptr()
        a, b = torch.randn_like(x), torch.randn_like(x)
        wanted = a + b
        (dx,) = torch.autograd.grad([y, extra], x, [a, b])
        assert torch.equal(dx, wanted)
        assert torch.equal(b, wanted) is in_place

    def test_in_place_with_an_expanded_gradient(self):
        x = torch.randn(3, 4, requires_grad=True)
        y, extra = ops.MakeExtraOutput(in_place=True)(x)
        (y * 2).sum().backward(retain_graph=True)
        x.grad = None
        (y.sum() + 3 * extra.sum()).backward()
        assert torch.equal(x.grad, torch.full_like(x, 4.0))

    def test_missing_gradient(self):
        from fuser.op import OperationContext

        dy = torch.randn(3)
        for in_place in (True, False):
            op = ops.MakeExtraOutput(in_place=in_place)
            dx, _, _ = op.fuser_backward([OperationContext()], dy, basic_op_grad_extra_outputs=[(None,)])
            assert dx is dy


class TestQuantize:
    @pytest.mark.parametrize("forward", [True, False])
    @pytest.mark.parametrize("backward", [True, False])
    def test_what_is_quantized(self, forward, backward):
        op = ops.Quantize(forward=forward, backward=backward)
        assert (op.num_quantizers("forward"), op.num_quantizers("backward")) == (forward, backward)
        x = torch.randn(32, 32, requires_grad=True)
        dy = torch.randn(32, 32)
        quantizer = fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
            y = op(x)
        assert isinstance(y, fuser.QuantizedTensor) is forward
        plain = y.dequantize() if forward else y
        assert torch.equal(plain, quantizer(x.detach()).dequantize() if forward else x)
        (dx,) = torch.autograd.grad(y if not forward else plain, x, dy)
        dx = dx.dequantize() if isinstance(dx, fuser.QuantizedTensor) else dx
        assert torch.equal(dx, quantizer(dy).dequantize() if backward else dy)

    def test_identity_outside_autocast(self):
        x = torch.randn(3, 5, requires_grad=True)
        y = ops.Quantize(backward=True)(x)
        assert torch.equal(y, x)
        assert not isinstance(y, fuser.QuantizedTensor)

    def test_no_backward_with_an_override(self):
        x = torch.randn(32, 32, requires_grad=True)
        dy = torch.randn(32, 32)
        current = recipe.Float8CurrentScaling(backward_override="high_precision")
        with fuser.autocast(recipe=current):
            y = ops.Quantize(forward=False, backward=True)(x)
        assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy)

    def test_decided_in_forward(self):
        """Backward runs outside autocast."""
        x = torch.randn(32, 32, requires_grad=True)
        dy = torch.randn(32, 32)
        y = ops.Quantize(forward=False, backward=True)(x)
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
            assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy)

    def test_quantized_input_is_not_quantized_again(self):
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()), torch.no_grad():
            once = ops.Quantize()(torch.randn(32, 32))
            assert ops.Quantize()(once) is once


class TestBias:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 3, 8), (0, 8)])
    def test_against_torch(self, dtype, shape):
        op = ops.Bias(8, dtype=dtype)
        with torch.no_grad():
            op.bias.copy_(torch.randn(8))
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        y = op(x)
        assert y.dtype is dtype
        assert torch.equal(y, x + op.bias)
        dy = torch.randn_like(y)
        dx, db = torch.autograd.grad(y, [x, op.bias], dy)
        assert torch.equal(dx, dy)
        terms = dy.double().reshape(-1, 8)
        assert_one_rounding(db, terms.sum(0), terms.abs().sum(0), error=len(terms) * 2.0**-24)

    def test_promotion(self):
        assert ops.Bias(8)(torch.ones(2, 8, dtype=torch.bfloat16)).dtype is torch.float32
        assert ops.Bias(8, dtype=torch.bfloat16)(torch.ones(2, 8)).dtype is torch.float32

    def test_starts_at_zero(self):
        op = ops.Bias(8)
        assert not op.bias.any()
        assert (op.local_size, op.tensor_parallel_size, op.tensor_parallel) == (8, 1, False)

    def test_meta_device(self):
        op = ops.Bias(4, device="meta", dtype=torch.bfloat16)
        assert op.bias.device.type == "meta"
        op.bias.requires_grad_(False).sequence_parallel = True
        op(torch.ones(2, 4, dtype=torch.bfloat16))
        assert op.bias.device.type == "cpu"
        assert op.bias.dtype is torch.bfloat16
        assert op.bias.sequence_parallel and not op.bias.requires_grad

    @pytest.mark.parametrize("kind", [recipe.Float8CurrentScaling, recipe.MXFP8BlockScaling])
    def test_gradient_is_quantized_for_the_linear_before(self, kind):
        """What the linear gets is exactly its quantizer's cast of the gradient."""
        model = ops.Sequential(ops.BasicLinear(32, 32), ops.Bias(32))
        received = []
        backward = model[0].op_backward
        model[0].op_backward = lambda ctx, grad: (received.append(grad), backward(ctx, grad))[1]
        x = torch.randn(32, 32, requires_grad=True)
        dy = torch.randn(32, 32)
        with fuser.autocast(recipe=kind()):
            y = model(x)
        y.backward(dy)
        (grad,) = received
        assert isinstance(grad, fuser.QuantizedTensorStorage)
        wanted = model[0].get_quantizer("backward", 0)(dy)
        assert torch.equal(grad.dequantize(), wanted.dequantize())
        torch.testing.assert_close(model[1].bias.grad, dy.sum(0), rtol=2e-6, atol=2e-5)

    def test_override_leaves_the_gradient_alone(self):
        model = ops.Sequential(ops.BasicLinear(32, 32), ops.Bias(32))
        x = torch.randn(32, 32, requires_grad=True)
        dy = torch.randn(32, 32)
        with fuser.autocast(recipe=recipe.Float8CurrentScaling(backward_override="high_precision")):
            y = model(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(dx, dy @ model[0].weight, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize(
    "op",
    [
        ops.Identity(),
        ops.AllReduce(),
        ops.AddExtraInput(),
        ops.MakeExtraOutput(),
        ops.ScaledSwiGLU(),
        ops.ScaledSReLU(),
        ops.GELU(),
    ],
)
def test_unknown_forward_keywords_are_pythons_type_error(op):
    x = torch.randn(4, 32)
    extra = [torch.ones(4)] if isinstance(op, ops.ScaledSwiGLU | ops.ScaledSReLU) else [x] * op.num_extra_inputs
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        op(x, *extra, foo=1)
