"""Decoder language models: no token sees a later one, the cache changes nothing, and what a user may get wrong."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from support.accuracy import FORWARD_FACTOR, assert_error_within, max_error

import overtone as ot
from overtone.models import GPT, METHODS, GPTConfig
from overtone.models.config import FILTER_PLACES, FILTERS

pytestmark = pytest.mark.usefixtures("one_thread")

REGIMES = ("free", "sharpen", "smooth")
#: Every regime with every kind it has, and a model with one of each.
LAYERS = [("free", "symmetric"), *itertools.product(("sharpen", "smooth", REGIMES), ("symmetric", "general"))]
SMALL = {"vocab_size": 11, "context_length": 24, "dim": 16, "num_heads": 2, "depth": 3, "pos_embed_std": 1.0}


def small(regime="sharpen", dtype=None, **options):
    torch.manual_seed(0)
    return draw_vectors(GPT(GPTConfig(regime=regime, **{**SMALL, **options}), dtype=dtype))


def draw_vectors(model):
    """Biases, gains and norms that are neither zero nor one, so that every method does something."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "eigenvalues" not in name:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    return model


def text(batch=2, length=24, vocabulary=11, seed=0):
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model, steps=6, lr=1e-2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, text(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_causality(model):
    """Other tokens from some place on: the logits before it are the same bits. And no gradient goes back."""
    tokens = text()
    before = model(tokens)
    for place in (1, 13, 23):
        changed = tokens.clone()
        changed[:, place:] = (changed[:, place:] + 5) % 11
        after = model(changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place:], before[:, place:])
    embedded = []
    model.tok_embed.register_forward_hook(lambda module, args, result: embedded.append(result))
    (gradient,) = torch.autograd.grad(model(tokens)[:, :13].sum(), embedded[0])
    assert gradient[:, :13].abs().max() > 0 and not gradient[:, 13:].any()


@torch.no_grad()
def check_cache(model):
    """Chunks of several tokens and single ones, against all at once: as exact as PyTorch's own operations are."""
    tokens = text()
    truth = copy.deepcopy(model.eval()).double()(tokens)
    plain = ot.spectrum.fold(model)
    error = max_error(plain(tokens), truth)
    for each in (model, plain):
        cache = each.new_cache()
        stepped = torch.cat([each(chunk, cache=cache) for chunk in tokens.split((7, 1, 1, 5, 10), 1)], 1)
        assert cache.length == 24
        assert_error_within(stepped, truth, error, factor=FORWARD_FACTOR, what="logits with a cache")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("regime", "kind", "norm"), [*((*each, "pre") for each in LAYERS), (*LAYERS[-1], "post")])
def test_every_model(method, regime, kind, norm):
    check_causality(small(regime, kind=kind, method=method, norm=norm))
    check_cache(small(regime, kind=kind, method=method, norm=norm))


@pytest.mark.parametrize("method", FILTERS)
@pytest.mark.parametrize("place", FILTER_PLACES[1:])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_every_place_of_a_filter(method, place, norm):
    check_causality(small(REGIMES, method=method, filter_place=place, norm=norm))
    check_cache(small(REGIMES, method=method, filter_place=place, norm=norm))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_every_method_trains(method, norm):
    for regime in ("free", "smooth"):
        model = small(regime, method=method, norm=norm)
        losses = train(model)
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
    model, tokens = small(regime, dtype=torch.float64), text()
    seen = []
    for block in model.blocks:
        block.norm2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits, norms = model(tokens, return_norms=True)
    torch.testing.assert_close(logits, model(tokens))
    wanted = [ot.reference.frequency_norms(x) for x in seen[:3]]
    torch.testing.assert_close(norms.low, torch.stack([each.low for each in wanted]))
    torch.testing.assert_close(norms.high, torch.stack([each.high for each in wanted]))
    norms.ratio.sum().backward()
    assert model.tok_embed.weight.grad.abs().max() > 0


def test_one_factorisation_per_step(factorisations):
    train(small(["sharpen", "free", "smooth"]), steps=3)
    assert factorisations == [(2, 16, 16)] * 3


def test_one_factorisation_for_a_whole_text(factorisations):
    small().generate(text()[:, :3], 8)
    assert factorisations == [(3, 16, 16)]


def test_tied_embeddings():
    tied, untied = small("free"), small("free", tied=False)
    assert tied.head is None and "head.weight" not in tied.state_dict()
    assert untied.head.weight is not untied.tok_embed.weight
    tied.double(), untied.double()
    untied.load_state_dict({**tied.state_dict(), "head.weight": tied.tok_embed.weight})
    torch.testing.assert_close(untied(text()), tied(text()))


