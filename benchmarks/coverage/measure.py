"""One model: its sites, how many of them a backend fuses, and the error of what it makes of the model."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import multiprocessing
import os
import threading
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .backends import Outcomes, Probe, resolve
from .build import Case, build, run
from .sites import FusedCalls, Sites

Record = dict[str, Any]
# Largest error relative to the largest output: in float32; in a half type a multiple of eager's own error, and a band.
FLOAT32_LIMIT, HALF_FACTOR, HALF_BAND = 2e-3, 3, 0.02
# A model whose own outputs differ by this much between seeds draws random numbers.
STOCHASTIC = 0.01
REASON_CHARACTERS = 600


@dataclasses.dataclass(frozen=True)
class Job:
    """One measurement. All fields but `timeout` (seconds) are told in the record."""

    model: str
    impl: str = "eager"
    backend: str = "fa4"
    compile: str = "eager"
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    padding: str = "auto"
    cache: bool = False
    timeout: float = 120.0

    def header(self) -> Record:
        """The job as the beginning of its record."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "timeout"}

    @property
    def key(self) -> tuple[str, ...]:
        """What tells the record of this job from others."""
        return key_of(self.header())


def key_of(record: Record) -> tuple[str, ...]:
    """What tells a record from others: the model and `run_of` it."""
    return (record["model"], record["impl"], *run_of(record))


def run_of(record: Record) -> tuple[str, ...]:
    """What was measured, whatever the model: backend, dtype, padding, cache, compile and options, as text."""
    options = ",".join(f"{name}={value}" for name, value in sorted(record.get("options", {}).items()))
    cache = "cache" if record.get("cache") else ""
    settings = (record.get("padding", "auto"), cache, record.get("compile", "inductor"), options)
    return (record["backend"], record["dtype"], *settings)


