"""The kernel's view of a score program module (interface in docs/architecture.md, "What the kernel receives")."""

from types import ModuleType

from cutlass import Boolean, Float32, Int32

from fa4_inductor.kernels.cute.static import TraceObject

MAX_BOUND_LOG2 = 80.0
"""Scores within it need no shift at all: 2**80 leaves room for sums of 2**40 of them in fp32 and bf16."""


class ProgramContext(TraceObject):
    """What every program function gets first: run-time inputs beside q, k and v.

    Attributes:
        aux: tuple of cute tensors in global memory (bool tensors arrive as uint8).
        sizes: tuple of Int32.
        seqlen_q, seqlen_k: Int32, rows of q and of k.
        softmax_scale: Float32.
    """

    def __init__(
        self, aux: tuple | None, sizes: tuple | None, seqlen_q: Int32, seqlen_k: Int32, softmax_scale: Float32
    ):
        self.softmax_scale = softmax_scale
        self.aux = aux or ()
        self.sizes = sizes or ()
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k


class Program(TraceObject):
    """Flags and functions of a program module, with defaults for what a module may leave out.

    `uniform`, `row` and `column` may be missing (no such values); `kv_range` and `kv_full` may be missing for a program
    that is not MASKED; `score` for a PLAIN one; `sink` without HAS_SINK.
    `kv_interval` (optional): kv_interval(ctx, b, h, q_idx, u, r) -> (lo, hi): keep is that the key lies in [lo, hi) of
    the row and, where the module has `keep`, that `keep` holds as well.
    `keep_column` (optional): keep_column(ctx, b, h, kv_idx, u, c) -> Boolean is a factor of keep that knows only the
    key; kv_full then speaks of the other factors alone, and full tiles test their columns instead of every element.
    `row_range`, `row_full` (optional): kv_range and kv_full of one row, where a bound loaded by row makes them tighter.
    RAW_SCORE (optional, False): `score` receives q.k without the scale and multiplies by ctx.softmax_scale itself, so
    that it can fold the scale into its own constants (once, in `uniform`).
    `shifted_score` (optional): shifted_score(ctx, s, ..., c, shift) is score + shift in fewer instructions.
    `shared_score`, `row_score` (optional, instead): score + shift == shared_score(ctx, s, ..., c, shift, kv_first,
    offset) + row_score(ctx, b, h, q_idx, u, r), for a shift that a thread's rows share; kv_idx == kv_first + offset,
    the first equal for all columns of a thread, the second a Python float.
    FILLS (optional, False): scores may be as large as finfo.min, with which additive masks fill.
    SPECIAL_FUNCTIONS (optional, 0): operations of the special function unit that a score takes.
    UNIT_STRIDE (optional): slots of the aux tensors whose innermost stride is 1.
    `score_grad` (optional): the derivative of the score, 1 where it is missing; for backward kernels only.
    LEARNED (optional): (slot, kind) of each load of the score whose tensor has a gradient, for backward kernels; what
    its indices depend on besides b and h: "uniform" nothing, "column" the key, "distance" query and key through their
    distance, "element" anything. `gradients` gives the derivatives of the score by the scaled score and by each of
    these elements, `learned_index` their indices.
    TILE_MAP (optional): slot of the map that lists the key tiles to visit, for tiles of the kernel's size.
    DENSE (optional): slots of the aux tensors that come as tiles [q_idx, kv_idx] through shared memory; `dense_index`
    gives the indices before these two for each, and score, shifted_score and keep get their elements as one more
    argument, a tuple. DENSE_IN_SCORE (optional, all): positions in DENSE of those that score or shifted_score reads.
    ACCUMULATED (optional): the dense tile, counted from 0, that the tensor cores add to the product for shifted_score
    and shared_score; q has been multiplied by the softmax scale, a power of two, for all functions.
    BATCH_INNER (optional, False): the batch shares these tiles.
    TABLES (optional): slots of the aux tensors that are tables over the distance (lowering.hoist); `table_index` gives
    the first two indices of each, and the same functions get their entries as a last argument, a tuple.
    COLUMNS (optional): slots of the aux tensors that are vectors over the key; `column_index` gives the indices before
    it, and their elements come behind those of the tables. Full tiles must end inside all of them.
    """

    def __init__(self, module: ModuleType):
        self.module = module
        self.plain: bool = module.PLAIN
        self.masked: bool = module.MASKED
        self.has_sink: bool = module.HAS_SINK
        self.empty_row: str = module.EMPTY_ROW
        self.may_be_empty: bool = module.MAY_BE_EMPTY
        self.raw_score: bool = getattr(module, "RAW_SCORE", False)
        self.dense: tuple[int, ...] = getattr(module, "DENSE", ())
        self.accumulated: int | None = getattr(module, "ACCUMULATED", None)
        self.batch_inner: bool = getattr(module, "BATCH_INNER", False)
        self.tables: tuple[int, ...] = getattr(module, "TABLES", ())
        self.dense_in_score: tuple[int, ...] = getattr(module, "DENSE_IN_SCORE", tuple(range(len(self.dense))))
        self.columns: tuple[int, ...] = getattr(module, "COLUMNS", ())
        self.unit_stride: tuple[int, ...] = getattr(module, "UNIT_STRIDE", ())
        self.tile_map: int | None = getattr(module, "TILE_MAP", None)
        bound = module.BOUND_LOG2
        self.bounded: bool = bound is not None and not self.plain and bound <= MAX_BOUND_LOG2
        self.special_functions: int = getattr(module, "SPECIAL_FUNCTIONS", 0)
        self.shares_shift = hasattr(module, "shared_score")
        self.has_shifted_score = self.shares_shift or hasattr(module, "shifted_score")
        # scores may be as large as the fills of an additive mask
        self.may_fill: bool = bool(self.dense) or getattr(module, "FILLS", False)
        self.has_interval = hasattr(module, "kv_interval")
        self.has_keep = hasattr(module, "keep")
        self.learned: tuple[tuple[int, str], ...] = getattr(module, "LEARNED", ())

    @property
    def needs_v_mean(self) -> bool:
        """Whether rows without any kept key get the mean of V."""
        return self.empty_row == "mean" and self.may_be_empty

    def uniform(self, ctx: ProgramContext, b: Int32, h: Int32) -> tuple:
        fn = getattr(self.module, "uniform", None)
        return () if fn is None else fn(ctx, b, h)

    def row(self, ctx: ProgramContext, b: Int32, h: Int32, q_idx: Int32, u: tuple) -> tuple:
        fn = getattr(self.module, "row", None)
        return () if fn is None else fn(ctx, b, h, q_idx, u)

    def column(self, ctx: ProgramContext, b: Int32, h: Int32, kv_idx: Int32, u: tuple) -> tuple:
        fn = getattr(self.module, "column", None)
        return () if fn is None else fn(ctx, b, h, kv_idx, u)

    def score(
        self, ctx: ProgramContext, s: Float32, b, h, q_idx, kv_idx, u, r, c, d: tuple = (), t: tuple = ()
    ) -> Float32:
        """Score in log2 units of the raw product s. d: elements of the dense tiles. t: entries of the tables."""
        return Float32(self.module.score(ctx, self._product(ctx, s), b, h, q_idx, kv_idx, u, r, c, *self._tiles(d, t)))

    def shifted_score(
        self, ctx: ProgramContext, s, b, h, q_idx, kv_first, offset: int, u, r, c, shift, d: tuple, t: tuple
    ) -> Float32:
        """score + shift, less row_score where rows share the shift, for kv_idx = kv_first + offset."""
        arguments = (ctx, self._product(ctx, s), b, h, q_idx, kv_first + offset, u, r, c, shift)
        if self.shares_shift:
            return Float32(self.module.shared_score(*arguments, kv_first, float(offset), *self._tiles(d, t)))
        return Float32(self.module.shifted_score(*arguments, *self._tiles(d, t)))

    def _product(self, ctx: ProgramContext, s: Float32) -> Float32:
        return s if self.raw_score else s * ctx.softmax_scale

    def _tiles(self, d: tuple, t: tuple) -> tuple:
        return ((d,) if self.dense else ()) + ((t,) if self.tables or self.columns else ())

    def row_score(self, ctx: ProgramContext, b, h, q_idx, u, r) -> Float32:
        return Float32(self.module.row_score(ctx, b, h, q_idx, u, r))

    def keep(self, ctx: ProgramContext, b, h, q_idx, kv_idx, u, r, c, d: tuple = (), t: tuple = ()) -> Boolean:
        """Whether the key takes part: `kv_interval` and `keep_rest` together."""
        kept = self.keep_rest(ctx, b, h, q_idx, kv_idx, u, r, c, d, t) if self.has_keep else Boolean(True)
        if not self.has_interval:
            return kept
        lo, hi = self.kv_interval(ctx, b, h, q_idx, u, r)
        return kept & (kv_idx >= lo) & (kv_idx < hi)

    def keep_rest(self, ctx: ProgramContext, b, h, q_idx, kv_idx, u, r, c, d: tuple = (), t: tuple = ()) -> Boolean:
        """The part of keep that `kv_interval` does not tell."""
        return Boolean(self.module.keep(ctx, b, h, q_idx, kv_idx, u, r, c, *self._tiles(d, t)))

    def kv_interval(self, ctx: ProgramContext, b, h, q_idx, u, r) -> tuple[Int32, Int32]:
        lo, hi = self.module.kv_interval(ctx, b, h, q_idx, u, r)
        return Int32(lo), Int32(hi)

    @property
    def has_score_grad(self) -> bool:
        return hasattr(self.module, "score_grad")

    def score_grad(self, ctx: ProgramContext, s: Float32, b, h, q_idx, kv_idx, u, r, c) -> Float32:
        """Derivative of the score with respect to the scaled score, at the raw product s."""
        return Float32(self.module.score_grad(ctx, self._product(ctx, s), b, h, q_idx, kv_idx, u, r, c))

    def gradients(self, ctx: ProgramContext, s: Float32, b, h, q_idx, kv_idx, u, r, c) -> tuple[Float32, ...]:
        """Derivatives of the score, at the raw product s, by the scaled score and by each learned element."""
        values = self.module.gradients(ctx, self._product(ctx, s), b, h, q_idx, kv_idx, u, r, c)
        return tuple(Float32(x) for x in values)

    def learned_index(self, ctx: ProgramContext, b, h, q_idx, kv_idx, u, r, c) -> tuple[tuple, ...]:
        """Indices of each learned element in its tensor."""
        return self.module.learned_index(ctx, b, h, q_idx, kv_idx, u, r, c)

    @property
    def has_keep_column(self) -> bool:
        return self.masked and hasattr(self.module, "keep_column")

    def keep_column(self, ctx: ProgramContext, b, h, kv_idx, u, c) -> Boolean:
        return Boolean(self.module.keep_column(ctx, b, h, kv_idx, u, c))

    def row_range(self, ctx: ProgramContext, b, h, q_idx) -> tuple[Int32, Int32]:
        """[lo, hi): keys outside are dropped by this row."""
        return self._row_bounds("row_range", "kv_range", ctx, b, h, q_idx)

    def row_full(self, ctx: ProgramContext, b, h, q_idx) -> tuple[Int32, Int32]:
        """[lo, hi): keys inside are kept by this row, as far as keep_column has no say; lo >= hi: none."""
        return self._row_bounds("row_full", "kv_full", ctx, b, h, q_idx)

    def _row_bounds(self, name: str, of_rows: str, ctx: ProgramContext, b, h, q_idx) -> tuple[Int32, Int32]:
        fn = getattr(self.module, name, None)
        bounds = getattr(self.module, of_rows)(ctx, b, h, q_idx, q_idx) if fn is None else fn(ctx, b, h, q_idx)
        return Int32(bounds[0]), Int32(bounds[1])

    def dense_index(self, ctx: ProgramContext, b: Int32, h: Int32) -> tuple:
        """Per dense tile, the indices before [q_idx, kv_idx]."""
        return self.module.dense_index(ctx, b, h) if self.dense else ()

    def table_index(self, ctx: ProgramContext, b: Int32, h: Int32) -> tuple:
        """Per table, its first two indices."""
        return self.module.table_index(ctx, b, h) if self.tables else ()

    def column_index(self, ctx: ProgramContext, b: Int32, h: Int32) -> tuple:
        """Per vector over the key, the indices before it."""
        return self.module.column_index(ctx, b, h) if self.columns else ()

    def sink(self, ctx: ProgramContext, b, h, q_idx) -> Float32:
        return Float32(self.module.sink(ctx, b, h, q_idx))


def needs_v_mean(module: ModuleType) -> bool:
    """Whether the compiled kernel of this program takes a v_mean tensor."""
    return Program(module).needs_v_mean
