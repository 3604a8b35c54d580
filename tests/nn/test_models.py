"""Vision Transformers: shapes, options, norms, one factorisation per step, and what the spectrum's sign does."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import overtone as ot
from overtone.models import METHODS, VisionTransformer, ViTConfig

REGIMES = ("free", "sharpen", "smooth")
SMALL = {"image_size": 8, "patch_size": 4, "num_classes": 5, "dim": 16, "num_heads": 2, "depth": 3}


def small(regime="sharpen", seed=0, **options):
    torch.manual_seed(seed)
    return VisionTransformer(ViTConfig(regime=regime, **{**SMALL, **options}))


def images(batch=2, size=8, seed=0, dtype=torch.float32):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def train(model, steps=4, lr=1e-2, **forward):
    """A few steps of AdamW on random data that can be learned; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    data, labels = images(16), torch.arange(16) % 5
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(data, **forward), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("make", "width", "heads"), [("tiny", 192, 3), ("small", 384, 6), ("base", 768, 12)])
def test_the_three_sizes(make, width, heads):
    model = getattr(ot.models, f"vit_{make}")(32, 16, 10, device="meta")
    assert len(model.blocks) == 12
    assert model.head.weight.shape == (10, width) and model.blocks[0].attn.num_heads == heads


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("regime", ["free", "smooth"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_every_method_trains(method, regime, norm):
    model = small(regime, method=method, norm=norm, pool="mean" if norm == "post" else "token")
    losses = train(model, steps=6)
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("kind", ["symmetric", "general"])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_regime_per_layer(kind, bounded):
    model = small(["free", "sharpen", "smooth"], kind=kind, bounded=bounded)
    losses = train(model)
    assert losses[-1] < losses[0]
    assert [each.regime for each in ot.spectrum.guarantees(model)] == ["sharpen", "smooth"]


@pytest.mark.parametrize("regime", REGIMES)
def test_norms_are_those_of_the_stream_after_attention(regime):
    model, data = small(regime).double(), images(dtype=torch.float64)
    seen = []
    for block in model.blocks:
        block.norm2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits, norms = model(data, return_norms=True)
    torch.testing.assert_close(logits, model(data))
    wanted = [ot.reference.frequency_norms(x) for x in seen[:3]]
    torch.testing.assert_close(norms.low, torch.stack([each.low for each in wanted]))
    torch.testing.assert_close(norms.high, torch.stack([each.high for each in wanted]))
    norms.ratio.sum().backward()
    assert model.patch_embed.proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("training", [True, False])
def test_the_filter_stands_where_it_is_put(norm, training):
    """Against the block written out."""
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1))
    for place in ("block", "residual", "attention"):
        model = small("free", method="de_escalation", strength=0.7, filter_place=place, norm=norm, depth=1)
        block = model.train(training).blocks[0]
        filters = {
            name: block.filter if name == place else (lambda x: x) for name in ("block", "residual", "attention")
        }
        update = filters["attention"](block.attn(x if norm == "post" else block.norm1(x)))
        stream = x + update
        wanted = filters["residual"](stream)
        if norm == "post":
            wanted = block.norm1(wanted)
            wanted = block.norm2(wanted + block.mlp(wanted))
        else:
            wanted = wanted + block.mlp(block.norm2(wanted))
        found, norms = block(x, return_norms=True)
        torch.testing.assert_close(found, filters["block"](wanted))
        torch.testing.assert_close(block(x)[0], found)
        torch.testing.assert_close(norms, ot.frequency_norms(stream))


def test_mimetic_initialization():
    plain, mimetic = (small(["free", "free", "sharpen"], mimetic_init=beta).blocks[1].attn for beta in (None, 0.05))
    products = [attn.qkv.weight[32:].T @ attn.proj.weight.T for attn in (plain, mimetic)]
    torch.testing.assert_close(products[1], products[0] - 0.05 * torch.eye(16), rtol=0, atol=1e-6)
    value, output = mimetic.qkv.weight[32:], mimetic.proj.weight
    torch.testing.assert_close(value @ value.T, output.T @ output, rtol=0, atol=1e-6)  # each has half of it
    assert torch.equal(mimetic.qkv.weight[:32], plain.qkv.weight[:32])
    assert train(small("free", mimetic_init=0.05), steps=6)[-1] < train(small("free", mimetic_init=0.05), steps=1)[0]


