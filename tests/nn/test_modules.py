"""The modules: SpectralAttention against the reference and its options' formulas, filters, signed LayerNorm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import overtone as ot
from overtone import reference
from overtone.reference.spectrum import compose

REGIMES = ("free", "sharpen", "smooth")
KINDS = ("symmetric", "general")
B, N, C, H = 2, 7, 12, 3


def tokens(dtype=torch.float64, seed=0):
    return torch.randn(B, N, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def attention(regime="sharpen", kind="symmetric", **options):
    module = ot.nn.SpectralAttention(C, H, regime, kind, dtype=torch.float64, **options)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, -0.9, -0.1)  # biases and gains that are not zero
    return module


def written_out(module, x, mask=None, is_causal=False):
    """The heads' outputs A_h V_h, [B, H, N, D], and A, by plain matrix products."""
    weight, bias = (module.qkv if module.regime == "free" else module.qk).weight, None
    linear = module.qkv if module.regime == "free" else module.qk
    bias = linear.bias if linear.bias is not None else weight.new_zeros(weight.shape[0])
    query, key = (x @ weight[i * C : (i + 1) * C].mT + bias[i * C : (i + 1) * C] for i in range(2))
    w_v, _ = module.value_projection()
    value = x @ w_v + (bias[2 * C :] if module.regime == "free" else 0)
    query, key, value = (t.unflatten(-1, (H, C // H)).transpose(1, 2) for t in (query, key, value))
    logits = query @ key.mT / (C // H) ** 0.5
    if is_causal:
        logits = logits.masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return logits.softmax(-1), value


def projected(module, heads):
    y = heads.transpose(1, 2).flatten(2) @ module.value_projection()[1]
    bias = module.proj.bias if module.regime == "free" else module.bias
    return y if bias is None else y + bias


PADDING = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])[:, None, None, :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("proj_bias", [None, True])
@pytest.mark.parametrize("masks", [{}, {"is_causal": True}, {"attn_mask": PADDING}], ids=["", "causal", "padding"])
def test_attention_is_the_formula(kind, regime, proj_bias, masks):
    module, x = attention(regime, kind, proj_bias=proj_bias), tokens()
    weights, value = written_out(module, x, masks.get("attn_mask"), masks.get("is_causal", False))
    wanted = projected(module, weights @ value)
    torch.testing.assert_close(module(x, **masks), wanted)
    residual = tokens(seed=1)
    y, norms = module(x, residual=residual, return_norms=True, **masks)
    torch.testing.assert_close(y, residual + wanted)
    torch.testing.assert_close(norms, reference.frequency_norms(residual + wanted))
    torch.testing.assert_close(module.attention_weights(x, **masks), weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spectrum_of_equal_eigenvalues_is_attention_times_a_number(kind):
    module, x = ot.nn.SpectralAttention(C, 1, "sharpen", kind, dtype=torch.float64), tokens()
    module.spectrum.set_spectrum(module.spectrum.basis, torch.full((C,), -0.25).double())
    torch.testing.assert_close(module(x), -0.25 * module.attention_weights(x)[:, 0] @ x)
    torch.testing.assert_close(compose(module.evaluate()), -0.25 * torch.eye(C, dtype=torch.float64))


@pytest.mark.parametrize("masks", [{}, {"is_causal": True}, {"attn_mask": PADDING}], ids=["", "causal", "padding"])
@pytest.mark.parametrize("regime", REGIMES)
class TestOptions:
    def uniform(self, weights):
        part = (weights > 0).double()
        return part / part.sum(-1, keepdim=True)

    def parts(self, module, x, masks):
        return written_out(module, x, masks.get("attn_mask"), masks.get("is_causal", False))

    def test_head_gain_is_attn_scale(self, regime, masks):
        module, x = attention(regime, head_gain=True), tokens()
        weights, value = self.parts(module, x, masks)
        gain = module.head_gain[:, None, None]
        wanted = (1 + gain) * (weights @ value) - gain * (self.uniform(weights) @ value)
        torch.testing.assert_close(module(x, **masks), projected(module, wanted))

    def test_centred(self, regime, masks):
        module, x = attention(regime, centered=True), tokens()
        weights, value = self.parts(module, x, masks)
        wanted = weights @ value - self.uniform(weights) @ value
        torch.testing.assert_close(module(x, **masks), projected(module, wanted))

    def test_neutreno(self, regime, masks):
        module, x, first = attention(regime, neutreno=0.6), tokens(), torch.randn(B, H, N, C // H).double()
        weights, value = self.parts(module, x, masks)
        wanted = weights @ value + 0.6 * (first - value)
        torch.testing.assert_close(module(x, values_0=first, **masks), projected(module, wanted))
        torch.testing.assert_close(module(x, **masks), projected(module, weights @ value))


@pytest.mark.parametrize("regime", REGIMES)
def test_gradients_reach_every_parameter(regime):
    module = attention(regime, head_gain=True, proj_bias=True)
    y, norms = module(tokens(), residual=tokens(seed=1), return_norms=True)
    (y.square().sum() + norms.high.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())


def test_autocast_keeps_a_wide_residual_stream():
    module = ot.nn.SpectralAttention(C, H)
    x = tokens(torch.float32)
    residual = 1000 + tokens(torch.float32, seed=1)  # bfloat16 would round it to multiples of 4 to 8
    with torch.autocast("cpu", torch.bfloat16):
        y, norms = module(x, residual=residual, return_norms=True)
    wanted = module(x, residual=residual)
    assert y.dtype == torch.float32
    assert (y - wanted).abs().max() < 0.02 * (wanted - residual).abs().max() + 1e-4
    torch.testing.assert_close(norms, reference.frequency_norms(y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("regime", REGIMES)
def test_half_precision_modules(regime, dtype):
    wide = ot.nn.SpectralAttention(C, H, regime)
    narrow = ot.nn.SpectralAttention(C, H, regime).to(dtype)
    narrow.load_state_dict(wide.state_dict())
    x = tokens(dtype)
    y = narrow(x, residual=x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), wide(x.float(), residual=x.float()), rtol=0.02, atol=0.02)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="num_heads: got 5, wanted a divisor of dim = 12"):
        ot.nn.SpectralAttention(12, 5)
    with pytest.raises(ValueError, match="regime: got 'x', wanted 'free' or 'sharpen' or 'smooth'"):
        ot.nn.SpectralAttention(12, 3, "x")


class TestFilters:
    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": PADDING[:, 0, 0]}])
    def test_de_escalation(self, options):
        x = tokens()
        torch.testing.assert_close(ot.nn.DeEscalation(0.3)(x, **options), reference.de_escalate(x, 0.3, **options))
        assert ot.token_similarity(ot.nn.DeEscalation(1.0)(x)).max() < 1e-30

    def test_feat_scale_starts_as_the_identity_and_learns_both_gains(self):
        module, x = ot.nn.FeatScale(C, dtype=torch.float64), tokens()
        torch.testing.assert_close(module(x), x)
        torch.nn.init.normal_(module.low)
        torch.nn.init.normal_(module.high)
        mean = x.mean(1, keepdim=True)
        torch.testing.assert_close(module(x), (1 + module.low) * mean + (1 + module.high) * (x - mean))
        module(x).square().sum().backward()
        assert module.low.grad.abs().min() > 0 and module.high.grad.abs().min() > 0

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("mask", [None, PADDING[:, 0, 0], PADDING[:, 0, 0].flip(-1)])
    def test_contranorm(self, mask, is_causal):
        x = tokens().requires_grad_()
        unit = x / x.norm(dim=-1, keepdim=True)
        logits = unit @ unit.mT / 0.5
        seen = torch.ones(N, N, dtype=torch.bool).tril() if is_causal else torch.ones(N, N, dtype=torch.bool)
        valid = torch.ones(len(x), N, dtype=torch.bool) if mask is None else mask
        logits = logits.masked_fill(~(seen & valid[:, None, :]), -1e4)  # −inf would make NaN of rows that see nothing
        wanted = (1.2 * x - 0.2 * logits.softmax(-1) @ x) * valid[..., None]
        found = ot.nn.ContraNorm(0.2, temperature=0.5)(x, mask, is_causal)
        torch.testing.assert_close(found, wanted)
        grad = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(*(torch.autograd.grad(y, x, grad, retain_graph=True) for y in (found, wanted)))


class TestSignedLayerNorm:
    @pytest.mark.parametrize("sign", [1, -1])
    def test_weights_have_the_sign_whatever_is_learned(self, sign):
        module, x = ot.nn.SignedLayerNorm(C, sign, dtype=torch.float64), tokens()
        torch.nn.init.normal_(module.weight)
        wanted = F.layer_norm(x, (C,), sign * module.weight.abs(), module.bias, 1e-6)
        torch.testing.assert_close(module(x), wanted)
        assert set(module.state_dict()) == {"weight", "bias"}

    def test_wrong_sign(self):
        with pytest.raises(ValueError, match="sign: got 0, wanted 1 or -1"):
            ot.nn.SignedLayerNorm(4, 0)

    def test_negative_weights_in_front_of_attention_turn_the_spectrum_round(self):
        """With queries and keys kept, LN → −LN turns the update x + A LN(x) W round."""
        module, x = ot.nn.SpectralAttention(C, H, "smooth", qkv_bias=False, dtype=torch.float64), tokens()
        plus, minus = (ot.nn.SignedLayerNorm(C, sign, dtype=torch.float64) for sign in (1, -1))
        torch.testing.assert_close(module(minus(x)), -module(plus(x)))


class TestMlp:
    def test_it_runs_the_op(self):
        module, x = ot.nn.linear.Mlp(6, 24), torch.randn(2, 5, 6)
        plain = module.fc2(F.gelu(module.fc1(x)))
        torch.testing.assert_close(module(x), plain)
        with torch.no_grad():
            torch.testing.assert_close(module(x), plain)
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x).dtype == torch.bfloat16

    def test_a_replaced_layer_is_called(self):
        module, x = ot.nn.linear.Mlp(6, 24), torch.randn(2, 5, 6)
        module.fc1 = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 24))
        torch.testing.assert_close(module(x), module.fc2(F.gelu(module.fc1(x))))

    def test_a_hook_of_a_layer_is_called(self):
        module, x, seen = ot.nn.linear.Mlp(6, 24), torch.randn(2, 5, 6), []
        module.fc1.register_forward_hook(lambda _module, _inputs, hidden: seen.append(hidden.shape))
        module(x)
        assert seen == [(2, 5, 24)]

    def test_frozen_weights(self):
        frozen, x = ot.nn.linear.Mlp(6, 24).requires_grad_(False), torch.randn(2, 5, 6, requires_grad=True)
        frozen(x).sum().backward()
        assert x.grad is not None and frozen.fc1.weight.grad is None

    @pytest.mark.parametrize("backend", ["reference", "triton"])
    def test_a_backend_forced_for_other_ops(self, backend):
        """Triton has no linear layers: PyTorch's run."""
        module, x = ot.nn.linear.Mlp(6, 24), torch.randn(2, 5, 6)
        with ot.use_backend(backend):
            y = module(x)
        assert torch.equal(y, module.fc2(F.gelu(module.fc1(x))))
