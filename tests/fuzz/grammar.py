"""Attention in a random spelling, as source text: operands, scores, masks, softmax, product, what follows.

`write` builds a `Program` from decisions that it takes through a `Choose` callback, so that a seeded generator and
hypothesis (which shrinks towards the first alternative) can both drive it. Every product of this module is a valid
attention or close to one; `tests.fuzz.mutate` damages it further.
"""

from __future__ import annotations

from tests.fuzz.operands import operands
from tests.fuzz.program import Program
from tests.fuzz.scores import keep, scores
from tests.fuzz.writer import ADDITIVE, FILLS, Choose, Writer


def write(choose: Choose) -> Program:
    """One program, its decisions taken by `choose`."""
    w = _start(choose)
    operands(w)
    if w.rank == 4 and choose((False,) * 5 + (True,)):
        _sdpa(w)
    else:
        scores(w)
        _probabilities(w)
        _product(w)
    _tail(w)
    return _finished(w)


def _start(choose: Choose) -> Writer:
    rank = choose((4, 4, 4, 4, 3, 3, 5, 2))
    kv_heads, group = choose(((2, 1), (1, 1), (1, 2), (2, 2), (3, 1)))
    seqlen = choose((5, 4, 4, 1))
    seqlen_k = choose((seqlen, seqlen, seqlen, 7, 1, 3))
    sizes = {"B": choose((2, 1, 3)), "H": kv_heads * group, "K": kv_heads, "G": group, "S": seqlen, "T": seqlen_k,
             "D": choose((4, 8)), "E": choose((0, 0, 6))}  # fmt: skip
    if choose((False,) * 5 + (True,)):  # shapes that tell nothing apart
        sizes |= dict.fromkeys("BSTDE", 4) | choose(({"H": 4, "K": 4, "G": 1}, {"H": 4, "K": 2, "G": 2}))
    sizes["E"] = sizes["E"] or sizes["D"]
    if choose((False,) * 39 + (True,)):
        sizes[choose(("B", "S", "T"))] = 0
    if rank == 2:
        sizes |= {"B": 1, "H": 1, "K": 1, "G": 1}
    dtype = choose(("float32",) * 5 + ("float64",) + ("bfloat16", "float16"))
    return Writer(choose, sizes, dtype, rank)


def _finished(w: Writer) -> Program:
    choose = w.choose
    dynamo = choose((False,) * 24 + (True,))
    second = None
    if dynamo and choose((False, True)) and 0 not in w.sizes.values():
        second = w.sizes | {n: w.sizes[n] + choose((1, 2, 3)) for n in "BST" if w.sizes[n] > 1}
        if w.sizes["S"] == w.sizes["T"]:
            second["T"] = second["S"]
    return Program(
        sizes=w.sizes,
        inputs=tuple(w.inputs),
        lines=tuple(w.lines),
        results=tuple(w.results),
        second=second,
        dynamo=dynamo,
        autocast="bfloat16" if dynamo and w.dtype == "float32" and choose((False,) * 5 + (True,)) else None,
        grad=choose((False,) * 39 + (True,)),
        implementation=choose(("reference",) * 4 + ("auto",)),
    )


_SOFTMAX: tuple[tuple[str, ...], ...] = (
    ("p = torch.softmax(s, -1)",),
    ("p = s.softmax(dim=-1)",),
    ("p = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)",),
    ("p = F.softmax(s.float(), dim=-1).to(q.dtype)",),
    ("e = torch.exp(s - s.amax(-1, keepdim=True))", "p = e / e.sum(-1, keepdim=True)"),
    ("e = (s - s.max(dim=-1, keepdim=True).values).exp()", "p = e / e.sum(dim=-1, keepdim=True)"),
    ("e = s.exp()", "p = e / e.sum(-1, keepdim=True)"),
    ("p = (s - s.logsumexp(-1, keepdim=True)).exp()",),
    ("p = s.log_softmax(-1).exp()",),
    ("e = s.exp()", "p = e / (1 + e.sum(-1, keepdim=True))"),
    ("x = s.amax(-1, keepdim=True)", "e = (s - x).exp()", "p = e / ((-x).exp() + e.sum(-1, keepdim=True))"),
    ("p = torch.cat([s, sink.expand(*s.shape[:-1], 1)], -1).softmax(-1)[..., :-1]",),
    ("p = torch.cat([sink.expand(*s.shape[:-1], 1), s], -1).softmax(-1)[..., 1:]",),
    ("p = torch.cat([s, torch.zeros_like(s[..., :1])], -1).softmax(-1)[..., :T]",),
    ("p = F.softmin(-s, -1)",),
    ("p = s.double().softmax(-1).to(s.dtype)",),
    ("e = torch.exp2((s - s.amax(-1, keepdim=True)) * 1.4426950408889634)", "p = e / e.sum(-1, keepdim=True)"),
    ("e = torch.exp(s - s.amax(-1, keepdim=True))", "p = e / (e.sum(-1, keepdim=True) + 1e-9)"),
    ("e = torch.exp(s - s.amax(-1, keepdim=True)) * 1.0", "p = e * (1.0 / e.sum(-1, keepdim=True))"),
    ("e = torch.exp(s - s.amax(-1, keepdim=True))", "p = e / e.sum(-1, keepdim=True).clamp(min=1e-6)"),
)
_AFTER = (
    "p = F.dropout(p, 0.1, training=False)",
    "p = p.clone()",
    "p = p.to(v.dtype)",
    "p = p * 1.0",
    "p = p * {w}",
    "p = p.masked_fill(~m, 0.0)",
    "p = torch.nan_to_num(p)",
    "p = torch.where((s == float('-inf')).all(-1, keepdim=True), 0.0, p)",
    "p = p / p.sum(-1, keepdim=True)",
    "p = p * m",
    "p = p + 1e-3",
    "p = p * 0.5",
    "p = torch.where(m, p, torch.zeros_like(p))",
    "p = p - 0.3 * torch.softmax(s * 0.7, -1)",
    "p = p.softmax(-1)",
    "p = p.topk(T, -1).values",
)


