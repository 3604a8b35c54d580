"""Conversion and its way back lose nothing: a model is converted with its function, or refused and left untouched."""

from __future__ import annotations

import functools
import warnings
from collections import Counter

import pytest
import torch
from integrations.test_reparameterize import MODELS, assert_same_state, images, outputs, snapshot, timm_vit, words
from integrations.test_replaced_layers import FOR_SPECTRA, KINDS, QUANTISED
from support import optional
from torch import nn
from torch.utils.checkpoint import checkpoint

import overtone as ot

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
# timm's architectures by model: what makes them cheap, or None for those that are only built on meta.
TIMM = {
    "vit_tiny_patch16_224": SMALL,
    "vit_small_patch14_reg4_dinov2": SMALL,  # registers, layer scale
    "vit_medium_patch16_gap_256": SMALL,
    "deit3_small_patch16_224": SMALL,
    "flexivit_small": SMALL,
    "pit_ti_224": {"img_size": 32, "patch_size": 8, "stride": 4, "base_dims": (8, 8, 8), "depth": (1, 1, 1)},
    "mobilevit_xxs": {"img_size": 64},
    "crossvit_tiny_240": {
        "img_size": 48,
        "patch_size": (8, 16),
        "img_scale": (1.0, 1.0),
        "embed_dim": (24, 24),
        "depth": ((1, 1, 0),),
        "num_heads": (3, 3),
    },
    "beit_base_patch16_224": None,
    "beitv2_base_patch16_224": None,
    "cait_xxs24_224": None,
    "coat_tiny": None,
    "convit_tiny": None,
    "davit_tiny": None,
    "edgenext_xx_small": None,
    "efficientformer_l1": None,
    "eva02_tiny_patch14_224": None,
    "gcvit_xxtiny": None,
    "hiera_tiny_224": None,
    "levit_128s": None,
    "maxvit_pico_rw_256": None,
    "mobilevitv2_050": None,
    "mvitv2_tiny": None,
    "nest_tiny": None,
    "pvt_v2_b0": None,
    "resnet18": None,
    "samvit_base_patch16": None,
    "swin_tiny_patch4_window7_224": None,
    "tiny_vit_5m_224": None,
    "tnt_s_patch16_224": None,
    "twins_svt_small": None,
    "visformer_tiny": None,
    "vit_base_patch16_rope_reg1_gap_256": None,
    "vit_relpos_small_patch16_224": None,
    "volo_d1_224": None,
    "xcit_nano_12_p16_224": None,
}
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
VISION = {**SIZES, "image_size": 16, "patch_size": 8}
TEXT = {**SIZES, "vocab_size": 50}
HUGGING_FACE = {
    "Albert": {**TEXT, "embedding_size": 24},
    "Beit": VISION,
    "Bert": TEXT,
    "Data2VecText": TEXT,
    "Data2VecVision": VISION,
    "DeiT": VISION,
    "Dinov2": VISION,
    "DistilBert": {"vocab_size": 50, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 48},
    "Electra": {**TEXT, "embedding_size": 24},
    "GPT2": {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1},
    "Llama": TEXT,
    "Roberta": TEXT,
    "T5": {"vocab_size": 50, "d_model": 24, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 3},
    "ViT": VISION,
    "ViTMAE": VISION,
}
CONVERTIBLE = {name for name, small in TIMM.items() if small is not None} | {"Bert", "DeiT", "GPT2", "ViT"}


def shape_of(model):
    """All that a conversion could change: which modules there are, their hooks, modes and parameters."""
    return [
        (name, id(part), part.training, len(part._forward_hooks), len(part._forward_pre_hooks))
        for name, part in model.named_modules()
    ] + [(name, id(each), each.requires_grad, each._version) for name, each in model.named_parameters()]


def check_refused(model, *words, convert=ot.reparameterize):
    """One line that says `words`, and nothing is touched."""
    before = shape_of(model)
    with pytest.raises((ValueError, RuntimeError, TypeError)) as refused:
        convert(model)
    message = str(refused.value)
    assert all(word in message for word in words), message
    check_message(message)
    assert shape_of(model) == before


def check_message(message):
    assert "\n" not in message and "tensor(" not in message and "array(" not in message and len(message) < 700


def check_function_is_kept(model, run):
    """In float64, with every one-dimensional weight at the size of one: layer scales start at 1e-5."""
    model.double().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.3)
    state, before = snapshot(model), run(model)
    handle = ot.reparameterize(model, "free")
    torch.testing.assert_close(run(model), before, rtol=1e-10, atol=1e-11)
    handle.restore()
    assert_same_state(model, state)
    assert torch.equal(run(model), before)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "mobilevit_xxs" else ()) for name in TIMM]
)
def test_timms_architectures(name):
    timm, small = optional.timm(), TIMM[name]
    if small is None:
        with torch.device("meta"):
            model = timm.create_model(name)
        check_refused(model, "reparameterize: model: got ", "without a known self-attention", "wanted a timm ViT")
        return
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **small)
    size = small["img_size"]
    check_function_is_kept(model, lambda model: model(torch.ones(1, 3, size, size).double().cumsum(-1).sin()))


@torch.no_grad()
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_faces_architectures(name):
    transformers = optional.transformers()
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**HUGGING_FACE[name]))
    if name not in CONVERTIBLE:
        check_refused(model, f"got {name}Model without a known self-attention", "transformers.models.", "Attention")
        return
    inputs = {"pixel_values": images().double()} if "image_size" in HUGGING_FACE[name] else {"input_ids": words()}
    check_function_is_kept(model, lambda model: model(**inputs)[0])


@pytest.mark.slow
@torch.no_grad()
def test_every_module_of_timm_is_converted_or_refused():
    """One model of each, on meta, where values are not: refused, or with every layer that is found converted."""
    timm = optional.timm()
    for module in timm.list_modules():
        name = timm.list_models(module=module)[0]
        try:
            with torch.device("meta"):
                model = timm.create_model(name)
        except RuntimeError:  # some read values while they are built
            continue
        try:
            ot.reparameterize(model, "free")
        except ValueError as refused:
            assert str(refused).startswith("reparameterize: "), name
            check_message(str(refused))


OBSTACLES = {
    "qk_norm": "normalizes its queries, keys or heads",
    "scale_attn_norm": "normalizes its queries, keys or heads",
}


@pytest.mark.parametrize("option", OBSTACLES)
def test_what_an_attention_has_that_ours_has_not(option):
    check_refused(timm_vit(**{option: True})[0], "blocks.0.attn", OBSTACLES[option], "timm.layers.attention.Attention")


def test_a_class_is_known_by_its_full_name():
    model = timm_vit()[0]
    for block in model.blocks:
        theirs = type(block.attn)
        block.attn.__class__ = type("Attention", (theirs,), {"__module__": "timm.models.other"})
    check_refused(model, "blocks.0.attn is a timm.models.other.Attention, whose formula is unknown")


def test_parts_and_parameters_that_ours_has_not():
    for change in (
        lambda attention: attention.register_parameter("bias_table", nn.Parameter(torch.zeros(3))),
        lambda attention: setattr(attention, "gate", nn.Linear(24, 24)),
        lambda attention: attention.add_module("temperature", nn.Linear(2, 2)),
    ):
        model = timm_vit()[0]
        change(model.blocks[1].attn)
        check_refused(model, "blocks.1.attn has a ", "which SpectralAttention does not support")


def test_one_module_in_two_places():
    model = timm_vit()[0]
    model.blocks[2].attn = model.blocks[0].attn
    check_refused(model, "blocks.0.attn and blocks.2.attn are one module")


# What is in a layer, or on it, before the conversion: on every linear layer of an attention, of every family.
LAYERS = {
    "timm ViT": (lambda model: model.blocks[1].attn, ("qkv", "proj")),
    "ViT": (lambda model: model.vit.layers[1].attention, ("q_proj", "k_proj", "v_proj", "o_proj")),
    "BERT": (
        lambda model: model.bert.encoder.layer[1].attention,
        ("self.query", "self.key", "self.value", "output.dense"),
    ),
    "GPT-2": (lambda model: model.transformer.h[1].attn, ("c_attn", "c_proj")),
}

CASES = [("timm ViT", kind) for kind in KINDS if kind != "without_bias"]
CASES += [("BERT", kind) for kind in ("forward_hook", "wrapper", "lora", "torchao_weight_only")]
CASES += [("GPT-2", kind) for kind in ("forward_hook", "wrapper", "lora", "parametrization")]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_what_users_put_into_a_layer_is_not_dropped(family, kind):
    find, names = LAYERS[family]
    for name in names:
        model = MODELS[family]()[0]
        owner, _, attribute = name.rpartition(".")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            KINDS[kind](find(model).get_submodule(owner), attribute, Counter())
        check_refused(model, "reparameterize: ", "which conversion would drop", "Attention)")
        ot.reparameterize(model, "free", layers=[0])  # the others can be converted


@pytest.mark.parametrize("family", LAYERS)
def test_hooks_on_the_attention_itself_are_not_dropped(family):
    model = MODELS[family]()[0]
    attention = LAYERS[family][0](model)
    getattr(attention, "self", attention).register_forward_hook(lambda *_: None)
    check_refused(model, " has hooks, which conversion would drop: remove them first")


def test_a_model_in_peft_is_refused_and_converts_when_merged():
    peft = optional.peft()
    model, inputs = timm_vit()
    model.eval()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv", "proj"], init_lora_weights=False))
    check_refused(wrapped, "has a peft.tuners.lora.layer.Linear in qkv", "merge it into an ordinary layer first")
    before = outputs(wrapped, inputs)
    merged = wrapped.merge_and_unload()
    ot.reparameterize(merged, "free")
    torch.testing.assert_close(outputs(merged, inputs), before)


class Converted:
    """A model of a family with two of its layers converted, and its inputs, in float64."""

    def __init__(self, family, regime, **options):
        torch.manual_seed(0)
        self.model, inputs = MODELS[family]()
        self.inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        self.model.double().eval()
        self.attention = LAYERS[family][0](self.model)
        self.names = [f"{name}.weight" for name in LAYERS[family][1]]
        self.before = snapshot(self.attention)
        self.handle = ot.reparameterize(self.model, regime, layers=[0, 1], **options)

    def linears(self):
        """The weights of a converted layer, now and before."""
        now = self.attention.state_dict()
        return [now[name] for name in self.names], [self.before[name] for name in self.names]

    def outputs(self):
        floating = next(self.model.parameters()).dtype
        inputs = {name: x.to(floating) if x.is_floating_point() else x for name, x in self.inputs.items()}
        return outputs(self.model, inputs)

    def step(self):
        optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.05)
        self.outputs().square().mean().backward()
        optimizer.step()
        self.model.zero_grad()


@pytest.mark.parametrize("weights", ["original", "trained"])
@pytest.mark.parametrize("regime", ["free", "sharpen"])
@pytest.mark.parametrize("family", ["timm ViT", "BERT", "GPT-2"])
class TestRestoringKeepsWhatIsTrueNow:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_dtype(self, family, regime, weights, dtype):
        converted = Converted(family, regime)
        converted.step()
        truth = converted.outputs()
        converted.model.to(dtype)
        rounding = (converted.outputs() - truth).abs().max()
        converted.handle.restore(weights)
        assert {p.dtype for p in converted.model.parameters()} == {dtype}
        found = converted.outputs()
        if weights == "original":
            assert all(torch.equal(now, then.to(dtype)) for now, then in zip(*converted.linears(), strict=True))
        elif dtype == torch.float64:
            torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-13)
        else:
            assert (found - truth).abs().max() <= 2 * rounding + torch.finfo(dtype).eps * truth.abs().max()

    def test_device_mode_and_what_is_frozen(self, family, regime, weights):
        for now in (True, False):
            converted = Converted(family, regime)
            converted.model.train(now).requires_grad_(now).to("meta")
            converted.handle.restore(weights)
            assert {part.training for part in converted.model.modules()} == {now}
            assert {(p.requires_grad, p.device.type) for p in converted.model.parameters()} == {(now, "meta")}


@pytest.mark.parametrize("regime", ["free", "sharpen"])
class TestRestoringDropsNothing:
    """What users put into a converted layer has no place in the originals: it is named, and nothing is touched."""

    def check(self, converted, *words):
        for weights in ("original", "trained"):
            check_refused(
                converted.model, "restore: ", *words, convert=lambda _, w=weights: converted.handle.restore(w)
            )

    @pytest.mark.parametrize(
        "kind", ["forward_hook", "own_forward", "wrapper", "lora", "parametrization", "torchao_dynamic"]
    )
    def test_in_a_layer(self, regime, kind):
        for place in ("qkv", "proj") if regime == "free" else ("qk", "spectrum"):
            if place == "spectrum" and kind not in FOR_SPECTRA:
                continue
            converted = Converted("timm ViT", regime)
            if kind in QUANTISED:
                converted.model.float()
            KINDS[kind](converted.handle.attentions[1], place, Counter())
            self.check(converted, "blocks.1.attn", f"core.{place}", "merge or remove it first")

    def test_around_the_attention(self, regime):
        converted = Converted("timm ViT", regime)
        converted.model.blocks[1].attn = nn.Sequential(converted.model.blocks[1].attn)
        self.check(converted, "blocks.1.attn is a torch.nn.modules.container.Sequential now")

    def test_hooks_on_the_attention(self, regime):
        converted = Converted("timm ViT", regime)
        hook = converted.model.blocks[1].attn.register_forward_hook(lambda *_: None)
        self.check(converted, "blocks.1.attn has hooks")
        hook.remove()
        converted.handle.restore()


def test_a_bias_that_the_original_has_not_is_refused_before_anything_is_touched():
    model, inputs = timm_vit(proj_bias=False)
    handle = ot.reparameterize(model, "sharpen")
    handle.attentions[2].bias.data.add_(1)
    check_refused(model, "blocks.2.attn has no bias", convert=lambda _: handle.restore("trained"))
    handle.restore()
    outputs(model, inputs)


@pytest.mark.parametrize("regime", ["free", "sharpen"])
@pytest.mark.parametrize("family", LAYERS)
def test_what_is_frozen_stays_frozen_in_conversion_and_back(family, regime):
    for part in LAYERS[family][1]:
        model = MODELS[family]()[0]
        LAYERS[family][0](model).get_submodule(part).requires_grad_(False)
        frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
        handle = ot.reparameterize(model, "free", layers=[0])
        handle.restore()
        assert {name for name, each in model.named_parameters() if not each.requires_grad} == frozen
    model = MODELS[family]()[0].requires_grad_(False)
    handle = ot.reparameterize(model, regime)
    assert not any(each.requires_grad for each in model.parameters())
    handle.attentions[0].requires_grad_(True)
    handle.restore("trained")
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert len(trained) in (4, 8) and len({name.split(".")[-3] for name in trained}) <= 2


def checkpointed_by_wrapper(model, blocks, use_reentrant):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    kind = wrappers.CheckpointImpl.REENTRANT if use_reentrant else wrappers.CheckpointImpl.NO_REENTRANT
    for index, block in enumerate(blocks):
        blocks[index] = wrappers.checkpoint_wrapper(block, checkpoint_impl=kind)


def checkpointed_by_hand(model, blocks, use_reentrant):
    def recomputed(forward, *args, **kwargs):
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=use_reentrant)

    for block in blocks:
        block.forward = functools.partial(recomputed, block.forward)


def checkpointed_by_the_library(model, blocks, use_reentrant):
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})


BLOCKS = {
    "timm ViT": lambda model: model.blocks,
    "ViT": lambda model: model.vit.layers,
    "BERT": lambda model: model.bert.encoder.layer,
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("way", [checkpointed_by_wrapper, checkpointed_by_hand, checkpointed_by_the_library])
@pytest.mark.parametrize("family", [pytest.param("ViT", marks=pytest.mark.slow), "timm ViT", "BERT"])
def test_checkpointed_blocks_have_the_same_gradients(family, way, use_reentrant):
    grads = []
    for recomputed in (False, True):
        converted = Converted(family, "sharpen")
        model = converted.model.train()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            if isinstance(part, ot.nn.SpectralAttention):
                part.attn_drop = 0.0
        if recomputed:
            way(model, BLOCKS[family](model), use_reentrant)
        converted.outputs().square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("regime", ["free", "sharpen"])
def test_a_handle_says_what_it_converted(regime):
    handle = ot.reparameterize(timm_vit()[0], regime, layers=[1, 2], bounded=True)
    assert "2 of 3 attention layers of VisionTransformer" in repr(handle) and repr(regime) in repr(handle)
    assert ("kind='symmetric', bounded=True" in repr(handle)) == (regime == "sharpen")
    handle.restore()
    assert repr(handle).endswith("restored>") and len(repr(handle)) < 150


ARRAYS = {
    "tensor": lambda: torch.randn(50, 60),
    "vector": lambda: torch.randn(3),
    "list": lambda: torch.randn(2000).tolist(),
    "array": lambda: torch.randn(50, 60).numpy(),
    "nested": lambda: [torch.randn(50, 60)],
    "parameter": lambda: nn.Parameter(torch.randn(50, 60)),
}


@pytest.mark.parametrize("array", ARRAYS)
def test_no_error_prints_an_array(array):
    """Arrays in the place of every argument: whatever is refused is refused in a line."""
    model, handle = timm_vit()[0], ot.reparameterize(timm_vit()[0], "free")
    attention, value = ot.nn.SpectralAttention(12, 3), ARRAYS[array]()
    x = torch.randn(2, 5, 12)
    calls = [functools.partial(ot.reparameterize, value), functools.partial(handle.restore, value)]
    for name in ("regime", "kind", "layers", "bounded", "start"):
        calls.append(functools.partial(ot.reparameterize, model, **{name: value}))
    for name in ("dim", "num_heads", "regime", "kind", "bounded"):
        calls.append(functools.partial(ot.nn.SpectralAttention, **{"dim": 12, "num_heads": 3, name: value}))
    for name in ("residual", "attn_mask", "is_causal", "spectrum"):
        calls.append(functools.partial(attention, x, **{name: value}))
    for name in ("eigenvalues", "basis"):
        given = {"basis": torch.eye(12), "eigenvalues": torch.full((12,), -1.0), name: value}
        calls.append(functools.partial(attention.spectrum.set_spectrum, **given))
    calls.append(functools.partial(attention.spectrum.set_spectrum, torch.eye(12), torch.full((12,), 1.0)))
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - of any kind, ours or Python's
            check_message(str(error))
