"""From a site to a decision: which implementation runs it, or why it stays as the user wrote it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fa4_inductor import log
from fa4_inductor.errors import Declined, DeclineReason, DeclineSite, KernelUnavailable
from fa4_inductor.lowering.aux_layout import (
    column_slots,
    dense_slots,
    has_unit_stride,
    streamed_slots,
    suits_pairs,
    suits_tma,
)
from fa4_inductor.lowering.prepare import prepare
from fa4_inductor.lowering.select import choose
from fa4_inductor.lowering.split_config import Variant, choose_variant
from fa4_inductor.lowering.support import Operands
from fa4_inductor.lowering.tile_map import map_source, size_hint
from fa4_inductor.patterns.gradients import learned_slots, trains, untrainable
from fa4_inductor.patterns.match import AttentionMatch, Site
from fa4_inductor.rewrite import launched_spec, operand_value, value_of
from fa4_inductor.runtime import compile as compiler
from fa4_inductor.runtime import launch, tile_map, tuning, workers
from fa4_inductor.runtime.key import CompileKey
from fa4_inductor.runtime.target import Target, target_for
from fa4_inductor.settings import Settings
from fa4_inductor.spec import parse_spec
from fa4_inductor.spec.expr import walk

_MANY = 1 << 20
_log = log.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one attention site.

    Attributes:
        location: "file.py:123" in the user's source, or "".
        status: "fused" (`implementation` runs it), "matched" (understood, left alone) or "declined" (not understood).
        program: text of the AttentionSpec; None when declined.
        reason: a `DeclineReason` value unless fused. detail: one sentence for a person.
        shapes: dtype, device and shapes of q, k and v, as text.
        specialised_on: what the kernel is compiled for besides the program; other shapes of the site reuse it.
    """

    location: str
    status: str
    program: str | None = None
    implementation: str | None = None
    reason: str | None = None
    detail: str = ""
    shapes: str = ""
    specialised_on: str = ""

    @property
    def fused(self) -> bool:
        """Whether an implementation of ours runs the site."""
        return self.status == "fused"

    def left(self, reason: DeclineReason, detail: str) -> Outcome:
        """The same site, understood and left as the user wrote it."""
        text = {"reason": reason.value, "detail": detail, "specialised_on": ""}
        return dataclasses.replace(self, status="matched", implementation=None, **text)


def decide(site: Site, settings: Settings, explaining: bool = False) -> tuple[Site, Outcome]:
    """The decision on one site, and the site with the spec to run. Changes nothing, builds nothing.

    Args:
        explaining: `settings.target_arch` stands for the device, whatever that is.
    """
    if isinstance(site, Declined):
        return site, Outcome(site.location, "declined", reason=site.reason.value, detail=site.detail)
    seen = Outcome(site.location, "matched", site.spec.text)
    try:
        q, k, v = operand_values(site)
        value_of(site.output)
    except DeclineSite as refusal:
        return site, seen.left(refusal.reason, refusal.detail)
    seen = dataclasses.replace(seen, shapes=_shapes(q, k, v))
    return _choose(site, seen, settings, _target(q, settings, explaining))


def _choose(match: AttentionMatch, seen: Outcome, settings: Settings, target: Target) -> tuple[AttentionMatch, Outcome]:
    choice = choose(match.spec, _operands(match, target), target, settings)
    if choice.declined is not None:
        others = "; ".join(f"{name}: {why}" for name, why in choice.passed_over[:-1])
        detail = f"{choice.declined.detail} ({others})" if others else choice.declined.detail
        return match, seen.left(choice.declined.reason, detail)
    passed = "; ".join(f"{name}: {why}" for name, why in choice.passed_over)
    outcome = dataclasses.replace(
        seen, status="fused", implementation=choice.implementation, program=choice.spec.text, detail=passed
    )
    if choice.implementation == "cute":
        outcome = dataclasses.replace(outcome, specialised_on=_specialised_on(match, target))
    return dataclasses.replace(match, spec=choice.spec), outcome


def _specialised_on(match: AttentionMatch, target: Target) -> str:
    q, k, v = operand_values(match)
    dims = f"head dims {q.shape[3]} and {v.shape[3]}, {_group(q, k)} query heads per key head"
    return f"{_name(q.dtype)}, {dims}, {target.arch}; not on batch or single lengths and strides"


def _group(q: torch.Tensor, k: torch.Tensor) -> int:
    return int(q.shape[1]) // int(k.shape[1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _operands(match: AttentionMatch, target: Target) -> Operands:
    """What the choice depends on. A kernel is built for its head dims, so on a GPU symbolic ones become guards."""
    sizes = [_known_size(size) for size in match.sizes]
    operands = Operands.of(*operand_values(match), sizes)
    operands = dataclasses.replace(operands, need_lse=match.lse is not None, needs_grad=trains(match))
    operands = dataclasses.replace(operands, learned_aux=operands.needs_grad and bool(learned_slots(match)))
    if target.device_type != "cuda":
        return operands
    return dataclasses.replace(operands, head_dim=int(operands.head_dim), head_dim_v=int(operands.head_dim_v))


