"""Dropout of the reference: known answers of Philox, the statistics of its masks, and its gradients."""

import pytest
import torch

from fa4_inductor.analysis.facts import facts
from fa4_inductor.errors import Declined, DeclineReason, ProgramError
from fa4_inductor.kernels import philox
from fa4_inductor.kernels.reference import attention_reference
from fa4_inductor.kernels.reference_backward import backward_reference
from fa4_inductor.lowering.support import SUPPORT, Operands, Supported
from fa4_inductor.runtime.target import target_for
from fa4_inductor.spec import AttentionSpec, AuxSpec, Dropout, EmptyRow, parse_expr, parse_spec, verify
from fa4_inductor.spec.simplify import drop_unused_aux

WORDS = torch.tensor([0x1234567, 0x89ABCDEF, 5])
AUX = (AuxSpec("int64", 1),)
ONES, PI = (0xFFFFFFFF,) * 6, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


def program(p, keep="True", **rest):
    return verify(AttentionSpec(0.7, keep=parse_expr(keep), aux=AUX, dropout=Dropout(p, 0), **rest))


def mask(p=0.3, words=WORDS, shape=(2, 4, 128, 128)):
    b, h, q, kv = (torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(shape))
    return philox.kept(words, p, shape[1], b, h, q, kv)


@pytest.mark.parametrize(
    ("inputs", "rounds", "words"),
    [
        ((0,) * 6, 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (ONES, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (PI, 7, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
        ((0,) * 6, 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ONES, 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers_of_philox(inputs, rounds, words):
    values = [torch.tensor(v) for v in inputs]
    assert tuple(int(w) for w in philox.philox(tuple(values[:4]), tuple(values[4:]), rounds)) == words


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate(p):
    kept = mask(p).double()
    deviation = (p * (1 - p)) ** 0.5
    for dims in ((), (0,), (1,), (0, 1, 2), (0, 1, 3)):  # all, per head, per batch, per key, per query
        over = [d for d in range(4) if d not in dims] if len(dims) < 3 else list(dims)
        rate = kept.mean(over)
        count = kept.numel() / rate.numel()
        assert (rate - (1 - p)).abs().max() < 5 * deviation / count**0.5


def test_masks_are_independent():
    """No shift along any index, and no change of one word, gives a mask that agrees more or less than chance."""
    p, kept = 0.3, mask()
    chance, count = p * p + (1 - p) * (1 - p), kept.numel()
    others = [kept.roll(shift, dim) for dim in range(4) for shift in (1, 2, 4, 8, 16, 64) if shift < kept.shape[dim]]
    others += [mask(words=WORDS + torch.eye(3, dtype=torch.int64)[i]) for i in range(3)]
    others.append(kept.transpose(2, 3))
    for other in others:
        agreement = (kept == other).double().mean()
        assert abs(agreement - chance) < 6 * (chance * (1 - chance) / count * 2) ** 0.5


@pytest.mark.parametrize("dim", range(4))
def test_no_two_slices_share_their_mask(dim):
    """Any two batch entries, heads, queries or keys are uncorrelated."""
    slices = mask(0.5).movedim(dim, 0).flatten(1).double() * 2 - 1
    correlation = slices @ slices.T / slices.shape[1] - torch.eye(slices.shape[0], dtype=torch.float64)
    assert correlation.abs().max() < 6 / slices.shape[1] ** 0.5


def test_an_element_does_not_depend_on_the_shape():
    assert torch.equal(mask()[:, :, 5:37, 9:100], mask(shape=(2, 4, 37, 100))[:, :, 5:, 9:])


def test_v_of_identity_shows_the_mask():
    q, k = torch.randn(2, 4, 24, 8), torch.randn(2, 4, 40, 8)
    v = torch.eye(40).expand(2, 4, 40, 40)
    out, lse = attention_reference(q, k, v, [WORDS], program(0.3), need_lse=True)
    p = torch.softmax(q @ k.transpose(2, 3) * 0.7, -1)
    torch.testing.assert_close(out, p * mask(shape=(2, 4, 24, 40)) / 0.7)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.transpose(2, 3) * 0.7, -1))


@pytest.mark.parametrize("p", [0.1, 0.6, 1.0])
@pytest.mark.parametrize("empty_row", [EmptyRow.ZERO, EmptyRow.MEAN])
def test_gradients(p, empty_row):
    spec = program(p, "kv_idx < q_idx", empty_row=empty_row)
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()
    q, k, v = make(2, 4, 21, 8), make(2, 2, 19, 8), make(2, 2, 19, 6)
    out, lse = attention_reference(q, k, v, [WORDS], spec, need_lse=True, dtype=torch.float64)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0)
    loss = (out * grad_out).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * grad_lse).sum()
    want = torch.autograd.grad(loss, (q, k, v))
    saved = [t.detach() for t in (q, k, v, out, lse)]
    got = backward_reference(grad_out, grad_lse, *saved, [WORDS], spec, dtype=torch.float64)
    torch.testing.assert_close(got, list(want))
    assert p < 1.0 or not out.any()


def test_rows_of_the_mean_are_dropped_as_in_eager():
    q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 40, 8), torch.randn(1, 1, 40, 6)
    out, _ = attention_reference(q, k, v, [WORDS], program(0.3, "kv_idx < 0", empty_row=EmptyRow.MEAN))
    torch.testing.assert_close(out, mask(shape=(1, 1, 4, 40)) / (0.7 * 40) @ v)


def test_text():
    spec = program(0.1)
    assert spec.text.endswith("; dropout=0.1 by aux0")
    assert parse_spec(spec.text) == spec
    assert "dropout" not in AttentionSpec(0.7).text


def test_the_words_stay_when_unused_tensors_go():
    aux = (AuxSpec("float32", 1), AuxSpec("bool", 2), *AUX)
    spec = verify(AttentionSpec(0.7, keep=parse_expr("aux1[b, kv_idx]", aux), aux=aux, dropout=Dropout(0.1, 2)))
    less, slots = drop_unused_aux(spec)
    assert slots == (1, 2) and verify(less).dropout == Dropout(0.1, 1)


@pytest.mark.parametrize("name", ["cute", "sdpa", "flex"])
def test_nothing_but_the_reference_takes_dropout_yet(name):
    q = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16)
    target = target_for(torch.device("cpu"), None) if name == "sdpa" else target_for(torch.device("cuda"), "sm_90a")
    with_dropout, without = (
        SUPPORT[name](spec, facts(spec), Operands.of(q, q, q), target) for spec in (program(0.1), AttentionSpec(0.7))
    )
    assert isinstance(with_dropout, Declined) and with_dropout.reason is DeclineReason.DROPOUT
    assert isinstance(without, Supported)


@pytest.mark.parametrize("dropout", [Dropout(0.0, 0), Dropout(1.5, 0), Dropout(0.1, 1), Dropout(float("nan"), 0)])
def test_illegal_dropout(dropout):
    with pytest.raises(ProgramError):
        verify(AttentionSpec(0.7, aux=AUX, dropout=dropout))
