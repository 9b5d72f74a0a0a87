"""Runs a captured graph as it is and, at every matched site, also computes what the match says; both are compared.

The meaning of a spec is spelled out here on its own, in float64, so that a matcher error and an error in an
implementation cannot hide each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fa4_inductor.capture.composites import expand
from fa4_inductor.errors import Declined
from fa4_inductor.patterns import AttentionMatch, Operand, Site, apply_view, find_sites
from fa4_inductor.spec import AttentionSpec, EmptyRow, parse_spec
from fa4_inductor.spec.interpret import Env, evaluate, grid


def attention(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, aux: list[torch.Tensor], sizes: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, Hq, Sq, Dv) and the log-sum-exp (B, Hq, Sq) in float64, from the definition in docs/architecture.md.

    Logits are float32 for inputs of at most that width: a bias of -1e10 absorbs the score there, as it does in eager.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (t.double() for t in (q, k, v))
    batch, heads, seqlen_q, _ = q.shape
    group = heads // k.shape[1]
    k, v = (t.expand(batch, -1, -1, -1).repeat_interleave(group, dim=1) for t in (k, v))
    names = grid(batch, heads, seqlen_q, k.shape[2], q.device)
    names |= {f"size{i}": n for i, n in enumerate(sizes)}
    names["score"] = (spec.softmax_scale * (q @ k.transpose(-1, -2))).to(compute)
    full = names["score"].shape
    aux = [a.to(compute) if a.is_floating_point() else a for a in aux]
    env = Env(names, aux)

    def tensor(e: Any, shape: Any) -> torch.Tensor:
        return torch.as_tensor(e, device=q.device).expand(shape)

    logits = tensor(evaluate(spec.score, env), full).double()
    keep = tensor(evaluate(spec.keep, env), full)
    logits = logits.masked_fill(~keep, -torch.inf)
    if spec.sink is not None:
        sink = tensor(evaluate(spec.sink, env), (*full[:-1], 1)).double()
        logits = torch.cat([logits, sink], -1)
        return torch.softmax(logits, -1)[..., :-1] @ v, logits.logsumexp(-1)
    p = torch.softmax(logits, -1)
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    if spec.empty_row is not EmptyRow.NAN:
        p = torch.where(empty, 0.0 if spec.empty_row is EmptyRow.ZERO else 1.0 / max(k.shape[2], 1), p)
    return p @ v, logits.logsumexp(-1)


@dataclasses.dataclass
class Report:
    """Sites of all graphs of one compiled function, and the largest error of a match."""

    sites: list[Site] = dataclasses.field(default_factory=list)
    errors: list[float] = dataclasses.field(default_factory=list)

    @property
    def matches(self) -> list[AttentionMatch]:
        return [s for s in self.sites if isinstance(s, AttentionMatch)]

    @property
    def declined(self) -> list[Declined]:
        return [s for s in self.sites if isinstance(s, Declined)]

    @property
    def programs(self) -> list[str]:
        return [m.spec.text for m in self.matches]

    @property
    def error(self) -> float:
        return max(self.errors, default=0.0)


class _Checked(fx.Interpreter):
    """Interpreter that compares the value of each matched site with its match."""

    def __init__(self, gm: fx.GraphModule, matches: list[AttentionMatch], report: Report) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.by_output: dict[fx.Node, list[AttentionMatch]] = {}
        for m in matches:
            for n in (m.output, m.lse):
                if n is not None:
                    self.by_output.setdefault(n, []).append(m)
        assert all(len(terms) == terms[0].terms for terms in self.by_output.values())
        self.report = report

    def run_node(self, n: fx.Node) -> Any:
        expected = sum(self._expected(m, n) for m in self.by_output[n]) if n in self.by_output else None
        value = super().run_node(n)
        if expected is not None:
            self.report.errors.append(_error(value, expected))
        return value

    def _expected(self, m: AttentionMatch, node: fx.Node) -> torch.Tensor:
        assert parse_spec(m.spec.text) == m.spec, "the program does not read back"
        q, k, v = (self._operand(o) for o in (m.q, m.k, m.v))
        assert q.dtype == k.dtype == v.dtype and q.dim() == k.dim() == v.dim() == 4
        aux = [self._operand(a) for a in m.aux]
        for a, declared in zip(aux, m.spec.aux, strict=True):
            assert (a.dtype, a.dim()) == (declared.torch_dtype, declared.ndim)
        sizes = [self.env[s] if isinstance(s, fx.Node) else s for s in m.sizes]
        out, lse = attention(m.spec, q, k, v, aux, sizes)
        if node is m.lse:
            return lse * m.lse_scale
        if m.epilogue is not None:
            sizes = [self.env[s] if isinstance(s, fx.Node) else s for s in m.epilogue.sizes]
            names = grid(*out.shape[:3], k.shape[2]) | {f"size{i}": n for i, n in enumerate(sizes)}
            loads = [self._operand(a) for a in m.epilogue.aux]
            out = evaluate(m.epilogue.value, Env(names | {"score": out}, loads))
        return apply_view(out, self._sized(m.output_view))

    def _operand(self, o: Operand) -> torch.Tensor:
        return apply_view(self.env[o.node], self._sized(o.view))

    def _sized(self, view: Any) -> Any:
        return fx.node.map_arg(view, lambda n: self.env[n])


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    assert value.shape == expected.shape, (value.shape, expected.shape)
    value = value.double()
    if not torch.equal(value.isnan(), expected.isnan()):
        return float("inf")
    gap = (value - expected).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs()
    return gap.max().item() if gap.numel() else 0.0


def checked(function: Callable[..., Any], *, dynamic: bool | None = False) -> tuple[Callable[..., Any], Report]:
    """`function` compiled so that every call compares its matched sites; and the report that collects the outcome."""
    report = Report()

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        expand(gm.graph)
        sites = find_sites(gm)
        report.sites += sites
        runner = _Checked(gm, [s for s in sites if isinstance(s, AttentionMatch)], report)
        return lambda *args: runner.run(*args)

    return torch.compile(function, backend=backend, dynamic=dynamic), report
