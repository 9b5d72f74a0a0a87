"""The producer warp: walks the tiles of its CTA and keeps the shared-memory rings full by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute.static import TraceObject
from fa4_inductor.kernels.cute.tiles import key_tiles


class Barriers(TraceObject):
    """mbarrier pointers of one CTA: full/empty pairs for the Q tile and for each stage of the K and V rings."""

    def __init__(self, storage, num_stages: int):
        self.num_stages = num_stages
        self.q_full, self.q_empty = (storage.q_bars.data_ptr() + i for i in range(2))
        self.k_full, self.k_empty = (storage.k_bars.data_ptr() + i * num_stages for i in range(2))
        self.v_full, self.v_empty = (storage.v_bars.data_ptr() + i * num_stages for i in range(2))

    def initialize(self, consumer_warps: int) -> None:
        """One thread: set the arrival counts. TMA arrives once per load, each consumer warp once per release."""
        for s in range(self.num_stages):
            cute.arch.mbarrier_init(self.k_full + s, 1)
            cute.arch.mbarrier_init(self.v_full + s, 1)
            cute.arch.mbarrier_init(self.k_empty + s, consumer_warps)
            cute.arch.mbarrier_init(self.v_empty + s, consumer_warps)
        cute.arch.mbarrier_init(self.q_full, 1)
        cute.arch.mbarrier_init(self.q_empty, consumer_warps)


def advance(index: Int32, phase: Int32, num_stages: int) -> tuple[Int32, Int32]:
    """Next slot of a ring and its phase bit."""
    wraps = index == num_stages - 1
    return ops.select(wraps, Int32(0), index + 1), ops.select(wraps, phase ^ 1, phase)


class RingLoad(TraceObject):
    """TMA loads of one operand: one line of its tiles into a ring or slab buffer.

    Args:
        tensor: (rows, columns, ...) coordinates of the TMA atom. tile: its tile. line: tile numbers of the line, one of
            them None. at: indices of the other modes.
    """

    mask_bytes = 0

    def __init__(self, atom, tensor: cute.Tensor, smem: cute.Tensor, tile: tuple, at: tuple, line: tuple = (None, 0)):
        tiles = cute.local_tile(tensor[(None, None, *at)], tile, line)
        self.atom = atom
        self.smem, self.gmem = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    def __call__(self, tile, slot, bar) -> None:
        cute.copy(self.atom, self.gmem[None, tile], self.smem[None, slot], tma_bar_ptr=bar)


class KeyLoad(TraceObject):
    """K of one key tile, and the dense tiles that share its slot and its barrier: slab w of each in its own place.

    masks: dense tiles that only keep reads, `mask_bytes` in all, which full tiles do without.
    """

    def __init__(
        self,
        load_k: RingLoad,
        dense: list[list[RingLoad]],
        masks: list[list[RingLoad]],
        mask_bytes: int,
        num_consumers: int,
    ):
        self.load_k, self.dense, self.masks, self.num_consumers = load_k, dense, masks, num_consumers
        self.mask_bytes = mask_bytes

    def __call__(self, tile, slot, bar) -> None:
        self.load_k(tile, slot, bar)
        self._load(self.dense, tile, slot, bar)

    def load_masks(self, tile, slot, bar) -> None:
        self._load(self.masks, tile, slot, bar)

    def _load(self, tiles: list[list[RingLoad]], tile, slot, bar) -> None:
        for slabs in tiles:
            for w, load in enumerate(slabs):
                load(tile, slot * self.num_consumers + w, bar)


@cute.jit
def _acquire(full: cute.Pointer, empty: cute.Pointer, phase: Int32, num_bytes: Int32):
    cute.arch.mbarrier_wait(empty, phase ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)


@cute.jit
def _load_key_tile(
    fwd: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    load_k: cutlass.Constexpr,
    tile: Int32,
    index: Int32,
    phase: Int32,
    masked: Boolean,
):
    """K of one tile with its dense tiles; masked: keep is going to be evaluated."""
    full, empty = bars.k_full + index, bars.k_empty + index
    if cutlass.const_expr(load_k.mask_bytes == 0):
        _acquire(full, empty, phase, fwd.k_bytes)
    else:
        _acquire(full, empty, phase, ops.select(masked, fwd.k_bytes, fwd.k_bytes - load_k.mask_bytes))
        if masked:
            load_k.load_masks(tile, index, full)
    load_k(tile, index, full)


@cute.jit
def load_keys(
    fwd: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    load_k: cutlass.Constexpr,
    load_v: cutlass.Constexpr,
    keys: cutlass.Constexpr,
    index: Int32,
    phase: Int32,
):
    """K (and the dense tiles) of tile j ahead of V of tile j - 1, the order the consumers use them in.

    Returns the new ring state.
    """
    _load_key_tile(fwd, bars, load_k, keys.tile(Int32(0)), index, phase, Boolean(True))
    for j in cutlass.range(1, keys.count, unroll=1):
        v_index, v_phase = index, phase
        index, phase = advance(index, phase, fwd.config.num_stages)
        _load_key_tile(fwd, bars, load_k, keys.tile(j), index, phase, j < keys.num_masked)
        _acquire(bars.v_full + v_index, bars.v_empty + v_index, v_phase, fwd.v_bytes)
        load_v(keys.tile(j - 1), v_index, bars.v_full + v_index)
    _acquire(bars.v_full + index, bars.v_empty + index, phase, fwd.v_bytes)
    load_v(keys.tile(keys.count - 1), index, bars.v_full + index)
    index, phase = advance(index, phase, fwd.config.num_stages)
    return index, phase


@cute.jit
def produce(
    fwd: cutlass.Constexpr,
    ctx: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    redo: cutlass.Constexpr,
    order: cutlass.Constexpr,
    tma: cutlass.Constexpr,
):
    """Main loop of the producer warp over the rounds of this CTA, and again over the rounds marked for redoing.

    Q is loaded even where no key is visited, so that the consumers, who may write O over Q, stay in step.
    """
    slabs = cutlass.const_expr(fwd.config.num_consumers)
    index, phase, q_phase = Int32(0), Int32(0), Int32(0)
    step, rounds, limit = Int32(0), order.rounds, order.rounds
    while step < limit:
        again = step >= rounds
        round_ = step
        todo = Boolean(True)
        if cutlass.const_expr(redo.enabled):
            round_ = ops.select(again, step - rounds, step)
            todo = redo.marked(round_) | (step < rounds)
        exists, m_tile, h, b = order.tile(round_)
        if exists & todo:
            q_lo = m_tile * fwd.config.tile_m
            q_hi = ops.imin(q_lo + fwd.config.tile_m, ctx.seqlen_q) - 1
            keys = key_tiles(fwd.program, ctx, b, h, m_tile, q_lo, q_hi, fwd.config.tile_n, again)
            load_q, load_k, load_v = tma.loads(ctx, m_tile, h, b)
            _acquire(bars.q_full, bars.q_empty, q_phase, fwd.q_bytes)
            for w in cutlass.range_constexpr(slabs):
                load_q(m_tile * slabs + w, w, bars.q_full)
            q_phase = q_phase ^ 1
            if keys.count > 0:
                index, phase = load_keys(fwd, bars, load_k, load_v, keys, index, phase)
            if cutlass.const_expr(order.dynamic):
                if step < rounds:
                    order.claim(step + 1)
        step += 1
        if cutlass.const_expr(order.dynamic):
            if (step <= rounds) & (exists == False):  # noqa: E712
                step, rounds, limit = step - 1, step - 1, step - 1
        if cutlass.const_expr(redo.enabled):
            if step == rounds:
                if redo.wait():
                    limit = 2 * rounds