def test_the_condition_limit_holds_in_training():
    for limit in (3.0, None):
        model = small("sharpen", kind="general", condition_limit=limit)
        train(model, steps=8, lr=0.1)
        worst = max(ot.spectrum.condition_numbers(model).values())
        assert (worst <= 3.0001) == (limit is not None)


def test_mean_pooling_has_no_class_token():
    model = small(pool="mean")
    assert model.cls_token is None and model.pos_embed.shape == (1, 4, 16)
    assert model(images()).shape == (2, 5)
    assert model.forward_features(images()).shape == (2, 4, 16)


def test_output_scale_is_that_of_a_plain_vit():
    """The attention's update is as large as a plain one's, so learning rates carry over."""
    sizes = {}
    for regime in REGIMES:
        torch.manual_seed(0)
        model = ot.models.vit_tiny(32, 4, 10, regime, depth=2)
        x = torch.randn(4, 65, 192)
        with torch.no_grad():
            sizes[regime] = model.blocks[0].attn(torch.nn.functional.layer_norm(x, (192,))).std().item()
    assert sizes["sharpen"] == pytest.approx(sizes["free"], rel=0.25)
    assert sizes["smooth"] == pytest.approx(sizes["free"], rel=0.25)


def test_checkpointing_changes_nothing_but_memory():
    losses = []
    for grad_checkpointing in (False, True):
        model = small(drop_path=0.3, grad_checkpointing=grad_checkpointing)
        torch.manual_seed(1)  # of the dropped samples
        losses.append(train(model))
    assert losses[0] == losses[1]


def test_stochastic_depth():
    model = small(drop_path=0.9)
    assert [block.drop_path for block in model.blocks] == pytest.approx([0, 0.45, 0.9])
    assert not torch.equal(model(images()), model(images()))
    model.eval()
    assert torch.equal(model(images()), model(images()))
    assert torch.equal(model(images()), small()(images()))


def test_norm_sign():
    model = small(norm_sign=-1)
    assert all(isinstance(block.norm1, ot.nn.SignedLayerNorm) and block.norm1.sign == -1 for block in model.blocks)


class TestOneFactorisationPerStep:
    def test_of_all_layers(self, factorisations):
        train(small(["sharpen", "free", "smooth"]), steps=3)
        assert factorisations == [(2, 16, 16)] * 3

    def test_none_in_eval_or_when_gradients_accumulate(self, factorisations):
        model = small()
        for _ in range(3):
            model(images()).sum().backward()
        with torch.no_grad():
            model.eval()(images())
        assert factorisations == [(3, 16, 16)]

    def test_mixed_kinds_are_two(self, factorisations):
        model = small()
        model.blocks[1].attn = ot.nn.SpectralAttention(16, 2, "smooth", "general")
        model(images())
        assert factorisations == [(2, 16, 16), (1, 16, 16)]


class TestCopies:
    def test_deepcopy_and_an_ema(self):
        model = small()
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        before = model(images())
        assert torch.equal(copy.deepcopy(model)(images()), before)
        train(model)
        average.update_parameters(model)
        fresh = small(seed=1)
        fresh.load_state_dict(average.module.state_dict())
        assert torch.equal(average(images()), fresh(images()))

    def test_a_saved_model_loads(self, tmp_path):
        model = small()
        train(model)
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        other = small(seed=1)
        other(images())  # its own factorisation is cached
        other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
        assert torch.equal(other(images()), model(images()))

    def test_functional_call(self):
        model, other = small(), small(seed=1)
        state = dict(other.named_parameters())
        assert torch.equal(torch.func.functional_call(model, state, (images(),)), other(images()))


@pytest.mark.parametrize("regime", ["sharpen", "smooth"])
def test_a_bounded_model_keeps_its_guarantee_in_training(regime):
    model = small(regime, bounded=True)
    train(model, steps=20, lr=0.3)  # far too large on purpose
    assert all(each.holds for each in ot.spectrum.guarantees(model))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["symmetric", "general"])
