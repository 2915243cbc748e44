"""The gradient of a row-scaled activation: the one operation that sums along rows while it stores."""

from functools import cache

import numpy as np

from cuda_kernels.casts import STORAGES
from cuda_kernels.host.compile import compiled
from cuda_kernels.host.prologues import halves_of
from cuda_kernels.host.tiles import INPUT_WORDS, LOOP, inputs_at, outputs_at
from cuda_kernels.prologues import make_forward_product, make_scaled_gradient
from cuda_kernels.simt import F, device

#: Columns whose products are added from left to right before the sums of chunks are.
CHUNK = 128


@cache
def scaled_gradient(name, storage, out_storage, gated, interleaved):
    """Return `loop(words, first, last)` over rows: words of an `Inputs`, then of `Outputs`.

    Fills `data`, of dtype `out_storage`, with the gradient, and float32 `given` (M,) with that of the scales.
    """
    carrier, widen = STORAGES[storage].carrier.type, STORAGES[storage].widen
    target, narrow = STORAGES[out_storage].carrier.type, STORAGES[out_storage].narrow
    act_gradient, gate_gradient = make_scaled_gradient(name, False)
    product = make_forward_product(name, False)
    gate_gradient = gate_gradient or act_gradient
    halves = halves_of(interleaved) if gated else single

    def loop(words, first, last):
        inputs, out = inputs_at(words, 0), outputs_at(words, INPUT_WORDS)
        x, gradient, results = inputs.x.view(carrier), inputs.dy.view(carrier), out.data.view(target)
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
            out.given[row] = total

    words = [name, "backward-scaled", storage, out_storage, "interleaved" * interleaved]
    return compiled("-".join(filter(None, words)), loop, LOOP)


@device
def single(inputs, row, column, columns):
    """Unary activations: x stands for act and gate."""
    start = row * inputs.width + column
    return start, start, columns