def test_checkpointing_changes_nothing_but_memory():
    losses = []
    for grad_checkpointing in (False, True):
        model = small(drop_path=0.3, grad_checkpointing=grad_checkpointing)
        torch.manual_seed(1)  # of the dropped samples
        losses.append(train(model))
    assert losses[0] == losses[1]


def test_the_state_dict_goes_round(tmp_path):
    model = small(["free", "sharpen", "smooth"])
    train(model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = GPT(model.config)
    other(text())  # its own factorisation is cached
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(other(text()), model(text()))


@pytest.mark.parametrize("method", METHODS)
def test_autocast_is_as_exact_as_that_of_plain_modules(method):
    model = small(REGIMES, method=method).eval()
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(text())
        with torch.autocast("cpu", torch.bfloat16):
            ours, plain = model(text()), ot.spectrum.fold(model)(text())
    assert_error_within(ours, truth, max_error(plain, truth), factor=FORWARD_FACTOR, what="logits")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(method, dtype):
    model = small(REGIMES, dtype=dtype, method=method)
    loss_of(model, text()).backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())
    check_causality(model)
    check_cache(model)


def test_gradients_under_autocast_are_finite():
    model = small(REGIMES)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, text())
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


class TestCompile:
    def test_numbers_are_those_of_eager(self):
        torch._dynamo.reset()
        model = small(REGIMES, method="de_escalation")
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        eager, found = model(text(), return_norms=True), compiled(text(), return_norms=True)
        torch.testing.assert_close(found, eager)
        (eager[0].square().mean() + eager[1].ratio.sum()).backward()
        wanted = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        (found[0].square().mean() + found[1].ratio.sum()).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], wanted, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("method", METHODS)
    def test_every_method_is_one_graph(self, method):
        torch._dynamo.reset()
        model = small(["free", "smooth"], method=method, depth=2, kind="general", norm="post")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(text()), model(text()))


class TestGenerate:
    def test_greedy_takes_the_likeliest_of_the_full_forward(self):
        model = small(REGIMES, dtype=torch.float64, method="de_escalation")
        written = model.generate(text()[:, :4], 20, temperature=0)
        assert written.shape == (2, 24) and written.dtype == torch.int64
        assert torch.equal(written[:, :4], text()[:, :4])
        assert torch.equal(written[:, 4:], model.eval()(written)[:, 3:-1].argmax(-1))

    def test_draws_follow_the_seed(self):
        model, prompt = small("free"), text()[:, :4]
        first = model.generate(prompt, 20, seed=3)
        assert torch.equal(model.generate(prompt, 20, seed=3), first)
        assert torch.equal(model.generate(prompt, 20, generator=torch.Generator().manual_seed(3)), first)
        assert not torch.equal(model.generate(prompt, 20, seed=4), first)
        torch.manual_seed(5)
        unseeded = model.generate(prompt, 20)
        torch.manual_seed(5)
        assert torch.equal(model.generate(prompt, 20), unseeded)

    def test_draws_have_the_models_distribution(self):
        model, prompt = small("free"), text()[:1, :4]
        drawn = model.generate(prompt.expand(20_000, -1), 1, temperature=0.7, seed=0)[:, -1]
        wanted = (model.eval()(prompt)[0, -1] / 0.7).softmax(-1)
        found = drawn.bincount(minlength=11) / len(drawn)
        assert ((found - wanted).abs() < 5 * (wanted * (1 - wanted) / len(drawn)).sqrt()).all()

    def test_top_k_leaves_out_the_rest(self):
        model, prompt = small("free"), text()[:1, :4]
        likeliest = model.eval()(prompt)[0, -1].topk(3).indices
        drawn = model.generate(prompt.expand(500, -1), 1, top_k=3, seed=0)[:, -1]
        assert set(drawn.tolist()) == set(likeliest.tolist())
        assert torch.equal(
            model.generate(prompt, 8, top_k=1, temperature=5.0), model.generate(prompt, 8, temperature=0)
        )
        model.generate(prompt, 1, top_k=99)

    def test_the_model_is_left_as_it_was(self):
        model = small("free", drop_path=0.9)
        model.blocks[1].eval()
        first = model.generate(text()[:, :4], 8, seed=0)
        assert model.training and not model.blocks[1].training and model.blocks[2].training
        assert torch.equal(model.generate(text()[:, :4], 8, seed=0), first)

    def test_bytes_and_no_samples(self):
        model = small()
        assert torch.equal(model(text().to(torch.uint8)), model(text()))
        assert model.generate(text()[:0, :4], 3).shape == (0, 7)
        assert model(text()[:, :0]).shape == (2, 0, 11)

    def test_wrong_arguments_say_what_is_wanted(self):
        model, prompt = small("free"), text()[:, :4]
        for arguments, message in [
            ((prompt, 21), "max_new_tokens: got 4 tokens of the prompt and 21 new ones.*context_length = 24 together"),
            ((prompt, 0), "max_new_tokens: got int 0, wanted an integer of at least 1"),
            ((prompt[:, :0], 3), r"prompt: got torch.int64 of shape \[2, 0\].*\[B, N\] with N ≥ 1"),
            ((prompt[0], 3), r"prompt: got torch.int64 of shape \[4\]"),
        ]:
            with pytest.raises(ValueError, match=message):
                model.generate(*arguments)
        for options, message in [
            ({"temperature": -1.0}, "temperature: got -1.0, wanted 0 or more"),
            ({"temperature": float("nan")}, "temperature: got nan, wanted 0 or more"),
            ({"top_k": 0}, "top_k: got int 0, wanted an integer of at least 1"),
            ({"seed": 1, "generator": torch.Generator()}, "generator: got both a seed and a generator"),
        ]:
            with pytest.raises(ValueError, match=f"GPT.generate: {message}"):
                model.generate(prompt, 3, **options)
        with pytest.raises(TypeError, match="prompt: got str 'once', wanted integers"):
            model.generate("once", 3)
        torch.nn.init.constant_(model.norm.bias, float("nan"))
        with pytest.raises(FloatingPointError, match="logits are not finite"):
            model.generate(prompt, 3)