def test_fixed_attention_sharpens_or_smooths_as_the_sign_says(kind):
    """MATH §5, x ← x + A x W repeated: ‖HFC‖/‖LFC‖ goes to the limit of the dominating eigenvector, or to zero."""
    torch.manual_seed(0)
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    ratios = {}
    for regime in ("sharpen", "smooth"):
        module = ot.nn.SpectralAttention(12, 1, regime, kind, qkv_bias=False, dtype=torch.float64)
        module.spectrum.set_spectrum(
            module.spectrum.basis, module.spectrum.sign * torch.linspace(0.3, 0.9, 12).double()
        )
        scores = torch.randn(9, 9, dtype=torch.float64)
        attention = (scores + scores.mT).softmax(-1)  # fixed: the mask is all there is of the logits
        torch.nn.init.zeros_(module.qk.weight)
        y = x
        for _ in range(400):
            y = module(y, residual=y, attn_mask=attention.log()[None])
            y = y / y.norm()
        ratios[regime] = ot.frequency_norms(y).ratio.item()
        found = ot.reference.analysis.dominance(attention, ot.reference.spectrum.compose(module.evaluate()))
        assert found.counts()["other" if regime == "sharpen" else "perron"] == 1
        if regime == "sharpen":
            values, vectors = torch.linalg.eig(attention)
            lowest = vectors[:, values.real.argmin()].real
            mean = lowest.mean()
            limit = ((lowest - mean).norm() / (mean.abs() * 3)).item()
            assert ratios[regime] == pytest.approx(limit, rel=1e-6)
    assert ratios["smooth"] < 1e-10


def test_negative_norm_weights_swap_sharpening_and_smoothing():
    """Pre-norm with λ → −λ and the norm's sign → −1 is the same model."""
    plus = small("smooth", norm_sign=1, qkv_bias=False).double()
    minus = small("sharpen", norm_sign=-1, qkv_bias=False).double()
    state = plus.state_dict()
    minus.load_state_dict(state)
    x = torch.randn(2, 5, 16).double()
    for ours, theirs in zip(plus.blocks, minus.blocks, strict=True):
        torch.testing.assert_close(ours.attn(ours.norm1(x)), theirs.attn(theirs.norm1(x)))


class TestConfig:
    def test_what_it_says_of_every_layer(self):
        config = ViTConfig(**SMALL, regime=["free", "sharpen", "smooth"], drop_path=0.2)
        assert config.regimes == ("free", "sharpen", "smooth") and config.drop_rates == pytest.approx((0, 0.1, 0.2))
        assert config.replace(regime="smooth").regimes == ("smooth",) * 3
        assert config.replace(depth=1, regime="free").drop_rates == (0,)

    def test_it_is_a_value(self):
        config = ViTConfig(**SMALL, regime=["free", "sharpen", "smooth"])
        assert ViTConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
        assert len({config, config.replace()}) == 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.dim = 3

    def test_strength_is_the_methods(self):
        strengths = {method: ViTConfig(method=method).method_strength for method in METHODS}
        assert {name: strength for name, strength in strengths.items() if strength} == {
            "de_escalation": 1.0, "contranorm": 0.1, "neutreno": 0.6
        }  # fmt: skip
        assert ViTConfig(method="de_escalation", strength=0.5).method_strength == 0.5

    def test_the_old_names_of_options_work(self):
        for old, new, value in (
            ("checkpointing", "grad_checkpointing", True),
            ("position_std", "pos_embed_std", 0.3),
            ("eigenvalue_size", "init_eigenvalue", 0.4),
        ):
            with pytest.warns(DeprecationWarning, match=f"vit_tiny: {old} is deprecated, use {new}"):
                model = ot.models.vit_tiny(8, 4, 5, "sharpen", depth=1, device="meta", **{old: value})
            assert getattr(model.config, new) == value
        with pytest.warns(DeprecationWarning, match="method='centred' is deprecated, use 'centered'"):
            model = ot.models.vit_small(8, 4, 5, depth=1, device="meta", method="centred")
        assert model.layers[0].attn.centered
        with pytest.warns(DeprecationWarning, match="SpectralAttention: centred is deprecated, use centered"):
            assert ot.nn.SpectralAttention(4, 2, centred=True).centered


