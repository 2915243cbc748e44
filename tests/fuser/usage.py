"""How users call the five components. Every line must run after `fuser.compat.install()`, on CPU and on a GPU."""

import fuser.compat

fuser.compat.install()

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(32, 64, 1024, device=device, dtype=torch.bfloat16)
bias = torch.randn(1024, device=device, dtype=torch.bfloat16)

# 1. JIT fusions
from transformer_engine.pytorch.jit import bias_gelu_fused_, get_bias_dropout_add, jit_fuser, set_jit_fusion_options

set_jit_fusion_options()
y = bias_gelu_fused_(x, bias)
z = get_bias_dropout_add(training=True)(x, bias, y, 0.1)


@jit_fuser
def scaled_relu(t: torch.Tensor) -> torch.Tensor:
    return torch.relu(t) * 2


assert torch.equal(scaled_relu(x), torch.relu(x) * 2)

# 2. Activation functions with an optional quantizer (omitted: plain tensors)
import transformer_engine.pytorch as te
import transformer_engine_torch as tex

quantizer = te.MXFP8Quantizer(fp8_dtype=te.DType.kFloat8E4M3)
h = tex.gelu(x, quantizer)
assert isinstance(h, te.QuantizedTensor) and h.shape == x.shape
g = tex.swiglu(x)
assert g.shape == (32, 64, 512)
dx = tex.dgelu(torch.ones_like(x), x)
assert dx.dtype == x.dtype

# 3. The operation fuser
from transformer_engine.pytorch.ops.basic import GELU, BasicLinear, Bias
from transformer_engine.pytorch.ops.fuser import OperationFuser, register_backward_fusion, register_forward_fusion

fuser_pipeline = OperationFuser([BasicLinear(1024, 4096, device=device), Bias(4096, device=device), GELU()])
out = fuser_pipeline(x.float())
out.sum().backward()


@register_forward_fusion  # usable as a decorator: returns the function
def no_forward_fusion(ops, *, recipe=None):
    return ops


# 4. The class hierarchy: a new operation in a few lines
from transformer_engine.pytorch.ops.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext


class Double(BasicOperation):
    def op_forward(self, ctx: OperationContext, input_, **kwargs):
        ctx.save_for_backward(input_)
        return input_ * 2

    def op_backward(self, ctx: OperationContext, grad_output):
        (input_,) = ctx.saved_tensors
        return grad_output * 2  # no parameters: the bare gradient is enough; (grad, ()) is accepted too


v = torch.randn(8, 16, device=device, requires_grad=True)
Double()(v).sum().backward()
assert torch.equal(v.grad, torch.full_like(v, 2))

# 5. JAX, where it is installed
try:
    import jax.numpy as jnp
except ImportError:
    pass
else:
    from transformer_engine.jax.cpp_extensions.activation import act_lu

    a = act_lu(jnp.ones((4, 1, 256)), activation_type=("gelu",))
    s = act_lu(jnp.ones((4, 2, 256)), activation_type=("silu", "linear"))
    assert s.shape == (4, 256) or s.data.shape == (4, 256)

print("all five components answered")
