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


def _bit(col: int) -> int:
    """The bit of a column in a word of 32, as a signed number."""
    return 1 << (col & 31) if col & 31 < 31 else -(1 << 31)


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

    bounded: scores are so small that they need no shift: it stays 0.
    row_max: shift of each row, in units of the raw score for PLAIN programs and of log2 otherwise.
    row_sum: this thread's part of sum(p), reduced over the quad at the end.
    factor: what O has to be multiplied by after the last `shift`.
    floor: a maximum at or below it counts as none (for programs whose scores may be fills; -inf for all others).
        Additive masks fill with finfo.min: such a row has seen no key worth the name until the tile is done, when it
        runs again.
    row_scores, common: for programs whose rows share their shift, what is left of the shift for a row,
        row_score - row_max == common.
    """

    def __init__(self, program: Program, softmax_scale: Float32, polynomial_exp2: int | None):
        """polynomial_exp2: of KernelConfig, for scores that are bounded; None for all others."""
        self.program, self.bounded = program, polynomial_exp2 is not None
        self.polynomial_exp2 = polynomial_exp2 if self.bounded and program.special_functions else 0
        # score * unit is in base-2 units
        self.unit = softmax_scale * ops.LOG2_E if program.plain else Float32(1.0)
        self.row_max = cute.make_rmem_tensor((fragment.ROWS,), Float32)
        self.row_sum = cute.make_rmem_tensor((fragment.ROWS,), Float32)
        self.factor = cute.make_rmem_tensor((fragment.ROWS,), Float32)
        self.floor = cute.make_rmem_tensor((1,), Float32)
        self.row_scores = cute.make_rmem_tensor((fragment.ROWS,), Float32)
        self.common = cute.make_rmem_tensor((1,), Float32)

    def reset(self, fixed_shift: Boolean) -> None:
        """For a new query tile. fixed_shift: whether it has tiles that run with a fixed shift, and is verified."""
        self.floor[0] = ops.select(fixed_shift, Float32(LOWEST_SHIFT), -Float32.inf)
        for r in range(fragment.ROWS):
            self.row_max[r] = Float32(0.0) if self.bounded else -Float32.inf
            self.row_sum[r] = Float32(0.0)

    def take_row_scores(self, ctx: ProgramContext, at) -> None:
        """For a new query tile of a program whose rows share their shift."""
        for r in range(fragment.ROWS):
            self.row_scores[r] = self.program.row_score(ctx, at.b, at.h, at.q_rows[r], at.u, at.rows[r])

    def columns(self, ctx: ProgramContext, b, h, kv_first: Int32, u: tuple, size: int, mask: bool) -> list:
        """Column values of each of the thread's columns, as far as the scores of this tile need them.

        Called while the tensor cores compute S, so that the program's column loads are in flight by then.

        Args:
            kv_first: kv_idx of the thread's first column. u: values of `uniform`. size: scores per thread.
            mask: whether `keep` will be evaluated.
        """
        program = self.program
        if program.plain and not (mask and program.masked and program.has_keep):
            return []
        columns = []
        for col in range(size // fragment.ROWS):
            kv_idx = kv_first + fragment.column_of(_first_register(col))
            columns.append(program.column(ctx, b, h, kv_idx, u))
        return columns

    def apply_program(
        self, scores: cute.Tensor, ctx: ProgramContext, at, kv_first: Int32, ahead, mask: bool, shifted: bool
    ) -> None:
        """Replace raw q.k by program scores (log2 units), and by -inf where the key does not take part.

        Args:
            at: consumer.TileCoordinates. kv_first: kv_idx of the thread's first column.
            ahead: from `Consumer.ahead`.
            mask: evaluate keep. shifted: subtract the shift here, in the program's own arithmetic.
        """
        program = self.program
        mask = mask and program.masked
        if program.plain and not mask:
            return
        s = fragment.flat(scores)
        shifts = self.added_shift() if shifted else None
        kept = [self._kept_bits(ctx, at, r, kv_first, cute.size(s)) for r in range(fragment.ROWS)] if mask else None
        for col in range(cute.size(s) // fragment.ROWS):
            offset = fragment.column_of(_first_register(col))
            c = ahead.columns[col] if ahead.columns else ()
            for r in range(fragment.ROWS):
                i = _first_register(col) + 2 * r
                d, t = tuple(x and x[i] for x in ahead.dense), tuple(x[r][col] for x in ahead.tables)
                where, value = (at.u, at.rows[r], c), s[i]
                if shifted:
                    value = program.shifted_score(
                        ctx, value, at.b, at.h, at.q_rows[r], kv_first, offset, *where, shifts[r], d, t
                    )
                elif not program.plain:
                    value = program.score(ctx, value, at.b, at.h, at.q_rows[r], kv_first + offset, *where, d, t)
                if mask:
                    if program.has_keep:
                        keep = program.keep_rest(ctx, at.b, at.h, at.q_rows[r], kv_first + offset, *where, d, t)
                        value = ops.select(keep, value, -Float32.inf)
                    if program.has_interval:
                        value = ops.select((kept[r][col >> 5] & _bit(col)) != 0, value, -Float32.inf)
                s[i] = value

    def _kept_bits(self, ctx: ProgramContext, at, r: int, kv_first: Int32, size: int) -> list[Int32]:
        """Which of the thread's columns lie in the interval of its row r, a bit each: the columns of a row cost a few
        instructions, and an element one predicate and one select."""
        if not self.program.has_interval:
            return []
        lo, hi = self.program.kv_interval(ctx, at.b, at.h, at.q_rows[r], at.u, at.rows[r])
        lo = fragment.columns_before(ops.imax(lo - kv_first, 0))
        hi = fragment.columns_before(ops.imax(ops.imin(hi, ctx.seqlen_k) - kv_first, 0))
        words = []
        for start in range(0, size // fragment.ROWS, 32):
            first, end = ops.imax(lo - start, 0), ops.imax(hi - start, 0)
            words.append(ops.bit_range(first, ops.imax(end - first, 0)))
        return words

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

    def join(self) -> None:
        """Let the rows share the shift that covers both, where a fixed shift follows; those without any yet get it too.

        A row far below its neighbour is found out by its sum when the tile is verified.
        """
        smallest = Float32.inf
        for r in range(fragment.ROWS):
            own = ops.select(self._unset(r), Float32.inf, self.row_scores[r] - self.row_max[r])
            smallest = own if r == 0 else ops.fmin(smallest, own)
        known = smallest < Float32.inf
        self.common[0] = ops.select(known, smallest, self.row_scores[0])
        fixed = known & (self.floor[0] > -Float32.inf)
        for r in range(fragment.ROWS):
            self.row_max[r] = ops.select(fixed, self.row_scores[r] - self.common[0], self.row_max[r])

    def settle(self, follows: Boolean) -> None:
        """Before full tiles, if any follow: rows without a shift keep the one their scores have been getting."""
        for r in range(fragment.ROWS):
            start = self.row_scores[r] - self.common[0] if self.program.shares_shift else Float32(0.0)
            unset = follows & (self.row_max[r] == -Float32.inf)
            self.row_max[r] = ops.select(unset, start, self.row_max[r])

    @cute.jit
    def seed(self, scores: cute.Tensor, shifted: cutlass.Constexpr):
        """Give rows that have no shift so far (sum and O are still zero) the maximum of these scores as their shift."""
        unset = self._unset(0) | self._unset(1)
        if cute.arch.vote_any_sync(unset):
            if cutlass.const_expr(self.program.shares_shift):
                self._seed_common(scores)
            else:
                self._seed_unset_rows(scores, shifted)

    def _unset(self, r: int) -> Boolean:
        return self.row_max[r] <= self._floor()

    def _floor(self) -> Float32:
        return self.floor[0] if self.program.may_fill else -Float32.inf

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

    def _seed_common(self, scores: cute.Tensor) -> None:
        """For rows that share their shift. The scores came with `common` added."""
        s = fragment.flat(scores)
        unset = self._unset(0) & self._unset(1)
        tops = [ops.quad_max(_row_maximum(scores, r, -Float32.inf)) for r in range(fragment.ROWS)]
        top = ops.fmax(tops[0], tops[1])
        seen = unset & (top > self._floor())
        self.common[0] = self.common[0] - ops.select(seen, top, Float32(0.0))
        for r in range(fragment.ROWS):
            fill = ops.select(unset, ops.fmax(self.row_max[r], top), self.row_max[r])
            self.row_max[r] = ops.select(seen, self.row_scores[r] - self.common[0], fill)
        minus = ops.select(seen, -top, Float32(0.0))
        for i in range(cute.size(s)):
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

    def added_shift(self) -> list:
        """What a shifted score of each row has to add."""
        return [self.common[0]] * fragment.ROWS if self.program.shares_shift else self.minus_shift()

    def exponentiate(self, scores: cute.Tensor, shifted: bool, finite: bool) -> None:
        """scores <- p = 2**(score - shift), and add p to row_sum.

        shifted: the shift is subtracted already. finite: no score has been masked.
        """
        polynomial = (self.polynomial_exp2 or 0) if finite else 0
        s = fragment.flat(scores)
        minus = self.minus_shift()
        sums = [self.row_sum[r] for r in range(fragment.ROWS)]
        for i in range(cute.size(s)):
            r = fragment.row_of(i)
            if self.program.plain:
                x = ops.fma(s[i], self.unit, minus[r])
            else:
                x = s[i] if shifted else s[i] + minus[r]
            p = ops.exp2_polynomial(x) if i % 8 < polynomial else ops.exp2(x)
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
