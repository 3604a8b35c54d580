"""What users put in the place of layers is called: adapters, quantised and pruned layers, parametrizations, hooks.

The truth is the same module with `plain_layers`: attention and MLP in plain PyTorch, which call every layer.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from support import optional
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

import overtone as ot
from overtone.nn.attention import QKV, SpectralAttention
from overtone.nn.linear import Mlp

DIM, HEADS, DEPTH = 16, 2, 2
REGIMES = ("free", "sharpen")
SIZES = {"hidden_size": DIM, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": 32}


# The truth.


def plain_project(self, x, spectrum=None):
    if self.regime == "free":
        packed = self.qkv(x)
    else:
        basis = self.own_spectrum(spectrum).basis_in.to(x.dtype)
        packed = torch.cat((self.qk(x), x @ basis), -1)
    return QKV(*packed.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4))


def plain_attend(
    self, qkv, spectrum=None, *, residual=None, attn_mask=None, is_causal=False, values_0=None, sample_scale=None,
    tokens=None, return_norms=False,
):  # fmt: skip
    query, key, value, _ = qkv
    masks = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": self.scale}
    weights = ot.reference.attention_weights(query, key, head_gain=self.head_gain, **masks)
    if self.centered:
        taken = (ot.reference.attention_weights(query, key, **masks) > 0).to(weights)
        weights = weights - taken / taken.sum(-1, keepdim=True)
    heads = weights.to(value.dtype) @ value
    if self.neutreno and values_0 is not None:
        heads = heads + self.neutreno * (values_0 - value)
    heads = heads.transpose(1, 2).flatten(2)
    if self.regime == "free":
        y = self.proj(heads)
    else:
        _, eigenvalues, basis = self.own_spectrum(spectrum)
        y = (heads * eigenvalues.to(heads.dtype)) @ basis.to(heads.dtype)
        y = y if self.bias is None else y + self.bias
    y = y if sample_scale is None else sample_scale[:, None, None] * y
    y = y if residual is None else residual + y
    return (y, ot.reference.frequency_norms(y)) if return_norms else y


@contextlib.contextmanager
def plain_layers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpectralAttention, "project", plain_project)
        patch.setattr(SpectralAttention, "attend", plain_attend)
        patch.setattr(Mlp, "forward", plain_mlp)
        yield


def plain_mlp(self, x, residual=None):
    y = self.fc2(F.gelu(self.fc1(x)))
    return y if residual is None else residual + y


# What is put in a layer's place, by name: a function of (owner, attribute, calls), where `calls` counts.


class Counted(nn.Module):
    """A wrapper as users write them: counts, and answers otherwise."""

    def __init__(self, layer, calls):
        super().__init__()
        self.layer, self.calls = layer, calls

    def forward(self, *args):
        self.calls["wrapper"] += 1
        return changed(self.layer(*args))


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Halved(nn.Module):
    def forward(self, weight):
        return 0.5 * weight


def changed(output):
    """Another output of a layer, or of a spectrum."""
    if isinstance(output, torch.Tensor):
        return 1.25 * output + 0.125
    return output._replace(eigenvalues=0.5 * output.eigenvalues)


def layer_of(owner, attribute):
    return getattr(owner, attribute)


def with_forward_hook(owner, attribute, calls):
    def hook(module, args, output):
        calls["hook"] += 1
        return changed(output)

    layer_of(owner, attribute).register_forward_hook(hook)


def with_pre_hook(owner, attribute, calls):
    def hook(module, args):
        calls["hook"] += 1
        return tuple(0.75 * x for x in args)

    layer_of(owner, attribute).register_forward_pre_hook(hook)


def with_backward_hook(owner, attribute, calls):
    def hook(module, grad_inputs, grad_outputs):
        calls["backward"] += 1
        return tuple(None if g is None else 3 * g for g in grad_inputs)

    layer_of(owner, attribute).register_full_backward_hook(hook)


def with_backward_pre_hook(owner, attribute, calls):
    def hook(module, grad_outputs):
        calls["backward"] += 1
        return tuple(None if g is None else 3 * g for g in grad_outputs)

    layer_of(owner, attribute).register_full_backward_pre_hook(hook)


def with_own_forward(owner, attribute, calls):
    layer = layer_of(owner, attribute)
    forward = layer.forward

    def replaced(*args):
        calls["forward"] += 1
        return changed(forward(*args))

    layer.forward = replaced


def with_wrapper(owner, attribute, calls):
    setattr(owner, attribute, Counted(layer_of(owner, attribute), calls))


def with_subclass(owner, attribute, calls):
    layer_of(owner, attribute).__class__ = Doubling


def without_bias(owner, attribute, calls):
    layer_of(owner, attribute).bias = None


def with_low_rank(owner, attribute, calls):
    layer = layer_of(owner, attribute)
    options = {"dtype": layer.weight.dtype}
    down = nn.Linear(layer.in_features, 3, bias=False, **options)
    setattr(owner, attribute, nn.Sequential(down, nn.Linear(3, layer.out_features, **options)))


def with_lora(owner, attribute, calls, **options):
    peft = optional.peft()
    config = peft.LoraConfig(target_modules=[attribute], init_lora_weights=False, r=2, **options)
    peft.inject_adapter_in_model(config, owner)


def with_dora(owner, attribute, calls):
    with_lora(owner, attribute, calls, use_dora=True)


def with_pruning(owner, attribute, calls):
    prune.l1_unstructured(layer_of(owner, attribute), "weight", amount=0.5)


def with_old_weight_norm(owner, attribute, calls):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(layer_of(owner, attribute))
    layer_of(owner, attribute).weight_g.data.mul_(1.5)


def with_weight_norm(owner, attribute, calls):
    layer = parametrizations.weight_norm(layer_of(owner, attribute))
    layer.parametrizations.weight.original0.data.mul_(1.5)


def with_spectral_norm(owner, attribute, calls):
    parametrizations.spectral_norm(layer_of(owner, attribute))


def with_orthogonal(owner, attribute, calls):
    parametrizations.orthogonal(layer_of(owner, attribute), use_trivialization=False)


def with_parametrization(owner, attribute, calls):
    parametrize.register_parametrization(layer_of(owner, attribute), "weight", Halved())


def with_bias_parametrization(owner, attribute, calls):
    parametrize.register_parametrization(layer_of(owner, attribute), "bias", Halved())


QUANTISED = {"dynamic_int8", "torchao_weight_only", "torchao_dynamic"}  # in float32, without gradients


def with_dynamic_int8(owner, attribute, calls):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(owner, {attribute}, dtype=torch.qint8, inplace=True)


def with_torchao(owner, attribute, calls, config):
    quantization = optional.torchao().quantization
    layer = layer_of(owner, attribute)
    quantization.quantize_(owner, getattr(quantization, config)(), filter_fn=lambda module, _: module is layer)


def with_torchao_weight_only(owner, attribute, calls):
    with_torchao(owner, attribute, calls, "Int8WeightOnlyConfig")


def with_torchao_dynamic(owner, attribute, calls):
    with_torchao(owner, attribute, calls, "Int8DynamicActivationInt8WeightConfig")


KINDS = {
    name.removeprefix("with_"): function
    for name, function in list(globals().items())
    if name.startswith(("with_", "without_")) and name != "with_torchao"
}

# A spectrum is a module without arguments or a `weight`.
FOR_SPECTRA = {"forward_hook", "backward_hook", "own_forward", "wrapper"}
#: Kinds that leave the output what it was: they see it, or change gradients.
KEEP_OUTPUTS = {"backward_hook", "backward_pre_hook", "spectral_norm"}


def places(regime):
    return ("qkv", "proj") if regime == "free" else ("qk", "spectrum")


def built_attention(regime, dtype, *, proj_bias=True, **options):
    torch.manual_seed(1)
    module = SpectralAttention(DIM, HEADS, regime, proj_bias=proj_bias, dtype=dtype, **options)
    for parameter in module.parameters():
        if parameter.dim() == 1 and parameter.min() == 0:
            nn.init.normal_(parameter, 0.1, 0.1)
    return module


def tokens(dtype=torch.float64, batch=2, count=5):
    return torch.randn(batch, count, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def flat(output):
    """The tensors of an output: y, or (y, norms)."""
    return [output] if isinstance(output, torch.Tensor) else [part for each in output for part in flat(each)]


def outcome(module, call, inputs):
    """Output, and the gradients of everything that has one, by name."""
    inputs = inputs.clone().requires_grad_()
    parts = flat(call(module, inputs))
    sum(part.square().sum() for part in parts).backward()
    named = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return parts, {"x": inputs.grad, **named}


def check_called(build, put, kind, call, inputs):
    """`put(module, calls)` is done to two builds; one runs as it is, the other with plain layers."""
    results = []
    for plain in (False, True):
        module, calls = build(), Counter()
        put(module, calls)
        with plain_layers() if plain else contextlib.nullcontext():
            if kind in QUANTISED:
                with torch.no_grad():
                    results.append(([call(module, inputs)], {}))
            else:
                results.append(outcome(module, call, inputs))
        assert all(count == 1 for count in calls.values()), calls
    (ours, gradients), (wanted, wanted_gradients) = results
    torch.testing.assert_close(ours, wanted)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, msg=lambda m, name=name: f"{name}: {m}")
    if kind not in KEEP_OUTPUTS:
        with torch.no_grad():
            untouched = call(build(), inputs)
        assert not torch.allclose(flat(untouched)[0], ours[0], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_attention_calls_what_is_in_a_layers_place(kind, regime):
    dtype = torch.float32 if kind in QUANTISED else torch.float64
    for place in places(regime):
        if place == "spectrum" and kind not in FOR_SPECTRA:
            continue
        check_called(
            lambda: built_attention(regime, dtype),
            lambda module, calls, place=place: KINDS[kind](module, place, calls),
            kind, lambda module, x: module(x, residual=x), tokens(dtype),
        )  # fmt: skip


PADDING = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None, :]
VARIANTS = {
    "head_gain": {"head_gain": True},
    "centered": {"centered": True},
    "neutreno": {"neutreno": 0.6},
    "no bias": {"qkv_bias": False, "proj_bias": False},
}
CALLS = {
    "causal": {"is_causal": True},
    "padding": {"attn_mask": PADDING},
    "bias": {"attn_mask": torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5)},
    "norms": {"return_norms": True},
    "norms and residual": {"return_norms": True, "residual": tokens()},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_variant_of_attention_calls_its_layers(variant, how, regime):
    options = dict(CALLS[how])
    if variant == "neutreno":
        options["values_0"] = torch.randn(2, HEADS, 5, DIM // HEADS, dtype=torch.float64)
    for place in places(regime):
        check_called(
            lambda: built_attention(regime, torch.float64, **VARIANTS[variant]),
            lambda module, calls, place=place: with_wrapper(module, place, calls),
            "wrapper", lambda module, x: module(x, **options), tokens(),
        )  # fmt: skip


@pytest.mark.parametrize("regime", REGIMES)
class TestHowItRuns:
    """A layer that is called, in every way attention runs: as hooks that change nothing, against the fused op."""

    def pair(self, regime, **options):
        """The same attention, fused and with its layers called."""
        fused, called = (built_attention(regime, torch.float32, **options) for _ in range(2))
        for place in places(regime):
            getattr(called, place).register_forward_hook(lambda *_: None)
        return fused, called

    def test_autocast(self, regime):
        for residual in (None, tokens(torch.float32)):
            results = []
            for module in self.pair(regime):
                with torch.autocast("cpu", torch.bfloat16):
                    results.append(module(tokens(torch.float32), residual=residual))
            assert results[0].dtype == results[1].dtype
            truth = self.pair(regime)[0].double()(tokens(), residual=None if residual is None else tokens())
            errors = [(y - truth).abs().max() for y in results]
            assert errors[1] <= 2 * errors[0] + 2**-8 * truth.abs().max()

    def test_attention_dropout(self, regime):
        results = []
        for module in self.pair(regime, attn_drop=0.5):
            torch.manual_seed(0)
            results.append(module(tokens(torch.float32), return_norms=True))
        torch.testing.assert_close(results[1], results[0])

    def test_compiled(self, regime):
        for module in self.pair(regime):
            compiled = torch.compile(module, fullgraph=True, dynamic=False, backend="aot_eager")
            x = tokens(torch.float32)
            torch.testing.assert_close(compiled(x, residual=x), module(x, residual=x))

    def test_weights_as_they_act(self, regime):
        for ours, wanted in zip(*(module.value_projection() for module in self.pair(regime)), strict=True):
            torch.testing.assert_close(ours, wanted)

    def test_a_hook_on_every_module(self, regime):
        module, seen = self.pair(regime)[0], []
        parts = [getattr(module, place) for place in places(regime)]
        hook = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(part))
        try:
            module(tokens(torch.float32))
        finally:
            hook.remove()
        assert all(seen.count(part) == 1 for part in parts)

    def test_counting_flops_changes_nothing(self, regime):
        module = self.pair(regime)[0]
        wanted = module(tokens(torch.float32))
        with FlopCounterMode(display=False):
            assert torch.equal(module(tokens(torch.float32)), wanted)


# Whole models: ours, and converted ones, whose layers are called `core.…`. Inputs are images or embedded words.


def our_model(regime, dtype):
    sizes = {"image_size": 8, "patch_size": 4, "num_classes": 3, "dim": DIM, "num_heads": HEADS, "depth": DEPTH}
    config = ot.models.ViTConfig(**sizes, regime=regime, norm="post", pool="mean")
    model = ot.models.VisionTransformer(config)
    return model.to(dtype), lambda model: model.blocks[1].attn, torch.randn(2, 3, 8, 8)


def timm_model(regime, dtype):
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": DIM, "depth": DEPTH, "num_heads": HEADS, "num_classes": 3}
    model = optional.timm().create_model("vit_tiny_patch16_224", **sizes).to(dtype)
    ot.reparameterize(model, regime)
    return model, lambda model: model.blocks[1].attn.core, torch.randn(2, 3, 8, 8)


def hugging_face_model(name, find, inputs, **config):
    def build(regime, dtype):
        transformers = optional.transformers()
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**config)).to(dtype)
        ot.reparameterize(model.eval(), regime)
        return model, lambda model: find(model).core, inputs

    return build


MODELS = {
    "ours": our_model,
    "timm": timm_model,
    "ViT": hugging_face_model(
        "ViT", lambda model: model.layers[1].attention, torch.randn(2, 3, 8, 8), image_size=8, patch_size=4, **SIZES
    ),
    "BERT": hugging_face_model(
        "Bert", lambda model: model.encoder.layer[1].attention.self, torch.randn(2, 5, DIM), vocab_size=9, **SIZES
    ),
    "GPT-2": hugging_face_model(
        "GPT2", lambda model: model.h[1].attn, torch.randn(2, 5, DIM), vocab_size=9, n_embd=DIM, n_layer=DEPTH,
        n_head=HEADS, bos_token_id=0, eos_token_id=1,
    ),
}  # fmt: skip
# One kind of each way of being called; the others are known to be called by now.
IN_MODELS = [
    pytest.param(kind, marks=() if kind in ("forward_hook", "lora", "torchao_weight_only") else pytest.mark.slow)
    for kind in ("forward_hook", "lora", "torchao_weight_only", "backward_hook", "wrapper", "pruning", "dynamic_int8")
]


def run_model(model, inputs):
    """Images go in as they are, words embedded: two of their dimensions tell them apart."""
    output = model(inputs) if inputs.dim() == 4 else model(inputs_embeds=inputs)
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.mark.parametrize("kind", IN_MODELS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", MODELS)
def test_models_call_what_is_in_a_layers_place(name, regime, kind):
    dtype = torch.float32 if kind in QUANTISED else torch.float64

    def build():
        torch.manual_seed(2)
        model, find, inputs = MODELS[name](regime, dtype)
        for layer in find(model).children():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.5)  # so that what is done to it shows in the model's output
        return model, find, inputs

    find, inputs = build()[1:]
    for place in places(regime):
        if place == "spectrum" and kind not in FOR_SPECTRA:
            continue
        check_called(
            lambda: build()[0], lambda model, calls, place=place: KINDS[kind](find(model), place, calls),
            kind, run_model, inputs.to(dtype),
        )  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("lora", "dora")])
@pytest.mark.parametrize("place", ["fc1", "fc2"])
def test_the_mlp_calls_what_is_in_a_layers_place(kind, place):
    dtype = torch.float32 if kind in QUANTISED else torch.float64

    def build():
        torch.manual_seed(2)
        return Mlp(DIM, 32, dtype=dtype)

    put = KINDS[kind]
    check_called(build, lambda module, calls: put(module, place, calls), kind, lambda m, x: m(x), tokens(dtype))


@pytest.mark.parametrize("name", ["ours", "timm"])
@pytest.mark.parametrize("regime", REGIMES)
class TestPeft:
    """The library as it is used: on whole models."""

    def wrapped(self, name, regime, **options):
        torch.manual_seed(2)
        peft = optional.peft()
        model, find, inputs = MODELS[name](regime, torch.float64)
        targets = {"free": ["qkv", "proj"], "sharpen": ["qk"]}[regime]
        # The patch embedding has a `proj` too.
        pattern = rf"(.*\.(attn|core)\.({'|'.join(targets)})|.*\.fc[12]|head)"
        options = {"r": 2, "init_lora_weights": False, "target_modules": pattern, **options}
        return peft.get_peft_model(model, peft.LoraConfig(**options)).double(), find, inputs.double()

    def test_training_reaches_every_adapter_and_nothing_else(self, name, regime):
        model, _, inputs = self.wrapped(name, regime)
        before = {name: p.clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(inputs).square().sum().backward()
        optimizer.step()
        for name_, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name_]) != ("lora_" in name_), name_

    def test_merged(self, name, regime):
        model, find, inputs = self.wrapped(name, regime)
        wanted = model.eval()(inputs)
        merged = model.merge_and_unload()
        assert all(type(part) is nn.Linear for part in find(merged).children() if hasattr(part, "weight"))
        torch.testing.assert_close(merged(inputs), wanted)

    def test_saved_and_loaded(self, name, regime, tmp_path):
        peft = optional.peft()
        model, _, inputs = self.wrapped(name, regime)
        model.save_pretrained(tmp_path)
        torch.manual_seed(2)
        again = peft.PeftModel.from_pretrained(MODELS[name](regime, torch.float64)[0], tmp_path).double()
        torch.testing.assert_close(again.eval()(inputs), model.eval()(inputs))

    def test_modules_to_save(self, name, regime):
        if regime == "free":
            return
        model, find, inputs = self.wrapped(name, regime, target_modules=["qk"], modules_to_save=["spectrum"])
        saved = find(model.base_model.model).spectrum.modules_to_save["default"]
        before = model(inputs)
        with torch.no_grad():
            saved.raw_eigenvalues.mul_(2)
        assert not torch.allclose(model(inputs), before)
        model(inputs).sum().backward()
        assert saved.basis.grad is not None and saved.raw_eigenvalues.grad is not None