def _known_size(size: fx.Node | int) -> Any:
    return value_of(size) if isinstance(size, fx.Node) else size


def operand_values(match: AttentionMatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fake q, k, v of a match. Raises `DeclineSite` where the graph does not know them."""
    return operand_value(match.q), operand_value(match.k), operand_value(match.v)


def _target(q: torch.Tensor, settings: Settings, explaining: bool) -> Target:
    arch = settings.target_arch if explaining or q.device.type == "cuda" else None
    return target_for(q.device, arch)


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    sizes = " ".join(f"{name}{tuple(t.shape)}" for name, t in (("q", q), ("k", k), ("v", v)))
    return f"{_name(q.dtype)} {q.device.type} {sizes}"


Decision = tuple[Site, Outcome]


def groups(decisions: Sequence[Decision]) -> list[list[Decision]]:
    """The decisions that belong together: the terms of one output, or a single site."""
    found, rest = [], list(decisions)
    while rest:
        site = rest[0][0]
        count = site.terms if isinstance(site, AttentionMatch) else 1
        found.append(rest[:count])
        rest = rest[count:]
    return found


def together(decisions: Sequence[Decision]) -> list[Decision]:
    """The decisions with sums fused as a whole or not at all: a term left alone would need all of P. What trains stays
    as it is unless its gradients are those of attention."""
    result: list[Decision] = []
    for group in groups(decisions):
        matches = [site for site, outcome in group if isinstance(site, AttentionMatch) and outcome.fused]
        refused = untrainable(*matches) if matches and trains(matches[0]) else None
        if refused is not None:
            group = [(s, o.left(refused.reason, refused.detail) if o.fused else o) for s, o in group]
        if any(outcome.fused for _, outcome in group) and not all(outcome.fused for _, outcome in group):
            detail = "the output is a sum of several attentions, of which another is left alone"
            group = [(s, o.left(DeclineReason.NOT_FASTER, detail) if o.fused else o) for s, o in group]
        result += group
    return result


def build_kernels(decisions: Sequence[Decision], settings: Settings) -> list[Decision]:
    """Build what the chosen sites launch, all at once, before any of it runs.

    A kernel that cannot be built costs one warning, and its sites get the next implementation or stay as they are; it
    raises nothing.
    """
    keys: dict[int, CompileKey] = {}
    results = list(decisions)
    for index, (site, outcome) in enumerate(decisions):
        if isinstance(site, AttentionMatch) and outcome.implementation == "cute":
            try:
                keys[index] = _key_of(site, settings)
            except KernelUnavailable as error:
                results[index] = _without_kernel(site, outcome, error, settings)
    gpus = {key: _gpu_of(decisions[index][0], settings) for index, key in keys.items()}
    wanted = {key: tuning.keys_to_build(key, settings, gpu) for key, gpu in gpus.items()}
    backward_keys = {i: _backward_key_of(decisions[i][0], settings) for i in keys if _trains(decisions[i][0])}
    maps: dict[tile_map.MapPlanKey, CompileKey] = {}
    for index in keys:
        maps |= _tile_map_keys(decisions[index][0], settings)
    to_build = [*(key for group in wanted.values() for key in group), *backward_keys.values(), *maps.values()]
    errors = workers.build_all(to_build, settings) if keys else {}
    for plan_key, key in maps.items():
        if errors[key] is None:  # else the op makes its maps without a kernel
            tile_map.prepare(compiler.get_kernel(key, settings), plan_key)
    for index, key in keys.items():
        failure = errors[wanted[key][0]]
        if failure is None and index in backward_keys:
            failure = errors[backward_keys[index]]
        if failure is not None:
            site, outcome = decisions[index]
            assert isinstance(site, AttentionMatch)
            results[index] = _without_kernel(site, outcome, failure, settings)
        else:
            _prepare(decisions[index][0], key, settings)
    return results


def _prepare(site: Site, key: CompileKey, settings: Settings) -> None:
    assert isinstance(site, AttentionMatch)
    q = operand_value(site.q)
    dims = (key.head_dim, key.head_dim_v, key.qhead_per_kvhead)
    target = _target(q, settings, explaining=False)
    kernel, contest = tuning.kernel_of(key, settings, target.name)
    plan_key = launch.PlanKey(key.program, q.dtype, *dims, q.device, key.need_lse, **_first_launch(site, target))
    launch.prepare(kernel, plan_key, key.dense_aux, settings.strict, contest)


def _gpu_of(site: Site, settings: Settings) -> str:
    assert isinstance(site, AttentionMatch)
    return _target(operand_value(site.q), settings, explaining=False).name


def _without_kernel(
    match: AttentionMatch, outcome: Outcome, error: KernelUnavailable, settings: Settings
) -> tuple[AttentionMatch, Outcome]:
    """The next best decision. Strict mode and a forced implementation accept none."""
    left = outcome.left(DeclineReason.KERNEL_UNAVAILABLE, str(error))
    log.warn_once(str(error), "Attention runs without it; `python -m fa4_inductor doctor` shows what is missing")
    if settings.strict or settings.implementation != "auto":
        return match, left
    q = operand_value(match.q)
    match, other = _choose(
        match, left, dataclasses.replace(settings, implementation="sdpa"), _target(q, settings, False)
    )
    return match, dataclasses.replace(other, reason=None, detail=str(error)) if other.fused else left


def _key_of(match: AttentionMatch, settings: Settings) -> CompileKey:
    q, k, v = operand_values(match)
    target = _target(q, settings, explaining=False)
    program = launched_spec(match.spec, q, k, v).text
    dims = (int(q.shape[3]), int(v.shape[3]), _group(q, k))
    need_lse = match.lse is not None or trains(match)
    return compiler.forward_key(program, q.dtype, *dims, need_lse, target, **_first_launch(match, target))


def _trains(site: Site) -> bool:
    return isinstance(site, AttentionMatch) and trains(site)


def _backward_key_of(site: Site, settings: Settings) -> CompileKey:
    """The key of the backward kernel, for head dims that `lowering.support` has accepted."""
    assert isinstance(site, AttentionMatch)
    q, k, v = operand_values(site)
    dims, grad_lse = (int(q.shape[3]), int(v.shape[3]), _group(q, k)), site.lse is not None
    program, target = launched_spec(site.spec, q, k, v).text, _target(q, settings, explaining=False)
    learned = _learned_by_the_kernel(site)
    deterministic = not learned and torch.are_deterministic_algorithms_enabled()
    return compiler.backward_key(
        program, q.dtype, *dims, grad_lse, target, deterministic=deterministic, learned=learned
    )


def _learned_by_the_kernel(match: AttentionMatch) -> tuple[int, ...]:
    """Aux slots of the prepared spec whose gradients the backward kernel computes."""
    prepared, learned = prepare(match.spec), learned_slots(match)
    known = len(match.aux)
    of_table = {
        known + i: any(n.op == "load" and n.value in learned for n in walk(table.value))
        for i, table in enumerate(prepared.tables)
    }
    return tuple(
        slot
        for slot, source in enumerate(prepared.slots)
        if slot in prepared.spec.score_slots and (source in learned or of_table.get(source, False))
    )


def _tile_map_keys(site: Site, settings: Settings) -> dict[tile_map.MapPlanKey, CompileKey]:
    """The kernel that makes the site's tile map, if it has one, by the plan of its first launch."""
    assert isinstance(site, AttentionMatch)
    q, k, v = operand_values(site)
    spec = launched_spec(site.spec, q, k, v)
    if spec.tile_map is None:
        return {}
    source, tiles = map_source(spec), (spec.tile_map.tile_m, spec.tile_map.tile_n)
    mask = parse_spec(source.program)
    streamed, dense = ([source.slots[slot] for slot in slots(mask)] for slots in (streamed_slots, dense_slots))
    plan_key = tile_map.MapPlanKey(source.program, *tiles, q.device, _are_regular(site, streamed, dense))
    target = _target(q, settings, explaining=False)
    return {plan_key: compiler.tile_map_key(source.program, *tiles, target, regular=plan_key.regular)}


def _first_launch(match: AttentionMatch, target: Target) -> dict[str, Any]:
    """Which of a program's kernels the first launch takes, by the shapes and strides seen while compiling. Another one
    is made when it is needed."""
    spec = prepare(match.spec).spec
    dense = dense_slots(spec)
    regular = _are_regular(match, streamed_slots(spec), dense)
    return {"variant": _variant(match, target, regular and bool(dense)), "regular": regular}


def _are_regular(match: AttentionMatch, streamed: Sequence[int], dense: Sequence[int]) -> bool:
    """Whether these aux tensors of the prepared spec have, as far as is known while compiling, unit strides, and suit
    TMA where `dense` and pairs where read along the keys."""
    prepared, regular = prepare(match.spec), True
    columns = column_slots(prepared.spec)
    for slot in streamed:
        if prepared.slots[slot] < len(match.aux):  # tables are made contiguous
            t = operand_value(match.aux[prepared.slots[slot]])
            strides, shape = [size_hint(s) for s in t.stride()], [size_hint(n) for n in t.shape]
            regular &= suits_tma(strides, shape, t.itemsize) if slot in dense else has_unit_stride(strides, shape)
            regular &= slot not in columns or suits_pairs(strides, shape)
    return regular


def _variant(match: AttentionMatch, target: Target, dense: bool) -> Variant:
    """As the launch chooses, for the sizes seen while compiling; those that depend on data count as many."""
    (batch, heads, seqlen_q, head_dim), (_, kv_heads, seqlen_k, _), v = (
        [_MANY if (n := size_hint(size)) is None else n for size in t.shape] for t in operand_values(match)
    )
    return choose_variant(batch, heads, kv_heads, seqlen_q, seqlen_k, (head_dim, v[3]), target, dense)[0]
