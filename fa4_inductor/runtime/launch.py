"""From the op to a kernel, on every call. Plans are made once; a call looks one up, allocates and launches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fa4_inductor import log
from fa4_inductor.errors import KernelUnavailable
from fa4_inductor.lowering.aux_layout import TMA_ALIGNMENT, RegularSlots, regular_slots
from fa4_inductor.lowering.split_config import Variant
from fa4_inductor.runtime import target as targets
from fa4_inductor.runtime.operands import aligned, check, check_tables, has_readable_strides, kernel_aux, regular_aux
from fa4_inductor.runtime.variants import choice, splits_of
from fa4_inductor.settings import Settings
from fa4_inductor.spec import AttentionSpec, parse_spec

if TYPE_CHECKING:
    from fa4_inductor.runtime.tuning import Contest

Outputs = tuple[Tensor, Tensor | None]
_DEVICES = ("cuda",)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A kernel with what its launches have in common.

    `bool_aux`: some aux are bool, handed over as uint8 views. `strict`: a refused launch is an error.
    `slots`: of the aux tensors that the kernel wants regular. `key`: of the plan, to find the one for other tensors.
    `contest`: kernels of which the first launch takes the fastest; until then, the table's.
    """

    kernel: Callable[..., None]
    spec: AttentionSpec
    softmax_scale: float
    needs_v_mean: bool
    bool_aux: bool
    strict: bool = False
    slots: RegularSlots = RegularSlots()
    key: PlanKey | None = None
    contest: Contest | None = None


class PlanKey(NamedTuple):
    """What a plan depends on. `variant`, `regular`: as in `compile.forward_key`."""

    program: str
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    group: int
    device: torch.device
    need_lse: bool
    variant: Variant
    regular: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A plan for operands of known shapes and strides that TMA can read: what is left is the tensors' addresses.

    `out`, `lse`, `workspace`: (shape, strides, dtype), for `allocate`, which allocates on the current device.
    `splits`: what a kernel of few query rows is told; None for the others.
    """

    plan: Plan
    device_index: int | None
    allocate: Callable[..., Tensor]
    out: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    lse: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None
    splits: int | None
    workspace: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None


_plans: dict[PlanKey, Plan | None] = {}
# By program, shapes and strides: the look-up of every launch. Bounded, since lengths vary.
_known: dict[tuple[Any, ...], Known] = {}
_MAX_KNOWN = 4096
# torch.cuda.current_device initialises CUDA first, which a CUDA tensor in hand has done.
current_device: Callable[[], int | None] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    aux: Sequence[Tensor],
    program: str,
    sizes: Sequence[int],
    implementation: str,
    need_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Implementation of `fa4_inductor::_forward`: q (B, Hq, Sq, D), k, v (B or 1, Hkv, Sk, D or Dv), any strides.

    Returns:
        out (B, Hq, Sq, Dv) in q's dtype, BSHD memory; lse (B, Hq, Sq) fp32 natural log, or shape (0,).

    Raises:
        ValueError: for an implementation that does not exist, or operands that do not fit together.
        KernelUnavailable: in strict mode, when the kernel cannot be built.
    """
    out, lse = _forward(q, k, v, aux, program, sizes, implementation, need_lse)
    return out, q.new_empty((0,), dtype=torch.float32) if lse is None else lse


def forward_without_lse(
    q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], program: str, sizes: Sequence[int], implementation: str
) -> Tensor:
    """Implementation of `fa4_inductor::_forward_without_lse`: the `out` of `forward`."""
    return _forward(q, k, v, aux, program, sizes, implementation, False)[0]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    aux: Sequence[Tensor],
    program: str,
    sizes: Sequence[int],
    implementation: str,
    need_lse: bool,
) -> Outputs:
    """(out, lse). lse may be None unless it is needed: an empty tensor costs a quarter of the launch."""
    if implementation == "cute":
        known = _known.get(_operands_key(q, k, v, program, need_lse))
        if known is not None:
            return _launch_known(known, q, k, v, aux, sizes)
    check(q, k, v, aux)
    run = _RUN.get(implementation)
    if run is None:
        raise ValueError(f"unknown implementation {implementation!r}: known are {', '.join(_RUN)}")
    return run(q, k, v, aux, program, sizes, need_lse)


