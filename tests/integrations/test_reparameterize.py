"""reparameterize: the real timm and transformers, models from configurations with random weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support import optional

import overtone as ot
from overtone.integrations.reparameterize import nearest_spectrum
from overtone.ops.basis import BasisCache
from overtone.reference.spectrum import compose

SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 48}
IMAGE = {"image_size": 16, "patch_size": 8}
WORDS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
LAYERS = 3


def images():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def words():
    return torch.randint(2, 50, (2, 7), generator=torch.Generator().manual_seed(0))


def padding(left):
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, slice(0, 2) if left else slice(5, 7)] = 0
    return mask


def timm_vit(name="vit_tiny_patch16_224", **options):
    timm = optional.timm()
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": LAYERS, "num_heads": 3, "num_classes": 5}
    return timm.create_model(name, **sizes, **options), {"x": images()}


def hugging_face(model, config, inputs, **options):
    transformers = optional.transformers()
    return getattr(transformers, model)(getattr(transformers, config)(**options)), inputs


MODELS = {
    "timm ViT": timm_vit,
    "timm DeiT": lambda: timm_vit("deit_tiny_distilled_patch16_224"),
    "ViT": lambda: hugging_face(
        "ViTForImageClassification", "ViTConfig", {"pixel_values": images()}, **SIZES, **IMAGE
    ),
    "DeiT": lambda: hugging_face(
        "DeiTForImageClassification", "DeiTConfig", {"pixel_values": images()}, **SIZES, **IMAGE
    ),
    "BERT": lambda: hugging_face(
        "BertForSequenceClassification", "BertConfig", {"input_ids": words(), "attention_mask": padding(left=False)},
        vocab_size=50, **SIZES,
    ),
    "GPT-2": lambda: hugging_face(
        "GPT2LMHeadModel", "GPT2Config", {"input_ids": words()}, n_embd=24, n_layer=LAYERS, n_head=3, **WORDS
    ),
    "GPT-2 padded": lambda: hugging_face(
        "GPT2LMHeadModel", "GPT2Config", {"input_ids": words(), "attention_mask": padding(left=True)},
        n_embd=24, n_layer=LAYERS, n_head=3, scale_attn_by_inverse_layer_idx=True, **WORDS,
    ),
}  # fmt: skip


@pytest.fixture(params=MODELS)
def built(request):
    """A model in float64, in eval mode, with biases that are not zero, and its inputs."""
    torch.manual_seed(0)
    model, inputs = MODELS[request.param]()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.1, 0.1)
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    return model.double().eval(), inputs


def outputs(model, inputs):
    result = model(**inputs)
    return result if isinstance(result, torch.Tensor) else result.logits


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(model, state):
    now = model.state_dict()
    assert list(now) == list(state)
    assert all(torch.equal(now[name], tensor) for name, tensor in state.items())


def train(model, inputs, steps=5):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    target, losses = torch.randn(outputs(model, inputs).shape).double(), []
    for _ in range(steps):
        loss = (outputs(model, inputs) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_free_keeps_the_function_and_restore_gives_every_bit_back(built):
    model, inputs = built
    before, state = outputs(model, inputs), snapshot(model)
    handle = ot.reparameterize(model, "free")
    assert len(handle.attentions) == LAYERS
    torch.testing.assert_close(outputs(model, inputs), before, rtol=1e-12, atol=1e-13)
    handle.restore()
    assert_same_state(model, state)
    assert torch.equal(outputs(model, inputs), before)


@pytest.mark.parametrize("kind", ["symmetric", "general"])
def test_a_converted_model_trains_is_saved_and_folds_back(built, kind, tmp_path):
    model, inputs = built
    empty, state = copy.deepcopy(model), snapshot(model)
    handle = ot.reparameterize(model, "sharpen", kind, layers=[0, 2], bounded=True)
    losses = train(model, inputs)
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for attention in handle.attentions for p in attention.parameters())
    guarantees = ot.spectrum.guarantees(model)
    assert len(guarantees) == 2 and all(each.holds for each in guarantees)
    trained = outputs(model, inputs)

    torch.save(model.state_dict(), tmp_path / "converted.pt")
    ot.reparameterize(empty, "sharpen", kind, layers=[0, 2], bounded=True)
    empty.load_state_dict(torch.load(tmp_path / "converted.pt", weights_only=True))
    assert torch.equal(outputs(empty, inputs), trained)
    assert torch.equal(outputs(copy.deepcopy(model), inputs), trained)
    assert torch.equal(outputs(pickle.loads(pickle.dumps(model)), inputs), trained)

    handle.restore(weights="trained")
    torch.testing.assert_close(outputs(model, inputs), trained, rtol=1e-12, atol=1e-13)
    assert list(model.state_dict()) == list(state)


def test_restore_after_training_gives_the_attention_back_bit_for_bit(built):
    model, inputs = built
    state = snapshot(model)
    handle = ot.reparameterize(model, "smooth")
    train(model, inputs, steps=1)
    handle.restore()
    attention = [name for name in state if ".attn." in name or ".attention." in name]
    now = model.state_dict()
    assert list(now) == list(state)
    norms = ("LayerNorm",)  # BERT's attention has a norm of its own, which was trained
    assert all(torch.equal(now[name], state[name]) for name in attention if not any(n in name for n in norms))
    with pytest.raises(RuntimeError, match="already restored"):
        handle.restore()


def test_one_factorisation_per_step_and_none_in_eval(built, monkeypatch):
    model, inputs = built
    shapes, store = [], BasisCache.store
    monkeypatch.setattr(
        BasisCache, "store", staticmethod(lambda *args: (shapes.append(tuple(args[2].shape)), store(*args)))
    )
    ot.reparameterize(model, "smooth")
    for _ in range(2):
        outputs(model, inputs)
    assert shapes == [(LAYERS, 24, 24)]


class TestNearest:
    def core(self, regime, **options):
        return ot.nn.SpectralAttention(12, 3, regime, dtype=torch.float64, **options)

    @pytest.mark.parametrize(("regime", "sign"), [("sharpen", -1), ("smooth", 1)])
    @pytest.mark.parametrize("bounded", [False, True])
    def test_no_other_matrix_of_the_form_is_nearer(self, regime, sign, bounded):
        w_v, w_proj = torch.randn(2, 12, 12, dtype=torch.float64)
        basis, eigenvalues = nearest_spectrum(w_v, w_proj, self.core(regime, bounded=bounded))
        size = sign * eigenvalues
        assert (size >= 1e-3).all() and (not bounded or (size <= 1).all())
        found = basis @ torch.diag(eigenvalues) @ basis.mT
        distance = (found - w_v @ w_proj).norm()
        for _ in range(200):
            other = torch.linalg.qr(basis + 0.1 * torch.rand(()) * torch.randn(12, 12)).Q
            values = (size + 0.1 * torch.randn(12)).clamp(1e-3, 1.0 if bounded else None) * sign
            assert (other @ torch.diag(values) @ other.mT - w_v @ w_proj).norm() > distance

    def test_a_weight_of_the_form_is_found_exactly_with_its_heads(self):
        core = self.core("sharpen")
        basis, eigenvalues = nearest_spectrum(*core.value_projection(), self.core("sharpen"))
        torch.testing.assert_close(basis @ torch.diag(eigenvalues) @ basis.mT, compose(core.evaluate()))
        for head in range(3):
            part = slice(4 * head, 4 * head + 4)
            ours = basis[:, part] @ torch.diag(eigenvalues[part]) @ basis[:, part].mT
            w_v, w_proj = core.value_projection()
            torch.testing.assert_close(ours, w_v[:, part] @ w_proj[part])

    def test_fresh_does_not_look_at_the_weights(self):
        model, _ = timm_vit()
        handle = ot.reparameterize(model, "sharpen", start="fresh")
        size = handle.attentions[0].spectrum.eigenvalues().abs()
        assert 0.5 * 0.02**2 * 24 <= size.min() and size.max() <= 1.5 * 0.02**2 * 24


class TestBehaviour:
    def test_generation_with_a_cache_of_keys_and_values(self):
        model, inputs = MODELS["GPT-2 padded"]()
        model.eval()
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        before = model.generate(**inputs, **options)
        handle = ot.reparameterize(model, "free")
        assert torch.equal(model.generate(**inputs, **options), before)
        handle.restore()
        ot.reparameterize(model, "sharpen")
        with_cache, without = (model.generate(**inputs, use_cache=use, **options) for use in (True, False))
        assert torch.equal(with_cache, without)

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    def test_masks_of_either_implementation(self, implementation):
        for name in ("BERT", "GPT-2 padded"):
            torch.manual_seed(0)
            model, inputs = MODELS[name]()
            model.eval().set_attn_implementation(implementation)
            before = outputs(model, inputs)
            ot.reparameterize(model, "free")
            after = outputs(model, inputs)
            if after.dim() == 3:  # padding's own outputs mean nothing: it attends to nothing, or to everything
                before, after = (y[inputs["attention_mask"].bool()] for y in (before, after))
            torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)

    def test_output_attentions_is_refused(self):
        for name in ("ViT", "BERT", "GPT-2"):
            model, inputs = MODELS[name]()
            handle = ot.reparameterize(model, "smooth")
            with pytest.raises(ValueError, match="output_attentions: got True, wanted False"):
                model(**inputs, output_attentions=True)
            handle.restore()
            model.set_attn_implementation("eager")
            assert len(model(**inputs, output_attentions=True).attentions) == LAYERS

    def test_attention_dropout_is_kept(self):
        model, inputs = MODELS["BERT"]()
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        handle = ot.reparameterize(model, "free")
        assert torch.equal(outputs(model, inputs), outputs(model, inputs))
        for attention in handle.attentions:
            attention.attn_drop = 0.5
        assert not torch.equal(outputs(model, inputs), outputs(model, inputs))
        outputs(model, inputs).sum().backward()

    @pytest.mark.parametrize("name", ["timm ViT", "BERT"])
    def test_gradient_checkpointing(self, name):
        grads = []
        for checkpointing in (False, True):
            torch.manual_seed(0)
            model, inputs = MODELS[name]()
            ot.reparameterize(model, "sharpen")
            model.train()
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
                if isinstance(module, ot.nn.SpectralAttention):
                    module.attn_drop = 0.0
            if checkpointing:
                getattr(model, "gradient_checkpointing_enable", getattr(model, "set_grad_checkpointing", None))()
            outputs(model, inputs).square().sum().backward()
            grads.append([p.grad for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)

    def test_several_conversions_of_one_model(self):
        model, inputs = timm_vit()
        state = snapshot(model)
        first = ot.reparameterize(model, "sharpen", layers=[0])
        second = ot.reparameterize(model, "smooth", layers=[1, 2])
        assert [each.regime for each in ot.spectrum.guarantees(model)] == ["sharpen", "smooth", "smooth"]
        with pytest.raises(ValueError, match="layer 1, blocks.1.attn, has been converted; restore it first"):
            ot.reparameterize(model, "free", layers=[1])
        outputs(model, inputs)
        first.restore()
        second.restore()
        assert_same_state(model, state)

    def test_what_cannot_be_converted_says_why(self):
        with pytest.raises(ValueError, match="blocks.0.attn normalises its queries, keys or heads, which the spectral"):
            ot.reparameterize(timm_vit(qk_norm=True)[0], "free")
        with pytest.raises(ValueError, match="layers: got 3, wanted 0 to 2"):
            ot.reparameterize(timm_vit()[0], "free", layers=[3])
        with pytest.raises(ValueError, match="model: got Linear without a known self-attention, wanted a timm ViT"):
            ot.reparameterize(torch.nn.Linear(3, 3))
        with pytest.raises(ValueError, match="start: got 'far', wanted 'nearest' or 'fresh'"):
            ot.reparameterize(timm_vit()[0], start="far")


class TestOurViTsAndTimms:
    @pytest.mark.parametrize("name", ["tiny", "small", "base"])
    @pytest.mark.parametrize("pool", ["token", "mean"])
    def test_parameters_have_timms_names_and_shapes(self, name, pool):
        timm = optional.timm()
        options = {"global_pool": "avg", "class_token": False} if pool == "mean" else {}
        with torch.device("meta"):
            theirs = timm.create_model(f"vit_{name}_patch16_224", **options)
            ours = getattr(ot.models, f"vit_{name}")(pool=pool)
        shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (ours, theirs)]
        assert shapes[0] == shapes[1]

    @pytest.mark.parametrize("pool", ["token", "mean"])
    def test_plain_weights_load_and_give_timms_outputs(self, pool):
        options = {"global_pool": "avg", "class_token": False} if pool == "mean" else {}
        theirs, inputs = timm_vit(**options)
        sizes = {"image_size": 16, "patch_size": 8, "num_classes": 5, "dim": 24, "num_heads": 3, "depth": LAYERS}
        ours = ot.models.VisionTransformer(ot.models.ViTConfig(**sizes, pool=pool))
        ours.load_state_dict(theirs.state_dict())
        for model in (ours, theirs):
            model.double().eval()
        torch.testing.assert_close(ours(images().double()), theirs(images().double()))
