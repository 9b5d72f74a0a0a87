"""The torch.compile backend "fa4": find attention, replace it, let Inductor compile the graph.

    torch.compile(model, backend="fa4", mode="reduce-overhead")
    torch.compile(model, backend="fa4", options={"fa4.strict": True, "max_autotune": True})

Whatever goes wrong here leaves the graph as it was: the model then runs as under `backend="inductor"`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._dynamo.exc import RestartAnalysis

from fa4_inductor import log
from fa4_inductor.capture.composites import Expansion, expand, is_composite, settle
from fa4_inductor.capture.snapshot import Snapshot
from fa4_inductor.decide import Decision, Outcome, build_kernels, decide, groups, together
from fa4_inductor.errors import DeclineReason, DeclineSite, StrictModeError
from fa4_inductor.inductor_options import inductor_patches, memory_patches
from fa4_inductor.patterns import find_sites
from fa4_inductor.patterns.match import AttentionMatch
from fa4_inductor.rewrite import Splicer
from fa4_inductor.runtime.direct import call_directly
from fa4_inductor.settings import Settings, split_options

_log = log.get_logger(__name__)
# Sites that strict mode accepts unfused: the user's own graph is the best implementation.
_NOT_A_FAILURE = (DeclineReason.NOT_FASTER.value,)


@dataclasses.dataclass
class ModulePlan:
    """Sites of one GraphModule (the graph, or a checkpointed body inside it), and what becomes of each.

    Attributes:
        expansions: calls shown as what they consist of, to be settled.
        before: the graph before that, if it holds such calls.
    """

    module: fx.GraphModule
    decisions: list[Decision]
    expansions: list[Expansion] = dataclasses.field(default_factory=list)
    before: Snapshot | None = None

    @property
    def outcomes(self) -> list[Outcome]:
        """What becomes of each site, in graph order."""
        return [outcome for _, outcome in self.decisions]


def fa4(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend entry that torch.compile calls with each captured graph.

    Args:
        mode: a torch.compile mode, forwarded to Inductor.
        options: `fa4.*` keys override `Settings`; the others are Inductor's.

    Raises:
        SettingsError: for an unknown or malformed `fa4.*` option or `FA4_INDUCTOR_*` variable.
        StrictModeError: under `fa4.strict`, for a site that was declined or has no kernel.
    """
    ours, inductor_options = split_options(options)
    if mode and mode.startswith("max-autotune"):
        ours.setdefault("fa4.autotune", True)
    settings = Settings.from_env().with_options(ours)
    patches = inductor_patches(mode, inductor_options)
    if settings.disable:
        return _compile(gm, example_inputs, patches)
    counted = log.counters().copy()
    saved = fuse(gm, settings)
    try:
        return _compile(gm, example_inputs, memory_patches(gm) | patches)
    except RestartAnalysis:  # Dynamo captures this graph again, so this time does not count
        _discount(counted)
        raise
    except Exception as error:
        if settings.strict or not saved:
            raise
        for snapshot in saved:
            snapshot.restore()
        compiled = _compile(gm, example_inputs, patches)  # where this fails too, the user's graph is at fault
        _internal_error("compiling the rewritten graph", error)
        return compiled