def _run_eager(name: str) -> Callable[..., Outputs]:
    """An implementation written in torch: `kernels.<name>.attention_<name>` with the contract of `kernels.contract`."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], program: str, sizes: Sequence[int], need_lse: bool
    ) -> Outputs:
        aux = [t.to(q.device) for t in aux]
        wide = {"dtype": torch.float64} if name == "reference" and q.dtype is torch.float64 else {}
        out, lse = _eager_function(name)(q, k, v, aux, spec_of(program), tuple(sizes), need_lse=need_lse, **wide)
        return out, lse.float()

    return run


@functools.cache
def _eager_function(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    module = __import__(f"fa4_inductor.kernels.{name}", fromlist=["kernels"])
    return getattr(module, f"attention_{name}")


@functools.lru_cache(maxsize=1024)
def spec_of(program: str) -> AttentionSpec:
    """The spec that a program text says, parsed once."""
    return parse_spec(program)


def _run_cute(
    q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], program: str, sizes: Sequence[int], need_lse: bool
) -> Outputs:
    group, spec = q.shape[1] // max(k.shape[1], 1), spec_of(program)
    slots = regular_slots(spec)
    regular = regular_aux(slots, aux) is not None
    check_tables(slots.tables, q.shape[2], k.shape[2], aux)
    variant, _ = choice(q, k, v, regular and bool(slots.dense))
    plan = _plan(PlanKey(program, q.dtype, q.shape[3], v.shape[3], group, q.device, need_lse, variant, regular))
    if plan is None:
        return _RUN["reference"](q, k, v, aux, program, sizes, need_lse)
    if plan.contest is not None:
        if torch.cuda.is_current_stream_capturing():
            return _launch(plan, q, k, v, aux, sizes, need_lse)
        plan = _settle(plan, q, k, v, aux, sizes, need_lse)
    known = _make_known(plan, q, k, v, need_lse)
    if known is not None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[_operands_key(q, k, v, program, need_lse)] = known
    return _launch(plan, q, k, v, aux, sizes, need_lse)


def _operands_key(q: Tensor, k: Tensor, v: Tensor, program: str, need_lse: bool) -> tuple[Any, ...]:
    strides = (q.stride(), k.stride(), v.stride())
    return program, need_lse, q.shape, k.shape, v.shape, strides, q.dtype, k.dtype, v.dtype, q.device


def _make_known(plan: Plan, q: Tensor, k: Tensor, v: Tensor, need_lse: bool) -> Known | None:
    """None for operands that need more than a launch."""
    batch, heads, seqlen_q, _ = q.shape
    if not (batch and heads and seqlen_q and k.shape[2]) or not all(map(has_readable_strides, (q, k, v))):
        return None
    head_dim_v = v.shape[3]
    row = heads * head_dim_v
    out = (batch, heads, seqlen_q, head_dim_v), (seqlen_q * row, head_dim_v, row, 1), q.dtype
    lse = ((batch, heads, seqlen_q), (heads * seqlen_q, seqlen_q, 1), torch.float32) if need_lse else None
    splits, size = splits_of(plan.key.variant if plan.key else Variant.FORWARD, q, k, v)
    workspace = ((size,), (1,), torch.float32) if size else None
    return Known(plan, q.device.index, _allocator(q.device), out, lse, splits, workspace)


@functools.cache
def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """`(shape, strides, dtype) -> tensor` on the current device of this kind, as Inductor's wrappers allocate."""
    fast = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    return fast or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))


def _launch_known(
    known: Known, q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], sizes: Sequence[int]
) -> Outputs:
    misaligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_ALIGNMENT
    if misaligned or current_device() != known.device_index:
        return _launch(known.plan, q, k, v, aux, sizes, known.lse is not None)
    out = known.allocate(*known.out)
    lse = known.allocate(*known.lse) if known.lse is not None else None
    more: tuple[Any, ...] = ()
    if known.splits is not None:
        more = known.allocate(*known.workspace) if known.workspace is not None else None, known.splits
    return _run_kernel(known.plan, q, k, v, aux, sizes, out, lse, more)


def _settle(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], sizes: Sequence[int], need_lse: bool
) -> Plan:
    """The plan with the fastest of its kernels, timed on these operands."""
    assert plan.contest is not None and plan.key is not None
    plans = {t: dataclasses.replace(plan, kernel=x, contest=None) for t, x in plan.contest.kernels.items()}
    calls = {t: functools.partial(_launch, p, q, k, v, aux, sizes, need_lse) for t, p in plans.items()}
    with torch.cuda.device(q.device):
        settled = dataclasses.replace(plan, kernel=plan.contest.settle(calls), contest=None)
    _plans[plan.key] = settled
    return settled


def _plan(key: PlanKey) -> Plan | None:
    try:
        return _plans[key]
    except KeyError:
        plan = _plans[key] = _make_plan(key)
        return plan


def _launch(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], sizes: Sequence[int], need_lse: bool
) -> Outputs:
    """One launch on the current stream of q's device, for operands of any shape and layout."""
    batch, heads, seqlen_q, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v.shape[3])).transpose(1, 2)
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32) if need_lse else None
    if not (batch and heads and seqlen_q):
        return out, lse
    if not k.shape[2]:
        return _fill_without_keys(plan, q, k, v, aux, sizes, out, lse)
    q, k, v = aligned(q), aligned(k), aligned(v)
    more: tuple[Any, ...] = ()
    splits, size = splits_of(plan.key.variant if plan.key else Variant.FORWARD, q, k, v)
    if splits is not None:
        more = q.new_empty((size,), dtype=torch.float32) if size else None, splits
    if q.device.index == current_device():
        return _run_kernel(plan, q, k, v, aux, sizes, out, lse, more)
    with torch.cuda.device(q.device):
        return _run_kernel(plan, q, k, v, aux, sizes, out, lse, more)


