"""Results of key splits: how they are stored, merged, and finished into the output and the LSE."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fa4_inductor.kernels.cute import fragment, ops
from fa4_inductor.kernels.cute.packed import PackedRows
from fa4_inductor.kernels.cute.program import Program, ProgramContext
from fa4_inductor.kernels.cute.static import TraceObject

THREADS = 128
MAX_SPLITS = 256
_WARP = 32
_IN_FLIGHT = 4  # loads per thread that wait for memory together; more would cost CTAs per SM


def settle(program: Program, ctx: ProgramContext, b, h, q_idx, lse_log2: Float32) -> tuple[Float32, Float32, Boolean]:
    """From the base-2 LSE over a row's keys: (multiplier of the normalised O, natural LSE, whether the row is empty).

    The sink joins here. An empty row gets multiplier 0 and LSE -inf; with a sink, the sink's LSE.
    """
    empty = lse_log2 == -Float32.inf
    if not program.has_sink:
        return ops.select(empty, Float32(0.0), Float32(1.0)), lse_log2 * ops.LN_2, empty
    sink = program.sink(ctx, b, h, q_idx)
    top = ops.fmax(lse_log2, sink)
    top = ops.select(top == -Float32.inf, Float32(0.0), top)
    keys = ops.exp2(lse_log2 - top)
    total = keys + ops.exp2(sink - top)
    nothing = total == 0.0
    lse = ops.select(nothing, -Float32.inf, (top + ops.log2(total)) * ops.LN_2)
    return ops.select(nothing, Float32(0.0), keys * ops.rcp(total)), lse, empty


class Results(TraceObject):
    """Where a finished row goes: out (B, Hq, Sq, Dv), lse (B, Hq, Sq) float32 or None; v_mean (B or 1, Hkv, Dv) float32
    or None holds what empty rows get."""

    def __init__(self, fwd, ctx: ProgramContext, out: cute.Tensor, lse, v_mean):
        self.fwd, self.ctx, self.out, self.lse, self.v_mean = fwd, ctx, out, lse, v_mean

    def value(self, x: Float32, empty: Boolean, b: Int32, h: Int32, column: Int32) -> Float32:
        """x, or what an empty row gets in this column."""
        program = self.fwd.program
        if not program.may_be_empty or program.has_sink or program.empty_row == "zero":
            return x
        if program.empty_row == "nan":
            return ops.select(empty, Float32(float("nan")), x)
        b_mean = ops.select(self.v_mean.shape[0] == 1, Int32(0), b)
        return ops.select(empty, self.v_mean[b_mean, h // self.fwd.group, column], x)

    def store_pair(self, b: Int32, h: Int32, q_idx: Int32, column: Int32, low: Float32, high: Float32) -> None:
        """Two neighbouring columns, of which the first is even."""
        words = cute.recast_tensor(self.out[b, h, q_idx, None], Int32)
        words[column // 2] = ops.pack_half2(low, high, self.fwd.dtype)

    def store_lse(self, b: Int32, h: Int32, q_idx: Int32, lse: Float32) -> None:
        if self.lse is not None:
            self.lse[b, h, q_idx] = lse


class Workspace(TraceObject):
    """Partial results in one float32 buffer: O (split, b * Hkv, packed row, Dv), then base-2 LSE (split, b * Hkv, row).

    The O of a split that kept no key of a row is not written; its LSE of -inf says so.
    """

    def __init__(self, buffer: cute.Tensor, num_splits: Int32, num_bh: Int32, total: Int32, head_dim_v: int):
        self.buffer, self.num_splits, self.num_bh, self.total = buffer, num_splits, num_bh, total
        self.head_dim_v = head_dim_v

    def _row(self, split: Int32, bh: Int32, packed: Int32) -> Int32:
        return (split * self.num_bh + bh) * self.total + packed

    def lse(self, split: Int32, bh: Int32, packed: Int32) -> cute.Tensor:
        """One element."""
        rows = self.num_splits * self.num_bh * self.total
        return self._at(rows * self.head_dim_v + self._row(split, bh, packed), 1)

    def columns(self, split: Int32, bh: Int32, packed: Int32, column: Int32, count: int) -> cute.Tensor:
        """`count` neighbouring columns of O, from a multiple of count."""
        return self._at(self._row(split, bh, packed) * self.head_dim_v + column, count)

    def _at(self, element: Int32, count: int) -> cute.Tensor:
        address = self.buffer.iterator.toint() + Int64(element) * 4
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4 * count)
        return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def store_results(consumer: cutlass.Constexpr, at: cutlass.Constexpr, rows: cutlass.Constexpr, to: cutlass.Constexpr):
    """Finished rows straight from the registers, where the keys are not split."""
    fwd, ctx, o = consumer.fwd, consumer.ctx, fragment.flat(consumer.o)
    found = consumer.partial()
    for r in cutlass.range_constexpr(fragment.ROWS):
        if at.rows_in_tile[r] < rows.count:
            h, q_idx = at.heads[r], at.q_rows[r]
            factor, lse, empty = settle(fwd.program, ctx, at.b, h, q_idx, found[r][1])
            factor = factor * found[r][0]
            for i in cutlass.range_constexpr(2 * r, cute.size(o), 4):
                if cutlass.const_expr(fragment.column_of(i) < fwd.head_dim_v):
                    column = fragment.thread_column(consumer.lane) + fragment.column_of(i)
                    low = to.value(o[i] * factor, empty, at.b, h, column)
                    high = to.value(o[i + 1] * factor, empty, at.b, h, column + 1)
                    to.store_pair(at.b, h, q_idx, column, low, high)
            if consumer.lane % 4 == 0:
                to.store_lse(at.b, h, q_idx, lse)


@cute.jit
def store_partial(
    consumer: cutlass.Constexpr, at: cutlass.Constexpr, rows: cutlass.Constexpr, to: cutlass.Constexpr,
    split: Int32, bh: Int32,
):  # fmt: skip
    """Normalised O and LSE of this split into the workspace."""
    fwd, o = consumer.fwd, fragment.flat(consumer.o)
    found = consumer.partial()
    for r in cutlass.range_constexpr(fragment.ROWS):
        if at.rows_in_tile[r] < rows.count:
            packed = rows.first + at.rows_in_tile[r]
            factor, lse = found[r]
            if lse != -Float32.inf:
                for i in cutlass.range_constexpr(2 * r, cute.size(o), 4):
                    if cutlass.const_expr(fragment.column_of(i) < fwd.head_dim_v):
                        column = fragment.thread_column(consumer.lane) + fragment.column_of(i)
                        pair = cute.make_rmem_tensor((2,), Float32)
                        pair[0], pair[1] = o[i] * factor, o[i + 1] * factor
                        cute.autovec_copy(pair, to.columns(split, bh, packed, column, 2))
            if consumer.lane % 4 == 0:
                to.lse(split, bh, packed)[0] = lse


class Combine(TraceObject):
    """One CTA merges one packed row: its threads are `lanes` groups, each summing every lanes-th split for all columns,
    four per thread; the groups are then added in order. The order is fixed, so results repeat bit by bit."""

    def __init__(self, fwd, ctx, workspace: Workspace, results: Results, rows: PackedRows, bh: Int32):
        self.fwd, self.ctx, self.workspace, self.results, self.rows, self.bh = fwd, ctx, workspace, results, rows, bh
        self.vectors = fwd.head_dim_v // 4
        self.lanes = THREADS // self.vectors
        self.load = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128)

    def storage(self):
        fwd, lanes = self.fwd, self.lanes

        class Storage:
            pass

        Storage.__annotations__ = {
            "weight": cute.struct.MemRange[Float32, MAX_SPLITS],
            "slots": cute.struct.Align[cute.struct.MemRange[Float32, 4 * THREADS * _IN_FLIGHT], 16],
            "sums": cute.struct.Align[cute.struct.MemRange[Float32, lanes * fwd.head_dim_v], 16],
        }
        return cute.struct(Storage)

    def weights(self, storage, packed: Int32, tid: Int32) -> Float32:
        """Share of each split in the row, into shared memory; returns the row's base-2 LSE over all splits."""
        workspace, weight = self.workspace, cute.make_tensor(storage.weight.data_ptr(), cute.make_layout(MAX_SPLITS))
        lane = tid % _WARP
        found = []
        for i in range(MAX_SPLITS // _WARP):
            split = lane + i * _WARP
            known = workspace.lse(ops.imin(split, workspace.num_splits - 1), self.bh, packed)[0]
            found.append(ops.select(split < workspace.num_splits, known, -Float32.inf))
        top = found[0]
        for x in found[1:]:
            top = ops.fmax(top, x)
        top = cute.arch.warp_reduction(top, ops.fmax)
        base = ops.select(top == -Float32.inf, Float32(0.0), top)
        shares = [ops.exp2(x - base) for x in found]
        total = shares[0]
        for x in shares[1:]:
            total = total + x
        total = cute.arch.warp_reduction(total, lambda a, b: a + b)
        scale = ops.select(total == 0.0, Float32(0.0), ops.rcp(total))
        for i, share in enumerate(shares):
            # every warp writes the same numbers
            weight[lane + i * _WARP] = share * scale
        return ops.select(total == 0.0, -Float32.inf, base + ops.log2(total))

    def _load(self, slots: cute.Tensor, first: Int32, packed: Int32, column: Int32) -> None:
        """O of the next splits of this group, on its way to the thread's slots in shared memory: ptxas would not keep
        as many in registers."""
        for i in range(_IN_FLIGHT):
            split = ops.imin(first + i * self.lanes, self.workspace.num_splits - 1)
            cute.copy(self.load, self.workspace.columns(split, self.bh, packed, column, 4), slots[None, i])
        cute.arch.cp_async_commit_group()

    def _add(self, acc: cute.Tensor, weight: cute.Tensor, slots: cute.Tensor, first: Int32) -> None:
        """acc += share * O of these splits. The O of a split without a share may never have been written."""
        cute.arch.cp_async_wait_group(0)
        for i in range(_IN_FLIGHT):
            split = first + i * self.lanes
            share = ops.select(split < MAX_SPLITS, weight[ops.imin(split, MAX_SPLITS - 1)], 0.0)
            part = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(slots[None, i], part)
            for c in range(4):
                acc[c] = ops.select(share > 0.0, ops.fma(part[c], share, acc[c]), acc[c])

    @cute.jit
    def __call__(self, packed: Int32, tid: Int32):
        storage = cutlass.utils.SmemAllocator().allocate(self.storage())
        weight = cute.make_tensor(storage.weight.data_ptr(), cute.make_layout(MAX_SPLITS))
        sums = cute.make_tensor(storage.sums.data_ptr(), cute.make_layout(self.lanes * self.fwd.head_dim_v))
        slots = cute.make_tensor(
            (storage.slots.data_ptr() + 4 * tid).align(16), cute.make_layout((4, _IN_FLIGHT), stride=(1, 4 * THREADS))
        )
        column, group = tid % self.vectors * 4, tid // self.vectors
        if group < self.lanes:
            # while the shares are not known yet
            self._load(slots, group, packed, column)
        lse_log2 = self.weights(storage, packed, tid)
        cute.arch.sync_threads()
        if group < self.lanes:
            acc = cute.make_rmem_tensor((4,), Float32)
            acc.fill(0.0)
            step = cutlass.const_expr(self.lanes * _IN_FLIGHT)
            self._add(acc, weight, slots, group)
            for first in cutlass.range(group + step, self.workspace.num_splits, step, unroll=1):
                self._load(slots, first, packed, column)
                self._add(acc, weight, slots, first)
            for c in cutlass.range_constexpr(4):
                sums[group * self.fwd.head_dim_v + column + c] = acc[c]
        cute.arch.sync_threads()
        q_idx, h = self.rows.query(packed - self.rows.first)
        factor, lse, empty = settle(self.fwd.program, self.ctx, self.rows.b, h, q_idx, lse_log2)
        if tid < self.fwd.head_dim_v // 2:
            low, high = Float32(0.0), Float32(0.0)
            for g in range(self.lanes):
                low = low + sums[g * self.fwd.head_dim_v + 2 * tid]
                high = high + sums[g * self.fwd.head_dim_v + 2 * tid + 1]
            low = self.results.value(low * factor, empty, self.rows.b, h, 2 * tid)
            high = self.results.value(high * factor, empty, self.rows.b, h, 2 * tid + 1)
            self.results.store_pair(self.rows.b, h, q_idx, 2 * tid, low, high)
        if tid == 0:
            self.results.store_lse(self.rows.b, h, q_idx, lse)