def test_wrong_arguments_say_what_is_wanted():
    for options, message in [
        ({"dim": 0}, "dim: got int 0, wanted an integer of at least 1"),
        ({"num_heads": 3}, "num_heads: got 3, wanted a divisor of dim = 16"),
        ({"num_classes": -1}, "num_classes: got -1, wanted 0 or more"),
        ({"regime": ["free", "sharpen", "soft"]}, "regime: got 'soft', wanted 'free' or 'sharpen' or 'smooth'"),
        ({"kind": "odd"}, "kind: got 'odd', wanted 'symmetric' or 'general'"),
        ({"init_eigenvalue": 0.0}, "init_eigenvalue: got 0.0, wanted more than 0"),
        ({"norm_sign": 2}, "norm_sign: got 2, wanted 1, -1 or None"),
        ({"drop_path": 1.5}, "drop_path: got 1.5, wanted 0 to 1"),
        ({"regime": ["free"]}, "regime: got 1 of them, wanted one, or one for each of 3 layers"),
        ({"norm": "mid"}, "norm: got 'mid', wanted 'pre' or 'post'"),
        ({"method": "magic"}, "method: got 'magic', wanted 'plain' or"),
        ({"strength": 0.5}, "strength: got 0.5, wanted None: method 'plain' has none"),
        ({"filter_place": "norm"}, "filter_place: got 'norm', wanted 'block' or"),
        ({"filter_place": "residual"}, "filter_place: got 'residual', wanted 'block': method 'plain' has no filter"),
        ({"mimetic_init": -0.1}, "mimetic_init: got -0.1, wanted 0 or more"),
        ({"condition_limit": 1.0}, "condition_limit: got 1.0, wanted more than 1, or None"),
        ({"patch_size": 3}, "patch_size: got 3, wanted a divisor of image_size = 8"),
    ]:
        with pytest.raises(ValueError, match=f"ViTConfig: {message}"):
            small(**options)
    with pytest.raises(TypeError, match="ViTConfig: bounded: got int 1, wanted True or False"):
        small(bounded=1)
    with pytest.raises(TypeError, match="VisionTransformer: config: got int 224, wanted a ViTConfig"):
        VisionTransformer(224)
    with pytest.raises(ValueError, match=r"images: got torch.float32 of shape \[2, 3, 9, 9\].*\[B, 3, 8, 8\]"):
        small()(images(size=9))


class TestCompile:
    def test_numbers_are_those_of_eager_and_the_factorisation_is_cached(self, factorisations):
        torch._dynamo.reset()
        model = small(["sharpen", "free", "smooth"], depth=3)
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        eager, (logits, norms) = model(images(), return_norms=True), compiled(images(), return_norms=True)
        torch.testing.assert_close((logits, norms), eager)
        (eager[0].sum() + eager[1].ratio.sum()).backward()
        wanted = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        (logits.sum() + norms.ratio.sum()).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], wanted, rtol=1e-4, atol=1e-5)
        assert len(factorisations) == 1
        # Changed weights are seen, also those that no version counter counts.
        model.blocks[0].attn.spectrum.basis.data.copy_(torch.eye(16).flip(0))
        torch.testing.assert_close(compiled(images(), return_norms=True), model(images(), return_norms=True))
        assert len(factorisations) == 2

    def test_general_spectra(self):
        torch._dynamo.reset()
        model = small("smooth", kind="general", depth=1, pool="mean", norm="post")
        compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
        torch.testing.assert_close(compiled(images()), model(images()))


@pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp-blocks"])
def test_two_processes_train_as_one(way):
    """With FSDP2 around every block the bases are sharded until their layer runs, which then factorises them itself."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    script = Path(__file__).with_name("ddp_vit.py")
    result = subprocess.run([sys.executable, script, way], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip().endswith("equal")