def _reset() -> None:
    """torch._dynamo.reset() calls this: CUDA graphs of a forgotten compilation are forgotten too."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


fa4.reset = _reset  # type: ignore[attr-defined]


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    call_directly()
    return compile_fx(gm, list(example_inputs), config_patches=patches or None)


def plan(gm: fx.GraphModule, settings: Settings, explaining: bool = False) -> list[ModulePlan]:
    """Sites of all graphs inside `gm` and the decision on each. The graphs change only by the plans' expansions.

    Args:
        explaining: only tell; no kernel is built, no expansion stays, and `settings.target_arch` stands for the device.
    """
    plans: list[ModulePlan] = []
    done = False
    try:
        for module in gm.modules():
            if isinstance(module, fx.GraphModule):
                plans.append(_expanded(module))
                plans[-1].decisions = together([decide(site, settings, explaining) for site in find_sites(module)])
        if not explaining:
            built = iter(build_kernels([decision for p in plans for decision in p.decisions], settings))
            for p in plans:
                p.decisions = together([next(built) for _ in p.decisions])
        done = not explaining
    finally:
        if not done:
            for p in plans:
                settle(p.expansions, fused=())
    return plans


def _expanded(module: fx.GraphModule) -> ModulePlan:
    before = Snapshot(module) if any(map(is_composite, module.graph.nodes)) else None
    return ModulePlan(module, [], expand(module.graph), before)


def fuse(gm: fx.GraphModule, settings: Settings) -> list[Snapshot]:
    """Replace the sites of `gm` in place. Returns what each changed graph was; empty when nothing was changed.

    Raises:
        StrictModeError: under `fa4.strict`.
    """
    saved: list[Snapshot] = []
    try:
        plans = plan(gm, settings)
        for module_plan in plans:
            if any(outcome.fused for outcome in module_plan.outcomes):
                saved.append(module_plan.before or Snapshot(module_plan.module))
                _splice(module_plan, settings)
            else:
                settle(module_plan.expansions, fused=())
        outcomes = [outcome for module_plan in plans for outcome in module_plan.outcomes]
    except RestartAnalysis:
        raise
    except Exception as error:
        for snapshot in saved:
            snapshot.restore()
        if settings.strict:
            raise
        _internal_error("looking for attention", error)
        return []
    _account(outcomes)
    _check_strict(outcomes, settings)
    return saved


def _splice(module_plan: ModulePlan, settings: Settings) -> None:
    splicer = Splicer(module_plan.module.graph)
    decisions: list[Decision] = []
    for group in groups(module_plan.decisions):
        decisions += _splice_group(splicer, group, settings)
    module_plan.decisions = decisions
    splicer.finish()
    fused = {s.output for s, outcome in module_plan.decisions if outcome.fused and isinstance(s, AttentionMatch)}
    settle(module_plan.expansions, fused)
    module_plan.module.graph.lint()
    module_plan.module.recompile()


def _splice_group(splicer: Splicer, group: list[Decision], settings: Settings) -> list[Decision]:
    """The group, as it was when it was spliced (or was to be left), else with the reason why it was not."""
    parts = [(s, o.implementation) for s, o in group if isinstance(s, AttentionMatch) and o.implementation is not None]
    if not all(outcome.fused for _, outcome in group):
        return group
    try:
        splicer.splice(*parts)
        return group
    except DeclineSite as refusal:
        reason, detail = refusal.reason, refusal.detail
    except Exception as error:
        if settings.strict:
            raise
        _warn_internal(f"rewriting {group[0][1].location}", error)
        reason, detail = DeclineReason.INTERNAL_ERROR, f"{type(error).__name__}: {error}"
    return [(site, outcome.left(reason, detail)) for site, outcome in group]


def _account(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        log.count("found")
        log.count("matched", outcome.status != "declined")
        log.count("fused", outcome.fused)
        if not outcome.fused:
            log.count("declined")
            log.count(f"declined.{outcome.reason}")
        _log.debug("%s", outcome)
    log.artifact("fa4_inductor_sites", lambda: "\n".join(map(str, outcomes)))


def _discount(counted: Counter[str]) -> None:
    """Sets the counters of sites back to what they were; kernels that were compiled stay counted."""
    counters = log.counters()
    for name in counters:
        if name in ("found", "matched", "fused") or name.startswith("declined"):
            counters[name] = counted[name]


def _check_strict(outcomes: list[Outcome], settings: Settings) -> None:
    failures = [o for o in outcomes if not o.fused and o.reason not in _NOT_A_FAILURE]
    if settings.strict and failures:
        lines = [f"  {o.location or '?'}: {o.reason}: {o.detail}" for o in failures]
        raise StrictModeError("fa4.strict is set and attention was left unfused:\n" + "\n".join(lines))


def _internal_error(what: str, error: Exception) -> None:
    log.count("declined.internal_error")
    _warn_internal(what, error)


def _warn_internal(what: str, error: Exception) -> None:
    _log.debug("internal error while %s", what, exc_info=error)
    cause = f"fa4 failed while {what} ({type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]})"
    log.warn_once(cause, 'The graph runs unfused; TORCH_LOGS="+fa4_inductor" shows the traceback to report')
