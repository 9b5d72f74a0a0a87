"""The consumer warpgroup of the split-KV kernel: the steps of `consumer`, for packed rows and one run of key tiles."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa4_inductor.kernels.cute import fragment, ops
from fa4_inductor.kernels.cute.consumer import Consumer
from fa4_inductor.kernels.cute.packed import TILE_M, PackedRows

_WARPGROUP = 128
_QUERY_BARRIER = 1
_CHUNK = 8  # elements of 16 bytes


class SplitConsumer(Consumer):
    """`Consumer` whose rows differ in their query head: programs are evaluated for each row with its own head."""

    def ahead(self, at, n: Int32, mask: bool, dense: list[list]) -> list:
        """(kv_idx, column values of both rows) of each of the thread's columns, loaded while the tensor cores work."""
        program, ctx = self.fwd.program, self.ctx
        if program.plain and not (mask and program.masked):
            return []
        columns = []
        for col in range(cute.size(self.s) // fragment.ROWS):
            kv_idx = self._first_key(at, n) + fragment.column_of(_register(col))
            columns.append((kv_idx, at.by_head(lambda r: program.column(ctx, at.b, at.heads[r], kv_idx, at.u[r]))))
        return columns

    def _first_key(self, at, n: Int32) -> Int32:
        return at.origin + n * self.fwd.config.tile_n + fragment.thread_column(self.lane)

    def scores(self, n: Int32, at, ahead: list, mask: bool, shifted: bool = False) -> None:
        """Turn the raw S of key tile n into program scores, -inf where the key does not take part."""
        program, ctx, s = self.fwd.program, self.ctx, fragment.flat(self.s)
        for col, (kv_idx, columns) in enumerate(ahead):
            for r in range(fragment.ROWS):
                i, h = _register(col) + 2 * r, at.heads[r]
                where = (ctx, at.b, h, at.q_rows[r], kv_idx, at.u[r], at.rows[r], columns[r])
                value = s[i] if program.plain else program.score(ctx, s[i], *where[1:])
                if mask and program.masked:
                    value = ops.select(program.keep(*where), value, -Float32.inf)
                s[i] = value
        if mask:
            self._drop_before_first_key(at, n)

    @cute.jit
    def _drop_before_first_key(self, at: cutlass.Constexpr, n: Int32):
        """-inf in the columns of negative kv_idx; a branch, since only the first tile can have any."""
        if at.origin + n * self.fwd.config.tile_n < 0:
            self._drop(self._first_key(at, n))

    def _drop(self, first: Int32) -> None:
        s = fragment.flat(self.s)
        for i in range(cute.size(s)):
            s[i] = ops.select(first + fragment.column_of(i) >= 0, s[i], -Float32.inf)

    def load_queries(self, q: cute.Tensor, smem_q: cute.Tensor, rows: PackedRows) -> None:
        """Q of the tile's rows into shared memory (64, tile_d), by ordinary loads: the rows of a tile lie in any order.

        Rows that do not exist get the last one's values; columns behind head_dim get zeros.
        """
        fwd, b = self.fwd, rows.b
        chunks = fwd.tile_d // _CHUNK
        places, loaded = [], []
        for i in range(TILE_M * chunks // _WARPGROUP):
            place = self.lane + i * _WARPGROUP
            row, chunk = place // chunks, place % chunks
            q_idx, h = rows.query(ops.imin(row, rows.count - 1))
            source = ops.imin(chunk, fwd.head_dim // _CHUNK - 1)
            values = cute.make_rmem_tensor((_CHUNK,), fwd.dtype)
            cute.autovec_copy(cute.local_tile(q[b, h, q_idx, None], (_CHUNK,), (source,)), values)
            places.append((row, chunk))
            loaded.append(values)
        for (row, chunk), values in zip(places, loaded):
            if fwd.tile_d != fwd.head_dim:
                words = cute.recast_tensor(values, Int32)
                for w in range(cute.size(words)):
                    words[w] = ops.select(chunk < fwd.head_dim // _CHUNK, words[w], Int32(0))
            target = cute.local_tile(smem_q, (1, _CHUNK), (row, chunk))
            cute.autovec_copy(values, cute.make_tensor(target.iterator, cute.make_layout(_CHUNK)))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=_QUERY_BARRIER, number_of_threads=_WARPGROUP)

    @cute.jit
    def run(self, at: cutlass.Constexpr, keys: cutlass.Constexpr):
        """All key tiles of the split; leaves the unnormalised O and the row sums in registers."""
        self.softmax.reset(Boolean(False))
        self.o.fill(0.0)
        if keys.count > 0:
            self.tile(at, keys, Boolean(False), Int32(0), Int32(0))
        self.softmax.reduce_sums()

    def partial(self) -> list[tuple[Float32, Float32]]:
        """Per row: the multiplier that normalises O, and the base-2 LSE; 0 and -inf for a row that kept no key."""
        softmax, found = self.softmax, []
        for r in range(fragment.ROWS):
            total, empty = softmax.row_sum[r], softmax.row_sum[r] == 0.0
            lse = softmax.finite(softmax.row_max[r]) * softmax.unit + ops.log2(total)
            found.append((ops.select(empty, 0.0, ops.rcp(total)), ops.select(empty, -Float32.inf, lse)))
        return found


def _register(col: int) -> int:
    """Register of the thread's column `col` in its first row."""
    return 4 * (col >> 1) + (col & 1)
