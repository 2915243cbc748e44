"""The gradient of a row-scaled activation: the one operation that sums along rows while it stores."""

from functools import cache

import numpy as np

from cuda_kernels.casts import STORAGES
from cuda_kernels.formulas import scale_gradient_of, scaled_gradients_of
from cuda_kernels.host.compile import compiled
from cuda_kernels.host.tiles import LOOP, make_array_at, reader, size
from cuda_kernels.host.values import halves_of, inputs_at
from cuda_kernels.operands import ACCURATE, Inputs, Stored
from cuda_kernels.simt import F, device

#: Columns whose products are added from left to right before the sums of chunks are.
CHUNK = 128


@cache
def scaled_gradient(name, storage, out_storage, gated, interleaved, arithmetic):
    """Return `loop(words, first, last)` over rows: words of an `Inputs`, of a `Stored` and of a float32 array (M,).

    Fills the one, of dtype `out_storage`, with the gradient, the other with that of the scales.
    """
    read_inputs, widen = inputs_at(storage), STORAGES[storage].widen
    read_stored, narrow = reader(Stored, data=STORAGES[out_storage].carrier.type), STORAGES[out_storage].narrow
    at_stored, array_at = size(Inputs), make_array_at(np.float32)
    at_sums = at_stored + size(Stored)
    (act_gradient, gate_gradient), product = scaled_gradients_of(name, arithmetic), scale_gradient_of(name, arithmetic)
    halves = halves_of(interleaved) if gated else single

    def loop(words, first, last):
        inputs, results, sums = read_inputs(words, 0), read_stored(words, at_stored).data, array_at(words, at_sums)
        x, gradient = inputs.x, inputs.dy
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
    words += [arithmetic] if arithmetic != ACCURATE else []
    return compiled("-".join(filter(None, words)), loop, LOOP)


@device
def single(inputs, row, column, columns):
    """Unary activations: x stands for act and gate."""
    start = row * inputs.width + column
    return start, start, columns
