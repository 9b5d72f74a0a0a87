"""Gradients of the tensors that a score program captures, added up in fp32 in global memory.

The gradient of an element is the sum of P (dP - delta) d score / d element over the scores that read it. A thread adds
up in registers what its scores have in common: all of a head where the index knows neither key nor query, its two
keys' where it knows the key, and the two scores of equal distance that follow each other in its fragment where it is a
distance. Everything else goes to memory score by score; the eight lanes of a column hold neighbouring keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4_inductor.kernels.cute import fragment, ops
from fa4_inductor.kernels.cute.static import TraceObject


class LearnedGradients(TraceObject):
    """What one consumer thread adds to the gradients.

    Args:
        tensors: float32, innermost stride 1, one for each learned slot, in the order of the program.
    """

    def __init__(self, program, ctx, tensors: tuple, lane: Int32):
        self.program, self.ctx, self.lane = program, ctx, lane
        slots = list(dict.fromkeys(slot for slot, _ in program.learned))
        self.targets = [tensors[slots.index(slot)] for slot, _ in program.learned]
        self.kinds = [kind for _, kind in program.learned]
        counts = {"uniform": 1, "column": fragment.ROWS}
        self.sums = [
            cute.make_rmem_tensor((counts[kind],), Float32) if kind in counts else None for kind in self.kinds
        ]
        self.carried: list = []

    def begin(self) -> None:
        """Before the scores of a query tile."""
        self.carried = [[Float32(0.0), Float32(0.0)] for _ in self.kinds]

    def add(self, r: int, e: int, where: tuple, values: tuple) -> None:
        """The thread's next score, of its row r (a key) and of query e of a pair; by pairs, r = 1 first.

        where: arguments of the program's functions behind the score. values: one for each learned load.
        """
        indices = self.program.learned_index(self.ctx, *where)
        for i, (kind, value) in enumerate(zip(self.kinds, values)):
            if kind == "uniform":
                self.sums[i][0] = self.sums[i][0] + value
            elif kind == "column":
                self.sums[i][r] = self.sums[i][r] + value
            elif kind == "distance":
                if r == 1:  # eight keys further and, in the pair before, eight queries: the same distance
                    self._to_memory(i, indices[i], self.carried[i][e] + value)
                else:
                    self.carried[i][e] = value
            else:
                self._to_memory(i, indices[i], value)

    def end(self, where: list) -> None:
        """After the scores of a query tile. where: of the last query of each e in the row of r = 0."""
        for e in range(2):
            indices = self.program.learned_index(self.ctx, *where[e])
            for i, kind in enumerate(self.kinds):
                if kind == "distance":
                    self._to_memory(i, indices[i], self.carried[i][e])

    def clear(self) -> None:
        """Before the query tiles of a head."""
        for total in self.sums:
            if total is not None:
                total.fill(0.0)

    def flush(self, where: list) -> None:
        """After the query tiles of a head. where: of each of the thread's rows, for any query."""
        for r in range(fragment.ROWS):
            indices = self.program.learned_index(self.ctx, *where[r])
            for i, kind in enumerate(self.kinds):
                if kind == "column":
                    self._add_if(self.lane % 4 == 0, i, indices[i], ops.quad_sum(self.sums[i][r]))
                elif kind == "uniform" and r == 0:
                    total = ops.quad_sum(self.sums[i][0])
                    for offset in (4, 8, 16):
                        total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
                    self._add_if(self.lane % 32 == 0, i, indices[i], total)

    @cute.jit
    def _add_if(self, condition, i: cutlass.Constexpr, index: cutlass.Constexpr, value: Float32):
        if condition:
            self._to_memory(i, index, value)

    def _to_memory(self, i: int, index: tuple, value: Float32) -> None:
        target = self.targets[i]
        offset = Int64(0)
        for at, stride in zip(index, target.stride):
            offset = offset + Int64(at) * stride
        ops.add_float(target.iterator.toint() + 4 * offset, value)
