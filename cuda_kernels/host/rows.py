"""The gradient of a row-scaled activation: the one operation that sums along rows while it stores."""

from functools import cache

import numpy as np
from numba import types

from cuda_kernels.casts import STORAGES
from cuda_kernels.host.compile import compiled
from cuda_kernels.host.prologues import halves_of
from cuda_kernels.host.threads import share
from cuda_kernels.host.tiles import BYTES, FLOATS, INPUTS
from cuda_kernels.prologues import make_forward_product, make_scaled_gradient
from cuda_kernels.simt import F, device

#: Columns whose products are added from left to right before the sums of chunks are.
CHUNK = 128


def scaled_gradient(front, inputs, out, storage, sums):
    """Fill `out` (bytes of dtype `storage`, like x) with the gradient, float32 `sums` (M,) with that of the scales."""
    m = front.matrix_shape[0]
    loop = _loop(front.name, front.storage, storage, front.gated, front.interleave > 0)
    share(lambda first, last: loop(inputs, out, sums, first, last), m, inline=m * front.width <= 1 << 15)


@cache
def _loop(name, storage, out_storage, gated, interleaved):
    carrier, widen = STORAGES[storage].carrier.type, STORAGES[storage].widen
    target, narrow = STORAGES[out_storage].carrier.type, STORAGES[out_storage].narrow
    act_gradient, gate_gradient = make_scaled_gradient(name, False)
    product = make_forward_product(name, False)
    gate_gradient = gate_gradient or act_gradient
    halves = halves_of(interleaved) if gated else single

    def loop(inputs, out, sums, first, last):
        x, gradient, results = inputs.x.view(carrier), inputs.dy.view(carrier), out.view(target)
        products = np.empty(CHUNK, np.float32)
        for row in range(first, last):
            factor, total = inputs.row_scales[row], F(0)
            for left in range(0, inputs.width, CHUNK):
                columns, done = min(CHUNK, inputs.width - left), 0
                while done < columns:
                    a, b, n = halves(inputs, row, left + done, columns - done)
                    acts, gates, d_acts, d_gates = x[a : a + n], x[b : b + n], results[a : a + n], results[b : b + n]
                    at = row * inputs.width + left + done
                    dys, terms = gradient[at : at + n], products[done : done + n]
                    for c in range(n):
                        act, gate, dy = widen(acts[c]), widen(gates[c]), widen(dys[c])
                        terms[c] = product(act, gate, dy, inputs)
                        d_acts[c] = narrow(act_gradient(act, gate, dy * factor, inputs))
                        if gated:
                            d_gates[c] = narrow(gate_gradient(act, gate, dy * factor, inputs))
                    done += n
                chunk = F(0)
                for c in range(columns):
                    chunk += products[c]
                total += chunk
            sums[row] = total

    words = [name, "backward-scaled", storage, out_storage, "interleaved" * interleaved]
    signature = types.void(INPUTS, BYTES, FLOATS, types.int64, types.int64)
    return compiled("-".join(filter(None, words)), loop, signature)


@device
def single(inputs, row, column, columns):
    """Unary activations: x stands for act and gate."""
    start = row * inputs.width + column
    return start, start, columns
