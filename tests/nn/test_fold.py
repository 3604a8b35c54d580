"""ot.spectrum.fold: the same function from ordinary weights, without an op of ours, through the exporters of others."""

from __future__ import annotations

import copy
import io
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from support import accuracy, optional
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import overtone as ot
from overtone.models import HEAD_METHODS, METHODS, VisionTransformer, ViTConfig

REGIMES = ("free", "sharpen", "smooth")
KINDS = ("symmetric", "general")
SMALL = {"image_size": 8, "patch_size": 4, "num_classes": 5, "dim": 16, "num_heads": 2, "depth": 3}


def images(batch=2, dtype=torch.float64):
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(batch), dtype=dtype)


def draw_vectors(model):
    """Biases, gains and norms that are neither zero nor one; eigenvalues stay."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "eigenvalues" not in name:
            nn.init.normal_(parameter, 0.5, 0.3)
    return model


def vit(regime=REGIMES, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return draw_vectors(VisionTransformer(ViTConfig(regime=regime, **{**SMALL, **options}), dtype=dtype)).eval()


def attention(regime="sharpen", kind="symmetric", dtype=torch.float64, **options):
    torch.manual_seed(0)
    return draw_vectors(ot.nn.SpectralAttention(12, 3, regime, kind, dtype=dtype, **options)).eval()


class Namespaces(TorchDispatchMode):
    """Whose ops run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function.namespace)
        return function(*args, **kwargs or {})


def exported_namespaces(exported):
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    return {target.namespace for target in targets if isinstance(target, torch._ops.OpOverload)}


def assert_close(actual, wanted):
    """To float64's rounding, summed over what an output is made of."""
    torch.testing.assert_close(actual, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("method", METHODS | HEAD_METHODS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_function_is_the_same_and_no_op_of_ours_is_left(method, kind, norm):
    model = vit(method=method, kind=kind, norm=norm, norm_sign=-1, pool="mean" if norm == "post" else "token")
    state = copy.deepcopy(model.state_dict())
    wanted = model(images(), return_norms=True)
    folded = ot.spectrum.fold(model)
    with Namespaces() as ops:
        found = folded(images(), return_norms=True)
        found[0].sum().backward()
    assert_close(found, wanted)
    assert ops.seen == {"aten"}
    assert not any(isinstance(part, ot.spectrum.SpectrumModule) for part in folded.modules())
    # The model itself is as it was.
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    assert torch.equal(model(images()), wanted[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_language_models(method, kind):
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "context_length": 12, "dim": 16, "num_heads": 2, "depth": 3}
    model = draw_vectors(ot.models.gpt(**sizes, regime=REGIMES, kind=kind, method=method, dtype=torch.float64)).eval()
    tokens = torch.arange(24).view(2, 12) % 11
    folded = ot.spectrum.fold(model)
    with Namespaces() as ops:
        found = folded(tokens, return_norms=True)
        written = folded.generate(tokens[:, :3], 9, temperature=0)
    assert_close(found, model(tokens, return_norms=True))
    assert torch.equal(written, model.generate(tokens[:, :3], 9, temperature=0))
    assert ops.seen == {"aten"}
    exported = torch.export.export(folded, (tokens,))
    assert exported_namespaces(exported) == {"aten"}
    assert_close(exported.module()(tokens), found[0])


def some_masks():
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(2, 3, 5, 5, generator=generator) < 0.6
    keep[0, 1, 2] = False  # a row in which no key takes part is zero
    bias = torch.randn(2, 1, 5, 5, generator=generator, dtype=torch.float64)
    masks = {"none": None, "bool": keep, "float": bias.masked_fill(~keep, -math.inf)}
    return [
        pytest.param({"attn_mask": mask, "is_causal": causal}, id=f"{name}-{causal}")
        for (name, mask), causal in itertools.product(masks.items(), (False, True))
    ]


@pytest.mark.parametrize("masks", some_masks())
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_gain": True},
        {"centered": True},
        {"head_gain": True, "centered": True},
        {"neutreno": 0.6},
        {"scale": 0.2, "proj_bias": True, "qkv_bias": False},
    ],
    ids=str,
)
def test_attention_with_masks(masks, regime, options):
    module = attention(regime, **options)
    x, residual, first = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 5, 12), (2, 5, 12), (2, 3, 5, 4)))
    given = {**masks, "residual": residual, "values_0": first if "neutreno" in options else None}
    assert_close(ot.spectrum.fold(module)(x, **given), module(x, **given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(kind, regime, dtype):
    """Folding rounds λU once more: within twice the error of the formula written out at that precision."""
    errors = {"plain": 0.0, "folded": 0.0}
    for seed in range(3):
        module = attention(regime, kind, dtype)
        x = torch.randn(4, 9, 12, generator=torch.Generator().manual_seed(seed)).to(dtype)
        truth = copy.deepcopy(module).double()(x.double())
        folded = ot.spectrum.fold(module)
        assert {p.dtype for p in folded.parameters()} == {dtype}
        for name, y in (("plain", written_out(module, x)), ("folded", folded(x))):
            assert y.dtype == dtype
            errors[name] = max(errors[name], accuracy.max_error(y, truth))
    accuracy.assert_error_within(
        folded(x), truth, errors["plain"], factor=accuracy.FORWARD_FACTOR, what=f"folded {regime}"
    )


def written_out(module, x):
    """The layer in the tokens' own precision."""
    basis_in, eigenvalues, basis_out = (part.to(x.dtype) for part in module.evaluate())
    packed = module.qkv if module.regime == "free" else module.qk
    query, key = F.linear(x, packed.weight[:24], packed.bias[:24]).chunk(2, -1)
    value = x @ basis_in + (packed.bias[24:] if module.regime == "free" else 0)
    query, key, value = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in (query, key, value))
    heads = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    bias = module.proj.bias if module.regime == "free" else module.bias
    y = (heads * eigenvalues) @ basis_out
    return y if bias is None else y + bias


def converted_timm():
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = optional.timm().create_model("vit_tiny_patch16_224", **sizes)
    return model, (torch.randn(3, 3, 8, 8),)


def converted_bert():
    transformers = optional.transformers()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **sizes))
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 5:] = 0
    return model, (torch.randint(2, 50, (3, 7)), mask)