def test_wrong_tokens_say_what_is_wanted():
    model = small("free")
    for tokens, message in [
        (text(length=25), r"tokens: got 25 per sequence, wanted at most 24"),
        (text().float(), r"tokens: got torch.float32 of shape \[2, 24\].*wanted integers \[B, N\] below 11"),
        (text() > 3, "tokens: got torch.bool"),
        (text()[0], r"tokens: got torch.int64 of shape \[24\]"),
        (text() + 1, "tokens: got ids from 1 to 11, wanted 0 to 10"),
        (text() - 1, "tokens: got ids from -1 to 9, wanted 0 to 10"),
    ]:
        with pytest.raises(ValueError, match=f"GPT: {message}"):
            model(tokens)
    with pytest.raises(TypeError, match="GPT: tokens: got list"):
        model([[1, 2]])
    cache = model.new_cache(8)
    model(text()[:, :5], cache=cache)
    with pytest.raises(ValueError, match="tokens: got 4 per sequence after the 5 of the cache, wanted at most 3"):
        model(text()[:, :4], cache=cache)
    with pytest.raises(ValueError, match="new_cache: capacity: got 25, wanted at most context_length = 24"):
        model.new_cache(25)
    with pytest.raises(ValueError, match="GPT: tokens: got 3 sequences, wanted 2, as the cache has"):
        model(text(3)[:, :1], cache=cache)


class TestConfig:
    def test_it_is_a_value(self):
        config = GPTConfig(**SMALL, regime=REGIMES)
        assert GPTConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
        assert len({config, config.replace()}) == 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.dim = 3

    def test_the_function_makes_it_of_keywords(self):
        model = ot.models.gpt(64, 32, "smooth", dim=48, norm_eps=1e-5, device="meta")
        assert model.config == GPTConfig(vocab_size=64, context_length=32, regime="smooth", dim=48, norm_eps=1e-5)
        assert ot.models.gpt(device="meta").tok_embed.weight.shape == (256, 192)

    def test_wrong_arguments_say_what_is_wanted(self):
        for options, message in [
            ({"vocab_size": 0}, "vocab_size: got int 0, wanted an integer of at least 1"),
            ({"context_length": -1}, "context_length: got int -1, wanted an integer of at least 1"),
            ({"num_heads": 3}, "num_heads: got 3, wanted a divisor of dim = 16"),
            ({"norm_eps": 0.0}, "norm_eps: got 0.0, wanted more than 0"),
            ({"gelu": "quick"}, "gelu: got 'quick', wanted 'exact' or 'tanh'"),
            ({"regime": ["free"]}, "regime: got 1 of them, wanted one, or one for each of 3 layers"),
        ]:
            with pytest.raises(ValueError, match=f"GPTConfig: {message}"):
                GPTConfig(**{**SMALL, **options})
        with pytest.raises(TypeError, match="GPTConfig: tied: got int 1, wanted True or False"):
            GPTConfig(tied=1)
        with pytest.raises(TypeError, match="GPT: config: got ViTConfig.*, wanted a GPTConfig"):
            GPT(ot.models.ViTConfig())
