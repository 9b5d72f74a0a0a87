"""Sites that the kernel runs get their tables and narrowed integers computed in the graph, once for all layers."""

from __future__ import annotations

import torch

from fa4_inductor.patterns import find_sites
from fa4_inductor.patterns.match import AttentionMatch
from fa4_inductor.rewrite import Splicer
from fa4_inductor.runtime.ops import ATTENTION


def bucket(distance: torch.Tensor) -> torch.Tensor:
    """Distances bucketed logarithmically, in the manner of T5."""
    n = torch.clamp(-distance, min=0)
    far = 4 + (torch.log(n.float() / 4) / 2.0 * 4).to(torch.long)
    return torch.where(n < 4, n, torch.minimum(far, torch.full_like(far, 7)))


def two_layers(q, k, v, table, documents):
    i = torch.arange(q.shape[2])
    bias = table[bucket(i[None, :] - i[:, None])].permute(2, 0, 1)[None]
    same = documents[:, None, :, None] == documents[:, None, None, :]
    for _ in range(2):
        scores = q @ k.transpose(-1, -2) + bias
        scores = torch.where(same, scores, torch.finfo(scores.dtype).min)
        q = torch.softmax(scores, -1) @ v
    return q


def spliced(function, *inputs) -> list[tuple]:
    """Arguments of the attention ops of the compiled function, whose result is compared with the function's own."""
    calls: list[tuple] = []

    def backend(gm, _):
        splicer = Splicer(gm.graph)
        for site in find_sites(gm):
            assert isinstance(site, AttentionMatch), site
            splicer.splice((site, "cute"))
        splicer.finish()
        gm.graph.lint()
        for node in gm.graph.nodes:
            if node.target is ATTENTION:
                calls.append(node.args)
                node.args = (*node.args[:6], "reference")  # there is no kernel on a CPU
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(function, backend=backend)(*inputs), function(*inputs))
    return calls


def kinds(call: tuple) -> list[tuple[str, int]]:
    """Dtype and rank of the op's aux tensors."""
    return sorted((str(a.meta["example_value"].dtype), a.meta["example_value"].dim()) for a in call[3])


def test_both_layers_read_one_table_and_one_narrowed_tensor():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 12, 8) for _ in range(3))
    table, documents = torch.randn(8, 4), torch.arange(12)[None].expand(2, -1) // 5
    calls = spliced(two_layers, q, k, v, table, documents)
    assert len(calls) == 2 and calls[0][3] == calls[1][3]
    for call in calls:
        assert kinds(call) == [("torch.float32", 4), ("torch.int32", 2)]
        assert "log" not in call[4]


def test_both_layers_read_one_mask_and_one_pair_of_its_bounds():
    """A decode step with a static cache: the valid slots are in a mask."""

    def layers(q, k, v, mask):
        for _ in range(2):
            q = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return q

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, 8) for length in (1, 12, 12))
    mask = (torch.arange(12) < torch.tensor([[5], [12]]))[:, None, None]
    calls = spliced(layers, q, k, v, mask)
    assert len(calls) == 2 and calls[0][3] == calls[1][3]
    assert kinds(calls[0]) == [("torch.bool", 2), ("torch.int32", 2)]