CONVERTED = {"timm": converted_timm, "BERT": converted_bert}


def logits(result):
    return result if isinstance(result, torch.Tensor) else result.logits


@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("inplace", [False, True])
def test_converted_models(name, regime, inplace):
    torch.manual_seed(0)
    model, inputs = CONVERTED[name]()
    model.double().eval()
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    handle = ot.reparameterize(model, regime)
    wanted = logits(model(*inputs))
    folded = ot.spectrum.fold(model, inplace=inplace)
    assert (folded is model) == inplace
    with Namespaces() as ops:
        assert_close(logits(folded(*inputs)), wanted)
    assert ops.seen == {"aten"}
    handle.restore(weights="trained")  # the way back stays open
    assert_close(logits(model(*inputs)), wanted)


def test_a_folded_model_generates_with_a_cache_of_keys_and_values():
    transformers = optional.transformers()
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double().eval()
    ot.reparameterize(model, "sharpen")
    words, mask = torch.randint(2, 50, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    folded = ot.spectrum.fold(model)
    wanted = model.generate(words, **options)
    for use_cache in (True, False):
        with Namespaces() as ops:
            assert torch.equal(folded.generate(words, use_cache=use_cache, **options), wanted)
        assert "overtone" not in ops.seen


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return logits(self.model(*inputs))


def to_export(name):
    torch.manual_seed(0)
    if name == "ours":
        return vit(dtype=torch.float32, method="attn_scale", norm_sign=1), (images(3, torch.float32),)
    model, inputs = CONVERTED[name]()
    ot.reparameterize(model.eval(), "sharpen", "general")
    return model, inputs


@pytest.mark.parametrize("name", ["ours", *CONVERTED])
def test_export_and_trace(name):
    model, inputs = to_export(name)
    folded = Logits(ot.spectrum.fold(model)).eval()
    wanted = logits(model(*inputs))
    exported = torch.export.export(folded, inputs)
    assert exported_namespaces(exported) == {"aten"}
    traced = torch.jit.trace(folded, inputs, check_trace=False)
    for other in (exported.module(), traced):
        torch.testing.assert_close(other(*inputs), wanted)
    twice = [torch.cat((x, x.flip(0))) for x in inputs]
    torch.testing.assert_close(traced(*twice), logits(model(*twice)))  # a trace is not of one batch size
    assert "overtone::" not in str(traced.inlined_graph)


@pytest.mark.parametrize("name", ["ours", pytest.param("timm", marks=pytest.mark.slow)])
def test_onnx(name):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, (inputs,) = to_export(name)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.onnx.export(
        ot.spectrum.fold(model), (inputs,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
    )
    assert {node.domain for node in program.model.graph} == {""}
    file = io.BytesIO()
    program.save(file)
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    twice = torch.cat((inputs, -inputs))
    (found,) = session.run(None, {session.get_inputs()[0].name: twice.numpy()})
    with torch.no_grad():
        truth, plain = copy.deepcopy(model).double()(twice.double()), ot.spectrum.fold(model)(twice)
    accuracy.assert_error_within(
        torch.from_numpy(found), truth, accuracy.max_error(plain, truth), factor=accuracy.FORWARD_FACTOR, what="onnx"
    )


def test_weights_have_timms_names():
    folded = ot.spectrum.fold(vit("sharpen"))
    free = VisionTransformer(ViTConfig(**SMALL), dtype=torch.float64).eval()
    free.load_state_dict(folded.state_dict())
    assert_close(free(images()), folded(images()))


def test_mode_sharing_and_idempotence():
    layer = attention()
    frozen = attention("smooth").eval()
    model = nn.Sequential(layer, frozen, nn.Sequential(layer)).train()
    frozen.eval()
    folded = ot.spectrum.fold(model)
    assert folded[0] is folded[2][0] and folded[0] is not folded[1]
    assert [part.training for part in folded] == [True, False, True]
    again = ot.spectrum.fold(folded)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    assert torch.equal(again(x), folded(x))
    assert_close(folded(x), model(x))
    whole = ot.spectrum.fold(layer, inplace=True)
    assert_close(whole(x), layer(x))


def test_a_spectrum_outside_attention_becomes_constant():
    for kind, regime in itertools.product(KINDS, ("sharpen", "smooth")):
        spectrum = ot.spectrum.make_spectrum(kind, 6, regime)
        folded = ot.spectrum.fold(nn.ModuleList([spectrum]))[0]
        assert not list(folded.parameters())
        assert all(map(torch.equal, folded(), spectrum()))
        assert torch.equal(folded.eigenvalues(), spectrum.eigenvalues())


class Wrapper(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x) + 1


class Subclass(ot.nn.SpectralAttention):
    """With a forward of its own, perhaps."""


def test_what_cannot_be_folded_is_named():
    model = vit("sharpen")
    model.blocks[1].attn.qk = Wrapper(model.blocks[1].attn.qk)
    with pytest.raises(
        TypeError, match=r"fold: model: got [\w.]*test_fold.Wrapper as blocks.1.attn.qk, wanted an nn.Linear without"
    ):
        ot.spectrum.fold(model)
    hooked = attention()
    hooked.qk.register_forward_hook(lambda module, args, y: 2 * y)
    with pytest.raises(
        TypeError, match=r"fold: model: got torch.nn.modules.linear.Linear as qk, wanted an nn.Linear without hooks"
    ):
        ot.spectrum.fold(hooked)
    for change in (
        lambda model: model.blocks[2].attn.register_forward_hook(lambda *_: None),
        lambda model: model.blocks[2].mlp.register_forward_pre_hook(lambda *_: None),
        lambda model: setattr(model.blocks[2].attn, "__class__", Subclass),
        lambda model: setattr(model.blocks[2].mlp, "forward", lambda x: x),
    ):
        model = vit("sharpen")
        change(model)
        with pytest.raises(
            TypeError, match=r"fold: model: got [\w.]+ as blocks.2.\w+, wanted \w+ itself, without hooks"
        ):
            ot.spectrum.fold(model)
    with pytest.raises(TypeError, match="fold: model: got int, wanted an nn.Module"):
        ot.spectrum.fold(3)
    with pytest.raises(TypeError, match="fold: inplace: got int 1, wanted True or False"):
        ot.spectrum.fold(hooked, inplace=1)


def test_wrapped_layers_that_are_free_are_kept():
    """fc1, fc2, qkv and proj stay modules: what a user has put around them runs on."""
    model = vit("free")
    block = model.blocks[0]
    for parent, name in ((block.attn, "qkv"), (block.attn, "proj"), (block.mlp, "fc1"), (block.mlp, "fc2")):
        setattr(parent, name, Wrapper(getattr(parent, name)))
    assert_close(ot.spectrum.fold(model)(images()), model(images()))
