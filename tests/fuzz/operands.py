"""How a program gets q, k and v: layouts, projections, repeated heads."""

from __future__ import annotations

from tests.fuzz.writer import Writer


def operands(w: Writer) -> None:
    """q, k and v in a layout of the inputs' own, brought to the rank of the program."""
    for name, heads, length, feature in (("q", "H", "S", "D"), ("k", "K", "T", "D"), ("v", "K", "T", "E")):
        _operand(w, name, heads, length, feature)
        if w.chance(5):
            w.add(w.choose(_BEFORE).format(x=name, d=feature))
    if w.sizes["G"] > 1 and not (w.rank == 4 and w.sizes["K"] == 1 and w.chance(2)):
        for name in "kv":
            w.add(w.choose(_REPEATS).format(x=name, n="T", d="D" if name == "k" else "E"))
    elif w.sizes["G"] > 1:
        w.kv = "K"
    if w.rank == 2:
        w.add(*(f"{x} = {x}[0, 0]" for x in "qkv"))
    if w.rank == 3:
        flat = w.choose(("{x} = {x}.reshape(B * {h}, {n}, {d})", "{x} = {x}.flatten(0, 1)"))
        for x, n, d in (("q", "S", "D"), ("k", "T", "D"), ("v", "T", "E")):
            w.add(flat.format(x=x, n=n, d=d, h="H"))
    if w.rank == 5:
        w.add(*(f"{x} = {x}.unflatten(1, (H // G, G))" for x in "qkv"))


_BEFORE = (
    "{x} = {x}.sin()",
    "{x} = {x} * 0.5",
    "{x} = {x} + 0.1",
    "{x} = {x}.contiguous()",
    "{x} = {x}.clone()",
    "{x} = F.layer_norm({x}, ({d},))",
    "{x} = torch.cat([-{x}[..., {d} // 2:], {x}[..., :{d} // 2]], -1)",
    "{x} = {x} / 1.5",
    "{x} = {x}.flip(2)",
    "{x} = {x}.mT.contiguous().mT",
    "{x} = -{x}",
    "{x} = {x}.to(torch.float64).to({x}.dtype)",
    "{x} = {x}.roll(1, 2)",
    "{x} = torch.stack([{x}, {x}.cos()], 0)[0]",
)
_REPEATS = (
    "{x} = {x}[:, :, None].expand(B, K, G, {n}, {d}).reshape(B, H, {n}, {d})",
    "{x} = {x}.repeat_interleave(G, dim=1)",
    "{x} = torch.repeat_interleave({x}, G, 1)",
    "{x} = {x}[:, torch.arange(H) // G]",
    "{x} = {x}.unsqueeze(2).repeat(1, 1, G, 1, 1).flatten(1, 2)",
    "{x} = {x}.repeat(1, G, 1, 1)",
    "{x} = torch.cat([{x}] * G, 1)",
    "{x} = {x}.index_select(1, torch.arange(H) // G)",
)
_LAYOUTS = (
    (("B", "{h}", "{n}", "{d}"), ()),
    (("B", "{n}", "{h}", "{d}"), ("{x} = {x}.transpose(1, 2)",)),
    (("B", "{n}", "{h}", "{d}"), ("{x} = {x}.permute(0, 2, 1, 3)",)),
    (("B", "{n}", "{h}", "{d}"), ("{x} = torch.einsum('bnhd->bhnd', {x})",)),
    (("B", "{n}", "{h}", "{d}"), ("{x} = {x}.movedim(2, 1).contiguous()",)),
    (("B", "{n}", "{h} * {d}"), ("{x} = {x}.view(B, {n}, {h}, {d}).transpose(1, 2)",)),
    (("B", "{n}", "{h} * {d}"), ("{x} = {x}.unflatten(-1, ({h}, {d})).permute(0, 2, 1, 3)",)),
    (("B", "{n}", "{h} * {d}"), ("{x} = {x}.reshape(B, {n}, {d}, {h}).permute(0, 3, 1, 2)",)),
    (("B", "{h}", "{d}", "{n}"), ("{x} = {x}.transpose(-1, -2)",)),
    (("{n}", "B", "{h} * {d}"), ("{x} = {x}.view({n}, B * {h}, {d}).transpose(0, 1).view(B, {h}, {n}, {d})",)),
    (("B", "{h}", "{n} + 3", "{d}"), ("{x} = {x}[:, :, 2:{n} + 2]",)),
    (("B", "{h}", "{n}", "2 * {d}"), ("{x} = {x}[..., ::2]",)),
    (("B", "{h}", "{n}", "2 * {d}"), ("{x} = {x}.chunk(2, -1)[1]",)),
    (("2", "B", "{h}", "{n}", "{d}"), ("{x} = {x}.unbind(0)[1]",)),
    (("1", "{h}", "{n}", "{d}"), ("{x} = {x}.expand(B, {h}, {n}, {d})",)),
    (("B", "{n}", "5"), ("{x} = F.linear({x}, {x}_weight).view(B, {n}, {h}, {d}).transpose(1, 2)",)),
)


def _operand(w: Writer, name: str, heads: str, length: str, feature: str) -> None:
    shape, lines = w.choose(_LAYOUTS)
    fill = {"x": name, "h": heads, "n": length, "d": feature}
    w.new(name, *(s.format(**fill) for s in shape))
    if "_weight" in "".join(lines):
        w.new(f"{name}_weight", f"{heads} * {feature}", "5")
    w.add(*(line.format(**fill) for line in lines))
