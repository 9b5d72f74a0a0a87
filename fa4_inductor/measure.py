"""How errors and times are measured, the same in the demo, the benchmarks and the model tests."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch


@dataclasses.dataclass(frozen=True)
class Error:
    """Largest deviations from a float64 reference: of the candidate, of eager in the same dtype, and the limit."""

    candidate: float
    eager: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the candidate is within the limit; not a number counts as outside."""
        return self.candidate <= self.bound


def compare(candidate: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor) -> Error:
    """Error of `candidate` (same shape and dtype as `eager`) against a float64 `reference`.

    The limit is twice eager's own error plus half a unit in the last place of the largest output: the rule of the
    FlashAttention test-suite, which needs no tolerance tuned by hand.
    """
    if candidate.shape != eager.shape or candidate.dtype != eager.dtype:
        raise ValueError(f"{candidate.shape} {candidate.dtype} is not comparable with {eager.shape} {eager.dtype}")
    reference = reference.to(eager.device)
    own = (eager.double() - reference).abs().max().item()
    band = 0.5 * torch.finfo(eager.dtype).eps * reference.abs().max().item()
    return Error((candidate.double() - reference).abs().max().item(), own, 2 * own + band)


def _once_ms(function: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3


def medians_ms(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device | str,
    rounds: int = 9,
    warmup: int = 2,
    budget_s: float = 30.0,
) -> dict[str, float]:
    """Median milliseconds of each function, called in turn so that drift of the machine meets all alike.

    After `budget_s` seconds no round beyond the third is begun.
    """
    device = torch.device(device)
    for function in functions.values():
        for _ in range(warmup):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    begin = time.monotonic()
    for done in range(rounds):
        if done >= 3 and time.monotonic() - begin > budget_s:
            break
        for name, function in functions.items():
            times[name].append(_once_ms(function, device))
    return {name: statistics.median(values) for name, values in times.items()}


def first_call_seconds(function: Callable[[], object], device: torch.device | str) -> float:
    """Wall time of one call with everything it compiles."""
    begin = time.perf_counter()
    function()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin
