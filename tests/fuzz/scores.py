"""Scores and what may be done to them before the softmax."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.writer import ADDITIVE, FILLS, Writer

_PRODUCTS = (
    "s = q @ k.transpose(-1, -2)",
    "s = torch.matmul(q, k.mT)",
    "s = torch.einsum('...qd,...kd->...qk', q, k)",
    "s = (k @ q.mT).mT",
    "s = torch.matmul(q, k.transpose(-2, -1).contiguous())",
    "s = (q * D ** -0.25) @ (k * D ** -0.25).mT",
    "s = torch.einsum('...qd,...kd->...kq', q, k).mT",
    "s = (q / math.sqrt(D)) @ k.mT",
)
_PRODUCTS_OF_RANK = {
    3: ("s = torch.bmm(q, k.transpose(1, 2))", "s = torch.baddbmm(torch.zeros((), dtype=q.dtype), q, k.mT)",
        "s = torch.baddbmm(q.new_empty(B * H, S, T), q, k.mT, beta=0, alpha=0.3)",
        "s = torch.einsum('nqd,nkd->nqk', q, k)"),
    4: ("s = torch.einsum('bhqd,bhkd->bhqk', q, k)",
        "s = torch.einsum('bqhd,bkhd->bhqk', q.transpose(1, 2), k.transpose(1, 2))"),
    5: ("s = torch.einsum('bngqd,bngkd->bngqk', q, k)",),
    2: ("s = torch.mm(q, k.t())",),
}  # fmt: skip


def scores(w: Writer) -> None:
    """`s`, the product of q and k, scaled, biased, masked."""
    options = (*_PRODUCTS, *_PRODUCTS_OF_RANK[w.rank])
    if w.kv == "K":
        options = tuple(p for p in options if "einsum" not in p)
    w.add(w.choose(options))
    w.add(*w.choose((("s = s * 0.5",), ("s = s / math.sqrt(D)",), (), ("s *= D ** -0.5",), ("s = s.mul(0.7)",),
                     ("s = s / torch.full((), 2.0, dtype=s.dtype)",))))  # fmt: skip
    for _ in range(w.choose((0, 1, 1, 2, 2, 3))):
        w.choose(_MODIFIERS)(w)


def _bias(w: Writer) -> None:
    w.add(w.choose(("s = s + {e}", "s = {e} + s", "s += {e}", "s = s - {e}", "s.add_({e})",
                    "s = torch.add(s, {e}, alpha=0.5)"))
          .format(e=w.data("bias")))  # fmt: skip


def _additive(w: Writer) -> None:
    kind = w.choose(ADDITIVE)
    dtype = w.choose((w.dtype, w.dtype, "float32"))
    w.add(w.choose(("s = s + {e}", "s = {e} + s", "s = s + {e}.to(s.dtype)")).format(e=w.data("mask", kind, dtype)))


def _odd(w: Writer) -> None:
    w.add(f"s = s + {w.data('odd', 'odd')}" if w.chance(3) else "s = s.abs()")


def _pointwise(w: Writer) -> None:
    w.add(w.choose(("s = 5 * torch.tanh(s / 5)", "s = s.clamp(-2, 2)", "s = s.float()", "s = s * 2", "s = s.relu()",
                    "s = s.sigmoid()", "s = s.exp()", "s = s.pow(2)", "s = s - s.amax(-1, keepdim=True)", "s = -s",
                    "s = s.sin()", "s = F.softplus(s)", "s = s.double()", "s = torch.where(s > 0, s, s * 0.1)",
                    "s = s - s.mean(-1, keepdim=True)", "s = s.nan_to_num()", "s = s + 1", "s = s.to(torch.bfloat16)",
                    "s = torch.maximum(s, torch.full((), -1e4, dtype=s.dtype))", "s = s.masked_fill(s < 0, -1e9)",
                    "s = s.contiguous()", "s = s.round()", "s = s.div(3, rounding_mode='floor')")))  # fmt: skip


def _factor(w: Writer) -> None:
    w.add(w.choose(("s = s * {e}", "s = s / ({e}.abs() + 0.5)")).format(e=w.data("temperature", "positive")))


def _distance(w: Writer) -> None:
    i, j = _i(w), _j(w)
    form = w.choose((f"({j} - {i})", f"({j} - {i}).abs()", f"({i} - {j}).clamp(min=0)", f"-({i} - {j}).abs().sqrt()"))
    if w.chance(3):
        table = w.new("table", "S + T")
        w.add(f"s = s + {table}[{j} - {i} + S - 1]")
    else:
        slopes = w.fit(f"{w.new('slopes', 'H', kind='positive')}[:, None, None] * {form}")
        w.add(f"s = s + {slopes}")


def _relative(w: Writer) -> None:
    table = w.new("embedding", "9", "H")
    ids = w.new("buckets", "S", "T", kind="ids:9")
    e = w.choose((f"F.embedding({ids}, {table}).permute(2, 0, 1)[None]", f"{table}[{ids}].permute(2, 0, 1)",
                  f"{table}.t()[:, {ids}]"))  # fmt: skip
    w.add(f"s = s + {w.fit(e)}")


def _contraction(w: Writer) -> None:
    table = w.new("relative", "T", "D")
    w.add(w.choose((f"s = s + q @ {table}.t()", f"s = s + torch.einsum('...qd,kd->...qk', q, {table})",
                    f"s = s + (q * 0.3) @ {table}.mT",
                    "s = s + q @ k.mT")))  # fmt: skip


def _i(w: Writer) -> str:
    return w.once("i", "torch.arange(S)[:, None]")


def _j(w: Writer) -> str:
    return w.once("j", "torch.arange(T)[None]")


def keep(w: Writer) -> str:
    """A bool expression that broadcasts to the scores."""
    i, j = _i(w), _j(w)
    kind = w.choose(range(10))
    if kind < 2:
        return w.choose(
            (f"({j} <= {i})", f"({j} <= {i} + T - S)", f"({i} >= {j})", f"({j} < {i} + 2)", f"~({j} > {i})")
        )
    if kind == 2:
        return w.choose((f"({i} - {j} < 3)", f"(({i} - {j}).abs() <= 1)", f"({i} // 2 == {j} // 2)", f"({j} >= 2)",
                         f"({j} % 2 == 0)", "(torch.arange(T) < S)", f"({i} != {j})"))  # fmt: skip
    if kind == 3:
        return w.choose(("torch.ones(S, T, dtype=torch.bool).tril(T - S)", "torch.ones(S, T).tril().bool()",
                         "~torch.ones(S, T, dtype=torch.bool).triu(1)", "(torch.tril(torch.ones(S, T)) == 1)",
                         "torch.eye(S, T).bool()"))  # fmt: skip
    if kind == 4:
        return w.data("keep", w.choose(("keep", "rows")))
    if kind == 5:
        pad = w.new("pad", "B", "T", kind="keep")
        return w.fit(f"{pad}[:, None, None, :]")
    if kind == 6:
        flags = w.new("flags", "B", "T", kind="flags")
        form = w.choose(("({} != 0)", "{}.bool()", "({} > 0)", "({} == 1)", "({}.to(torch.float32) > 0.5)"))
        return w.fit(form.format(f"{flags}[:, None, None, :]"))
    if kind == 7:
        doc, other = w.new("doc", "B", "S", kind="ids:3"), w.new("doc", "B", "T", kind="ids:3")
        return w.fit(f"({doc}[:, None, :, None] == {other}[:, None, None, :])")
    if kind == 8:
        lengths = w.new("lengths", "B", kind="ids:5")
        return w.fit(f"({j} < {lengths}[:, None, None, None])")
    return w.choose((f"(torch.ones(T, dtype=torch.long).cumsum(0) - 1 <= {i})",
                     w.fit(f"((torch.arange(H)[:, None, None] % 2 == 0) | ({j} <= {i}))"),
                     f"({j} - {i} <= 0)"))  # fmt: skip


def _mask(w: Writer) -> None:
    m = keep(w)
    for _ in range(w.choose((0, 0, 0, 1))):
        m = f"({m} {w.choose(('&', '&', '|', '^'))} {keep(w)})"
    w.add(f"m = {m}")
    fill = w.choose(FILLS)
    w.add(w.choose(_APPLY).format(f=fill))
    if w.chance(6):
        w.add(w.choose(_APPLY).format(f=w.choose(FILLS)))


_APPLY = (
    "s = s.masked_fill(~m, {f})",
    "s = torch.where(m, s, {f})",
    "s = s + torch.where(m, 0.0, {f}).to(s.dtype)",
    "s = s + (1.0 - m.to(s.dtype)) * {f}",
    "s = s + torch.zeros(m.shape, dtype=s.dtype).masked_fill(~m, {f})",
    "s = s + (~m).to(s.dtype) * {f}",
    "s.masked_fill_(~m, {f})",
    "s = s.masked_fill(m.logical_not(), {f})",
    "s = torch.where(m, s, torch.full_like(s, {f}))",
    "s = s + m.to(s.dtype).log()",
    "s = torch.where(~m, {f}, s)",
    "s = s * m - (1 - m.to(s.dtype)) * 1e9",
    "s = s * m",
    "s = torch.where(m, s, torch.where(m, 0.0, {f}).to(s.dtype))",
    "s = torch.max(s + torch.where(m, 0.0, {f}).to(s.dtype), torch.tensor(torch.finfo(s.dtype).min, dtype=s.dtype))",
)
_MODIFIERS: tuple[Callable[[Writer], None], ...] = (
    _mask, _mask, _mask, _mask, _bias, _bias, _additive, _additive, _pointwise, _pointwise, _factor, _distance,
    _relative, _contraction, _odd,
)  # fmt: skip