def _run_kernel(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    aux: Sequence[Tensor],
    sizes: Sequence[int],
    out: Tensor,
    lse: Tensor | None,
    more: tuple[Any, ...],
) -> Outputs:
    """(out, lse), filled by the kernel on the current device. more: arguments of its own (kernels.cute.build)."""
    passed = kernel_aux(aux, q.device, plan.bool_aux) if aux else None
    if plan.slots.streamed and passed is not None:
        passed = regular_aux(plan.slots, passed)
        if passed is None:
            return _launch_irregular(plan, q, k, v, aux, sizes, lse is not None)
    v_mean = torch.mean(v, 2, dtype=torch.float32) if plan.needs_v_mean else None
    try:
        plan.kernel(q, k, v, out, lse, v_mean, plan.softmax_scale, passed, tuple(sizes) if sizes else None, *more)
    except Exception as error:
        _abandon(plan, error)
        return _RUN["reference"](q, k, v, aux, plan.spec.text, sizes, lse is not None)
    return out, lse


def _launch_irregular(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], sizes: Sequence[int], need_lse: bool
) -> Outputs:
    """The launch by the kernel for aux tensors of any strides."""
    assert plan.key is not None
    other = _plan(plan.key._replace(regular=False))
    if other is None:
        return _RUN["reference"](q, k, v, aux, plan.spec.text, sizes, need_lse)
    return _launch(other, q, k, v, aux, sizes, need_lse)


def _abandon(plan: Plan, error: Exception) -> None:
    """A kernel that was refused at launch, by a toolchain or device that does not fit, is used no more."""
    message = (str(error).strip().splitlines() or ["no message"])[0]
    cause = f"an attention kernel could not be launched ({type(error).__name__}: {message})"
    if plan.strict:
        raise KernelUnavailable(cause) from error
    log.warn_once(cause, "Attention runs in eager torch instead; `python -m fa4_inductor doctor` shows what is missing")
    for key in [key for key, known in _plans.items() if known is plan]:
        _plans[key] = None
    for operands in [operands for operands, known in _known.items() if known.plan is plan]:
        del _known[operands]


def _fill_without_keys(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    aux: Sequence[Tensor],
    sizes: Sequence[int],
    out: Tensor,
    lse: Tensor | None,
) -> Outputs:
    """Sk = 0: a matrix product over no keys is zero, whatever rows without a kept key get otherwise."""
    if lse is not None and plan.spec.sink is not None:
        return _RUN["reference"](q, k, v, aux, plan.spec.text, sizes, True)
    return out.zero_(), None if lse is None else lse.fill_(-torch.inf)


def _make_plan(key: PlanKey) -> Plan | None:
    """The plan of a cute kernel; None, after one warning, when the kernel cannot be had here. Strict mode raises."""
    from fa4_inductor.runtime import compile as compiler
    from fa4_inductor.runtime import tuning

    settings = Settings.from_env()
    try:
        target = targets.target_for(key.device)
        if key.device.type not in _DEVICES:
            raise KernelUnavailable(f"CuTe-DSL kernels run on NVIDIA GPUs, not on {key.device.type}")
        compile_key = compiler.forward_key(*key[:5], key.need_lse, target, variant=key.variant, regular=key.regular)
        kernel, contest = tuning.kernel_of(compile_key, settings, target.name)
        return make_plan(kernel, key, compile_key.dense_aux, settings.strict, contest)
    except KernelUnavailable as error:
        if settings.strict:
            raise
        log.warn_once(str(error), "Attention runs in eager torch instead, which is right and slow")
        return None


def make_plan(
    kernel: Callable[..., None], key: PlanKey, dense_aux: bool, strict: bool, contest: Contest | None = None
) -> Plan:
    """What launches of the key's program need besides the kernel. dense_aux: it reads dense aux tensors by TMA."""
    from fa4_inductor.runtime import compile as compiler

    spec = spec_of(key.program)
    bool_aux = any(a.dtype == "bool" for a in spec.aux)
    slots = regular_slots(spec, dense_aux) if key.regular else RegularSlots()
    needs_v_mean = compiler.needs_v_mean(spec)
    return Plan(kernel, spec, spec.softmax_scale, needs_v_mean, bool_aux, strict, slots, key, contest)


def prepare(
    kernel: Callable[..., None],
    key: PlanKey,
    dense_aux: bool = False,
    strict: bool = False,
    contest: Contest | None = None,
) -> None:
    """Make the plan of a kernel built ahead, so that its first launch, maybe inside a capture, builds nothing."""
    _plans[key] = make_plan(kernel, key, dense_aux, strict, contest)


def clear_plans() -> None:
    """Forget plans (tests, and after settings changed)."""
    _plans.clear()
    _known.clear()


_RUN: dict[str, Callable[..., Outputs]] = {
    "cute": _run_cute,
    "reference": _run_eager("reference"),
    "flex": _run_eager("flex"),
    "sdpa": _run_eager("sdpa"),
}
