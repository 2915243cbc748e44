"""Where a diagnosis looks: tiles in which wrong entries lie densest, and larger regions that confirm a finding."""

import math

import numpy as np

from refops.oracle.geometry import TILE, VALUES, Geometry, Region, crop, whole

#: A whole matrix up to this many elements is its own probe, or is confirmed as a whole.
PROBE_ELEMENTS, CONFIRM_ELEMENTS = 1 << 15, 1 << 19
#: Outputs of sums, and whether an entry sums a whole column or row.
SUM_ARRAYS = {"dbias": "column", "drow_scales": "row"}


def tile_counts(mask, rows, columns):
    """Number of True in each tile of `rows` x `columns` entries."""
    if not mask.size:
        return np.zeros((0, 0))
    counts = np.add.reduceat(mask, np.arange(0, mask.shape[1], columns), axis=1, dtype=np.int32)
    return np.add.reduceat(counts, np.arange(0, mask.shape[0], rows), axis=0, dtype=np.int64)


class Probes:
    """Where the wrong entries lie: which tiles to probe, what to confirm on.

    Attributes:
        probes: regions of a tile, the densest first.
        confirm: regions that are larger, the probes' tiles among them.
        complete: whether those are the whole tensor.
    """

    def __init__(self, case, shape, wrong):
        self.shape = shape
        self.complete = True
        self._density = {}
        if not shape or math.prod(shape) == 0:
            self.probes = self.confirm = [whole(shape)]
            return
        for name, mask in wrong.items():
            if mask.ndim == 0 or name in SUM_ARRAYS or name.startswith("amax") or mask.shape == (1,):
                continue
            cropped = crop(case, name, mask, whole(shape))
            transposed, rows, columns = (False, 1, 1)
            if name not in VALUES:
                transposed, rows, columns = Geometry.of(case.scaling, name).entry(name)
            matrix = cropped.T if transposed else cropped
            if matrix.any():
                counts = tile_counts(matrix, max(TILE // rows, 1), max(TILE // columns, 1)).astype(float)
                self._density[name] = counts
        elements = math.prod(shape)
        if elements <= PROBE_ELEMENTS:
            self.probes = self.confirm = [whole(shape)]
            return
        tiles = self._chosen_tiles()
        self.probes = [self._tile(*tile) for tile in tiles]
        if elements <= CONFIRM_ELEMENTS:
            self.confirm = [whole(shape)]
        else:
            self.confirm, self.complete = self._bands(tiles), False

    def _total(self):
        return sum(counts / counts.sum() for counts in self._density.values())

    def _chosen_tiles(self):
        """The densest tile, one more for each array that has nothing wrong there, and more where little is wrong."""
        if not self._density:
            return [(0, 0)]
        total = self._total()
        chosen = [tuple(map(int, np.unravel_index(np.argmax(total), total.shape)))]
        for counts in self._density.values():
            if not any(counts[tile] for tile in chosen):
                chosen.append(tuple(map(int, np.unravel_index(np.argmax(counts), counts.shape))))
        order = np.argsort(-total, axis=None, kind="stable")[:8]
        for index in order:
            tile = tuple(map(int, np.unravel_index(index, total.shape)))
            found = sum(counts[t] for counts in self._density.values() for t in chosen)
            if found >= 16 or len(chosen) >= 4 or total[tile] == 0:
                break
            if tile not in chosen:
                chosen.append(tile)
        return chosen[:4]

    def _tile(self, row, column, height=1, width=1):
        rows = slice(row * TILE, min((row + height) * TILE, self.shape[0]))
        return Region(rows, slice(column * TILE, min((column + width) * TILE, self.shape[1])))

    def _bands(self, tiles):
        """Bands of rows through the tiles, the densest first; half a million elements in all."""
        budget = CONFIRM_ELEMENTS // (TILE * TILE)
        bands, columns = [], -(-self.shape[1] // TILE)
        rows = list(dict.fromkeys(row for row, _ in tiles))
        if self._density:
            total = self._total().sum(axis=1)
            rows += [int(r) for r in np.argsort(-total, kind="stable")[:4] if total[r] and int(r) not in rows]
        for row in rows:
            mine = [column for r, column in tiles if r == row]
            width = min(columns, max(1, budget // max(1, len({r for r, _ in tiles}))))
            start = 0
            if mine:
                start = min(max(min(mine) - width // 2, 0), columns - width)
            bands.append(self._tile(row, start, 1, width))
            bands += [self._tile(row, c) for c in mine if not start <= c < start + width]
            budget -= width
            if budget <= 0 and set(r for r, _ in tiles) <= {b.rows.start // TILE for b in bands}:
                break
        return bands

    def window(self, mask, elements):
        """A slice of a vector of sums around its densest wrong entries."""
        size = len(mask)
        width = max(1, min(size, elements))
        if width == size:
            return slice(0, size)
        counts = np.convolve(mask.astype(np.float64), np.ones(width), "valid")
        start = int(np.argmax(counts)) if counts.any() else 0
        return slice(start, start + width)
