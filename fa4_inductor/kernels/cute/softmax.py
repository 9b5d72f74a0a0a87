"""Online softmax of one warpgroup's score fragment, in base 2, with the score program inlined.

The shift of a row is its running maximum, kept stale while the true one exceeds it by at most 8 (base 2), as in the
FlashAttention-4 paper (arXiv 2603.05451): P then stays below 256, and the final division by the row sum makes it exact.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa4_inductor.kernels.cute import fragment, ops
from fa4_inductor.kernels.cute.program import Program, ProgramContext
from fa4_inductor.kernels.cute.static import TraceObject

RESCALE_THRESHOLD_LOG2 = 8.0
LOWEST_SHIFT = -(2.0**20)
"""A fixed shift at or below this is taken for a fill, of which rounding leaves nothing beside a score."""


def _first_register(col: int) -> int:
    """Register of the thread's column `col` in its first row."""
    return 4 * (col >> 1) + (col & 1)


def _row_maximum(scores: cute.Tensor, r: int, start: Float32) -> Float32:
    """Maximum of `start` and the thread's scores in its row r."""
    s = fragment.flat(scores)
    top = start
    for i in range(cute.size(s)):
        if fragment.row_of(i) == r:
            top = ops.fmax(top, s[i])
    return top


class Softmax(TraceObject):
    """State and steps of the softmax of the two rows a thread holds.

    row_max: shift of each row, in units of the raw score for PLAIN programs and of log2 otherwise.
    row_sum: this thread's part of sum(p), reduced over the quad at the end.
    factor: what O has to be multiplied by after the last `shift`.
    floor: a maximum at or below it counts as none (for programs with dense tiles; -inf for all others). Additive masks
        fill with finfo.min: such a row has seen no key worth the name until the tile is done, when it runs again.
    """

    def __init__(self, program: Program, softmax_scale: Float32):
        self.program = program
        # score * unit is in base-2 units
        self.unit = softmax_scale * ops.LOG2_E if program.plain else Float32(1.0)
        self.row_max = cute.make_rmem_tensor((fragment.ROWS,), Float32)
        self.row_sum = cute.make_rmem_tensor((fragment.ROWS,), Float32)
        self.factor = cute.make_rmem_tensor((fragment.ROWS,), Float32)
        self.floor = cute.make_rmem_tensor((1,), Float32)

    def reset(self, fixed_shift) -> None:
        """For a new query tile. fixed_shift: whether it has tiles that run with a fixed shift, and is verified."""
        self.floor[0] = ops.select(fixed_shift, Float32(LOWEST_SHIFT), -Float32.inf)
        for r in range(fragment.ROWS):
            self.row_max[r] = -Float32.inf
            self.row_sum[r] = Float32(0.0)

    def columns(self, ctx: ProgramContext, b, h, kv_first: Int32, u: tuple, size: int, mask: bool) -> list:
        """(kv_idx, column values) of each of the thread's columns, as far as the scores of this tile need them.

        Called while the tensor cores compute S, so that the program's column loads are in flight by then.

        Args:
            kv_first: kv_idx of the thread's first column. u: values of `uniform`. size: scores per thread.
            mask: whether `keep` will be evaluated.
        """
        program = self.program
        if program.plain and not (mask and program.masked):
            return []
        columns = []
        for col in range(size // fragment.ROWS):
            kv_idx = kv_first + fragment.column_of(_first_register(col))
            columns.append((kv_idx, program.column(ctx, b, h, kv_idx, u)))
        return columns

    def apply_program(
        self,
        scores: cute.Tensor,
        ctx: ProgramContext,
        b,
        h,
        q_rows: tuple,
        columns: list,
        u: tuple,
        rows: tuple,
        dense: list,
        mask: bool,
        shifted: bool,
    ) -> None:
        """Replace raw q.k by program scores (log2 units), and by -inf where the key does not take part.

        Args:
            q_rows: q_idx of the thread's two rows. columns: from `columns`.
            u, rows: values of `uniform`, and of `row` for both rows.
            dense: elements of each dense tile, in accumulator order.
            mask: evaluate keep. shifted: subtract the shift here, in the program's own arithmetic.
        """
        program = self.program
        mask = mask and program.masked
        if program.plain and not mask:
            return
        s = fragment.flat(scores)
        shifts = self.minus_shift() if shifted else [None] * fragment.ROWS
        for col, (kv_idx, c) in enumerate(columns):
            for r in range(fragment.ROWS):
                i = _first_register(col) + 2 * r
                value, d = s[i], tuple(t[i] for t in dense)
                if not program.plain:
                    value = program.score(ctx, value, b, h, q_rows[r], kv_idx, u, rows[r], c, d, shifts[r])
                if mask:
                    keep = program.keep(ctx, b, h, q_rows[r], kv_idx, u, rows[r], c, d)
                    value = ops.select(keep, value, -Float32.inf)
                s[i] = value

    def all_columns_kept(self, ctx: ProgramContext, b, h, tile_first: Int32, tile_n: int, u: tuple) -> Boolean:
        """Whether keep_column holds in all columns of the tile; each lane of a warp tests its share of them."""
        kept = Boolean(True)
        for i in range((tile_n + 31) // 32):
            kv_idx = tile_first + ops.imin(cute.arch.lane_idx() + 32 * i, tile_n - 1)
            c = self.program.column(ctx, b, h, kv_idx, u)
            kept = kept & self.program.keep_column(ctx, b, h, kv_idx, u, c)
        return cute.arch.vote_all_sync(kept)

    @cute.jit
    def mask_columns(
        self,
        all_kept: Boolean,
        scores: cute.Tensor,
        ctx: cutlass.Constexpr,
        b,
        h,
        kv_first: Int32,
        u: cutlass.Constexpr,
    ):
        """-inf in the columns that keep_column drops; a branch, since most tiles have none."""
        if not all_kept:
            self._drop_columns(scores, ctx, b, h, kv_first, u)

    def _drop_columns(self, scores: cute.Tensor, ctx: ProgramContext, b, h, kv_first: Int32, u: tuple) -> None:
        s = fragment.flat(scores)
        for col in range(cute.size(s) // fragment.ROWS):
            first = _first_register(col)
            kv_idx = kv_first + fragment.column_of(first)
            keep = self.program.keep_column(ctx, b, h, kv_idx, u, self.program.column(ctx, b, h, kv_idx, u))
            for i in (first, first + 2):
                s[i] = ops.select(keep, s[i], -Float32.inf)

    @cute.jit
    def seed(self, scores: cute.Tensor, shifted: cutlass.Constexpr):
        """Give rows that have no shift so far (sum and O are still zero) the maximum of these scores as their shift."""
        unset = self._unset(0) | self._unset(1)
        if cute.arch.vote_any_sync(unset):
            self._seed_unset_rows(scores, shifted)

    def _unset(self, r: int) -> Boolean:
        return self.row_max[r] <= self._floor()

    def _floor(self) -> Float32:
        return self.floor[0] if self.program.dense else -Float32.inf

    def _seed_unset_rows(self, scores: cute.Tensor, shifted: bool) -> None:
        s = fragment.flat(scores)
        for r in range(fragment.ROWS):
            unset = self._unset(r)
            top = ops.quad_max(_row_maximum(scores, r, -Float32.inf))
            self.row_max[r] = ops.select(unset, top, self.row_max[r])
            if shifted:
                # these scores came without a shift
                minus = ops.select(unset, self.minus_shift()[r], Float32(0.0))
                for i in range(cute.size(s)):
                    if fragment.row_of(i) == r:
                        s[i] = s[i] + minus

    @cute.jit
    def mask_edge(self, scores: cute.Tensor, kv_first: Int32, tile_end: Int32, seqlen_k: Int32):
        """-inf for the columns at and behind seqlen_k; a branch, since few tiles have any."""
        if tile_end > seqlen_k:
            self._drop_from(scores, kv_first, seqlen_k)

    def _drop_from(self, scores: cute.Tensor, kv_first: Int32, seqlen_k: Int32) -> None:
        # in the form `column < seqlen_k - kv_first` ptxas takes the tile for divergent code and moves the wgmma
        # descriptors to vector registers, at one more instruction per score
        s = fragment.flat(scores)
        for i in range(cute.size(s)):
            s[i] = ops.select(kv_first + fragment.column_of(i) < seqlen_k, s[i], -Float32.inf)

    def shift(self, scores: cute.Tensor) -> Boolean:
        """Move row_max to cover these scores; returns whether O has to be multiplied by `factor` (warp-uniform)."""
        tops = []
        grew = Boolean(False)
        for r in range(fragment.ROWS):
            tops.append(ops.quad_max(_row_maximum(scores, r, self.row_max[r])))
            grew = grew | ((tops[r] - self.row_max[r]) * self.unit > RESCALE_THRESHOLD_LOG2)
        grew = cute.arch.vote_any_sync(grew)
        for r in range(fragment.ROWS):
            old = self.row_max[r]
            new = ops.select(grew, tops[r], old)
            self.row_max[r] = new
            self.factor[r] = ops.exp2((old - self.finite(new)) * self.unit)
            self.row_sum[r] = self.row_sum[r] * self.factor[r]
        return grew

    def finite(self, top: Float32) -> Float32:
        """The shift used in exponents: 0 for a row that has none, so that exp2(-inf - shift) is 0."""
        return ops.select(top <= self._floor(), Float32(0.0), top)

    def shifts(self) -> list:
        """The shift of each row."""
        return [self.row_max[r] for r in range(fragment.ROWS)]

    def minus_shift(self) -> list:
        """What is added to the scores of each row, in base-2 units, before exp2."""
        return [-self.finite(self.row_max[r]) * self.unit for r in range(fragment.ROWS)]

    def exponentiate(self, scores: cute.Tensor, shifted: bool = False) -> None:
        """scores <- p = 2**(score - shift), and add p to row_sum. shifted: the shift is subtracted already."""
        s = fragment.flat(scores)
        minus = self.minus_shift()
        sums = [self.row_sum[r] for r in range(fragment.ROWS)]
        for i in range(cute.size(s)):
            r = fragment.row_of(i)
            if self.program.plain:
                x = ops.fma(s[i], self.unit, minus[r])
            else:
                x = s[i] if shifted else s[i] + minus[r]
            p = ops.exp2(x)
            s[i] = p
            sums[r] = sums[r] + p
        for r in range(fragment.ROWS):
            self.row_sum[r] = sums[r]

    @cute.jit
    def rescale(self, needed: Boolean, acc_o: cute.Tensor):
        """O <- O * factor where the last shift asks for it."""
        if needed:
            self._multiply(acc_o)

    def _multiply(self, acc_o: cute.Tensor) -> None:
        o = fragment.flat(acc_o)
        for i in range(cute.size(o)):
            o[i] = o[i] * self.factor[fragment.row_of(i)]

    def reduce_sums(self) -> None:
        """row_sum <- sum over the quad that shares the row."""
        for r in range(fragment.ROWS):
            self.row_sum[r] = ops.quad_sum(self.row_sum[r])

    def finish(self, ctx: ProgramContext, b, h, q_rows: tuple) -> tuple[list, list, list]:
        """Per row: the multiplier that normalises O, natural-log LSE, whether the row is empty. After `reduce_sums`.

        An empty row gets multiplier 0 and LSE -inf; with a sink, the sink's LSE.
        """
        scales, lses, empties = [], [], []
        for r in range(fragment.ROWS):
            total = self.row_sum[r]
            top = self.finite(self.row_max[r]) * self.unit
            scale = Float32(1.0)
            if self.program.has_sink:
                sink = self.program.sink(ctx, b, h, q_rows[r])
                both = ops.fmax(ops.select(total == 0.0, -Float32.inf, top), sink)
                both = self.finite(both)
                scale = ops.exp2(top - both)
                total = total * scale + ops.exp2(sink - both)
                top = both
            empty = total == 0.0
            empties.append(empty)
            scales.append(ops.select(empty, Float32(0.0), scale * ops.rcp(total)))
            lses.append(ops.select(empty, -Float32.inf, (top + ops.log2(total)) * ops.LN_2))
        return scales, lses, empties