def _probabilities(w: Writer) -> None:
    lines = w.choose(_SOFTMAX)
    if "sink" in "".join(lines):
        sink = w.fit(f"{w.new('sinks', 'H')}[None, :, None, None].expand(B, H, S, T)")
        w.add(f"sink = {sink}[..., :1]" if w.sizes["T"] else "sink = s.sum(-1, keepdim=True)")
    w.add(*lines)
    if w.chance(5):
        after = w.choose(_AFTER)
        w.add(after.format(w=w.data("weights", "positive")) if "{w}" in after else after)


_LAST = (
    "o = p @ v",
    "o = torch.matmul(p, v)",
    "o = torch.einsum('...qk,...kd->...qd', p, v)",
    "o = torch.matmul(p.to(v.dtype), v)",
)
_RARE_LAST = "o = (v.mT @ p.mT).mT"
_LAST_OF_RANK = {
    3: ("o = torch.bmm(p, v)", "o = torch.baddbmm(torch.ones((), dtype=p.dtype), p, v)"),
    4: ("o = torch.einsum('bhqk,bhkd->bqhd', p, v).transpose(1, 2)",
        "o = torch.einsum('bhqk,bkhd->bhqd', p, v.transpose(1, 2))",
        "o = torch.bmm(p.flatten(0, 1), v.flatten(0, 1)).view(B, H, S, E)"),
    5: ("o = torch.einsum('bngqk,bngkd->bngqd', p, v)",),
    2: ("o = torch.mm(p, v)",),
}  # fmt: skip


def _product(w: Writer) -> None:
    options = _LAST[:2] if w.kv == "K" else (*_LAST, *_LAST, *_LAST_OF_RANK[w.rank])
    w.add(_RARE_LAST if w.kv != "K" and w.chance(30) else w.choose(options))


def _sdpa(w: Writer) -> None:
    mask = w.choose(("", "", "bool", "float", "computed"))
    if mask == "bool":
        w.add(f"m = {keep(w)}")
    elif mask == "float":
        w.add(f"m = {w.data('mask', w.choose(ADDITIVE), w.choose((w.dtype, w.dtype, w.dtype, 'float32')))}")
    elif mask == "computed":
        w.add(f"m = torch.where({keep(w)}, 0.0, {w.choose(FILLS).replace('s.dtype', 'q.dtype')}).to(q.dtype)")
    arguments = ["q", "k", "v"] + ([w.choose(("m", "attn_mask=m"))] if mask else [])
    if not mask and w.chance(2):
        arguments.append("is_causal=True")
    if w.chance(3):
        arguments.append("scale=0.3")
    w.add(f"o = F.scaled_dot_product_attention({', '.join(arguments)})")


def _tail(w: Writer) -> None:
    w.results.append("o")
    if w.chance(4):
        merged = "o = o.transpose(-2, -3).flatten(-2)" if w.rank > 2 else "o = o.t()"
        w.add(w.choose((merged, "o = o + v.mean(-2, keepdim=True)",
                        "o = o.contiguous()", "o = o * 2", "o = o.reshape(-1, E)", "o = o.sin()")))  # fmt: skip
    if w.chance(20):
        w.results.append(w.choose(("p", "s", "q", "k")))
    if w.chance(15):
        w.add(
            "x = o.reshape(-1, o.shape[-1])", "o2 = torch.softmax(x @ x.mT, -1) @ x"
        )
        w.results.append("o2")