def outputs(out: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Floating outputs in float64, without the positions of padding tokens."""
    mask = inputs.get("attention_mask")
    leaves = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    tensors = [t.detach().double() for t in leaves]
    return [t[mask.bool()] if mask is not None and t.shape[:2] == mask.shape else t for t in tensors]


def compare(got: list[Tensor], reference: list[Tensor]) -> dict[str, float]:
    """Largest absolute error, the same relative to the largest reference value, smallest cosine.

    What the reference leaves infinite or NaN is not held against the candidate.
    """
    if [t.shape for t in got] != [t.shape for t in reference]:
        return dict(max_err=math.inf, rel_err=math.inf, cos=0.0)
    worst, relative, cosine = 0.0, 0.0, 1.0
    for a, b in zip(got, reference):
        a, b = a[b.isfinite()], b[b.isfinite()]
        if not b.numel():
            continue
        error = (a - b).abs().max().nan_to_num(math.inf).item()
        worst = max(worst, error)
        relative = max(relative, error / max(b.abs().max().item(), 1e-6))
        cosine = min(cosine, F.cosine_similarity(a, b, 0).item()) if b.any() else cosine
    return dict(max_err=worst, rel_err=relative, cos=cosine)


def measure(job: Job) -> Record:
    """Sites, fused sites, error and status of one model, in this process. Raises nothing that a model can cause.

    Status: "ok", "wrong" (error beyond its limit), "stochastic" (the same, but the model draws random numbers),
    "crash", "skip" (not built, or the implementation is not offered; with its reason). "fused" counts the graphs of
    one forward after compilation, "left" the sites that those graphs still run as plain ATen ops.
    """
    record: Record = dict(status="skip")
    try:
        case = build(job.model, getattr(torch, job.dtype), job.padding, job.cache)
        case = dataclasses.replace(case, model=case.with_attention(job.impl))
        exact = _reference(case, record)
        sites = Sites(case.model)
        with FusedCalls(sites), sites:
            run(case.model, case.inputs)
    except Exception as error:
        return record | dict(reason=_reason(error))
    record |= dict(
        cls=type(case.model).__name__,
        inputs={name: list(t.shape) for name, t in case.inputs.items()},
        pad=case.padding if "attention_mask" in case.inputs else None,
        sites=len(sites.found) + sites.fused_calls,
        sites_softmax=len(sites.found),
        sites_sdpa=sites.fused_calls,
        softmaxes=sites.softmaxes,
        chains=dict(collections.Counter(sites.found.values())),
    )
    with Outcomes() as log:
        probe = Probe(resolve(job.backend, job.compile, dict(job.options)), job.backend, log)
        return record | _compiled(probe, case, exact, record)


def _reference(case: Case, record: Record) -> list[Tensor]:
    """The outputs to compare with: the same attention uncompiled, in float32. Notes its error in the model's own dtype
    and its randomness."""
    eager = exact = outputs(run(case.model, case.inputs), case.inputs)
    if not eager:
        raise ValueError("no floating outputs")
    if case.dtype != torch.float32:
        inputs = {name: t.float() if t.is_floating_point() else t for name, t in case.inputs.items()}
        exact = outputs(run(copy.deepcopy(case.model).float(), inputs), inputs)
    again = outputs(run(case.model, case.inputs, seed=4), case.inputs)
    record["eager_rel_err"] = compare(eager, exact)["rel_err"]
    record["stochastic"] = compare(again, eager)["rel_err"] > STOCHASTIC
    record["finite"] = all(t.isfinite().all().item() for t in eager)
    return exact


def _compiled(probe: Probe, case: Case, exact: list[Tensor], record: Record) -> Record:
    """What the backend makes of the model."""
    result: Record = {}
    start = time.monotonic()
    try:
        model = torch.compile(case.model, backend=lambda gm, inputs: probe(gm, inputs))
        run(model, case.inputs)
        result["compile_s"] = round(time.monotonic() - start, 2)
        probe.start()
        result |= compare(outputs(run(model, case.inputs), case.inputs), exact)
        limit = FLOAT32_LIMIT if case.dtype == torch.float32 else HALF_FACTOR * record["eager_rel_err"] + HALF_BAND
        failed = "stochastic" if record["stochastic"] else "wrong"
        result |= dict(status="ok" if result["rel_err"] < limit else failed)
        result |= dict(fused=probe.executed, outcomes=probe.outcomes)
        left = Sites(case.model)
        probe.start(watch=left)
        run(model, case.inputs)
        result["left"] = len(left.found)
    except Exception as error:
        result |= dict(status="crash", compile_s=round(time.monotonic() - start, 2), reason=_reason(error))
        result |= dict(fused=probe.executed, outcomes=probe.outcomes)
    breaks = torch._dynamo.utils.counters["graph_break"]
    result |= dict(fused_compiled=probe.compiled, graphs=probe.graphs, graph_breaks=sum(breaks.values()))
    return result | dict(breaks=[str(text)[:160] for text in list(breaks)[:3]])


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:REASON_CHARACTERS]}"


def prepare() -> None:
    """Loads and configures what the forked processes share: no caches, one compile thread."""
    import torch._functorch.config
    import torch._inductor.compile_fx
    import torch._inductor.config
    from torch._inductor.fx_passes.joint_graph import lazy_init

    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1
    torch._functorch.config.enable_autograd_cache = False
    lazy_init(torch.device("cpu"))


_FORK = threading.Lock()


def isolated(job: Job) -> Record:
    """`measure` in a process of its own, with its limit of time; "crash" and "timeout" are statuses too."""

    def child() -> None:
        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        there.send(measure(job))

    start = time.monotonic()
    with _FORK:
        here, there = multiprocessing.Pipe(False)
        process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
        process.start()
        there.close()
    try:
        record = here.recv() if here.poll(job.timeout) else dict(status="timeout", reason=f"> {job.timeout:.0f} s")
    except EOFError:
        record = dict(status="crash", reason="the process died")
    process.kill()
    process.join()
    return job.header() | record | dict(wall_s=round(time.monotonic() - start, 1))
