"""ot.models.save and load: everything comes back, a killed process leaves a whole model, and bad files are refused."""

from __future__ import annotations

import json
import os
import stat

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import overtone as ot
from overtone.models import GPT, GPTConfig, VisionTransformer, ViTConfig

pytestmark = pytest.mark.usefixtures("one_thread")

REGIMES = ("free", "sharpen", "smooth")
BLOCKS = {"dim": 16, "num_heads": 2, "depth": 3, "regime": REGIMES}


def vit(dtype=None, **options):
    torch.manual_seed(0)
    config = ViTConfig(image_size=8, patch_size=4, num_classes=5, **{**BLOCKS, **options})
    return VisionTransformer(config, dtype=dtype).eval()


def gpt(dtype=None, **options):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=11, context_length=12, **{**BLOCKS, **options}), dtype=dtype).eval()


def inputs(model):
    if isinstance(model, GPT):
        return torch.arange(24).view(2, 12) % 11
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(model.pos_embed.dtype)


def metadata(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def rewrite(folder, change=None, **fields):
    """The model's file with other tensors, or with another configuration."""
    path = folder / "model.safetensors"
    state, told = load_file(path), metadata(path)
    config = json.loads(told["overtone_config"]) | fields
    save_file((change or dict)(state), path, {**told, "overtone_config": json.dumps(config)})
    (folder / "config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("make", [vit, gpt])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"kind": "general", "method": "feat_scale"}, {"norm_sign": -1, "norm": "post"}]
)
def test_everything_comes_back(tmp_path, make, dtype, options):
    model = make(dtype, **options)
    ot.models.save(model, tmp_path / "new" / "folder")
    random = torch.get_rng_state()
    loaded = ot.models.load(tmp_path / "new" / "folder")
    assert torch.equal(torch.get_rng_state(), random)
    assert type(loaded) is type(model) and loaded.config == model.config and not loaded.training
    for (name, ours), (other, theirs) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    x = inputs(model)
    assert torch.equal(loaded(x), model(x))


def test_dtypes_may_differ_within_a_model(tmp_path):
    model = gpt()
    model.norm.double()
    ot.models.save(model, tmp_path)
    loaded = ot.models.load(tmp_path)
    assert [p.dtype for p in loaded.parameters()] == [p.dtype for p in model.parameters()]


@pytest.mark.parametrize("make", [vit, gpt])
@pytest.mark.parametrize("method", ["plain", "attn_scale", "de_escalation"])
def test_a_folded_model_is_one_of_ordinary_weights(tmp_path, make, method):
    model = make(torch.float64, norm_sign=-1, method=method)
    ot.models.save(ot.spectrum.fold(model), tmp_path)
    loaded = ot.models.load(tmp_path)
    assert loaded.config == model.config.replace(regime="free", norm_sign=None)
    torch.testing.assert_close(loaded(inputs(model)), model(inputs(model)))


def test_the_files_are_what_the_hub_expects(tmp_path):
    ot.models.save(gpt(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "overtone_gpt" and config["architectures"] == ["GPT"] and config["dim"] == 16
    assert metadata(tmp_path / "model.safetensors")["format"] == "pt"
    (tmp_path / "probe").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1  # those of any new file


class Killed(BaseException):
    pass


@pytest.mark.parametrize("call", range(6))
def test_a_killed_process_leaves_the_old_model_or_the_new_one(tmp_path, monkeypatch, call):
    """Killed at each flush and each rename: three of the weights, then three of config.json."""
    old, new = gpt(), gpt(method="de_escalation")
    torch.nn.init.normal_(new.pos_embed)
    ot.models.save(old, tmp_path)
    calls = []

    def counted(function):
        def wrapper(*args):
            calls.append(args)
            if len(calls) > call:
                raise Killed
            return function(*args)

        return wrapper

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    with pytest.raises(Killed):
        ot.models.save(new, tmp_path)
    monkeypatch.undo()
    if 2 <= call < 5:
        with pytest.raises(ValueError, match="config.json beside it is of another model; remove it"):
            ot.models.load(tmp_path)
        (tmp_path / "config.json").unlink()
    left = old if call < 2 else new
    assert torch.equal(ot.models.load(tmp_path)(inputs(left)), left(inputs(left)))


class TestSaveRefuses:
    def test_what_is_no_model_of_ours(self, tmp_path):
        with pytest.raises(TypeError, match="save: model: got Linear, wanted a VisionTransformer or a GPT"):
            ot.models.save(torch.nn.Linear(2, 2), tmp_path)

    def test_what_was_put_into_it(self, tmp_path):
        model = gpt()
        torch.nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.fc1)
        with pytest.raises(
            ValueError, match="its tensors are not those of its config: blocks.0.mlp.fc1.weight: got none"
        ):
            ot.models.save(model, tmp_path)
        assert not [*tmp_path.iterdir()]

    def test_a_folder_that_is_a_file(self, tmp_path):
        (tmp_path / "taken").touch()
        with pytest.raises(OSError, match="taken"):
            ot.models.save(gpt(), tmp_path / "taken")


class TestLoadRefuses:
    @pytest.fixture
    def folder(self, tmp_path):
        ot.models.save(gpt(), tmp_path)
        return tmp_path

    def test_what_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="model.safetensors: there is no such file, wanted a folder that"):
            ot.models.load(tmp_path / "nowhere")

    @pytest.mark.parametrize("keep", [0, 5, 100, -7])
    def test_a_file_that_was_cut(self, folder, keep):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ValueError, match=r"load: .*model.safetensors: .*header"):
            ot.models.load(folder)

    def test_a_pickle(self, folder):
        torch.save(gpt().state_dict(), folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"load: .*model.safetensors: .*header"):
            ot.models.load(folder)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"model_type": "gpt2"}, "model_type: got 'gpt2', wanted 'overtone_vit' or 'overtone_gpt'"),
            ({"model_type": ["overtone_gpt"]}, "unhashable|model_type"),
            ({"depth": 10**12}, "depth: got 1000000000000, wanted 3, the number of its blocks"),
            ({"depth": "3"}, "depth: got '3', wanted 3"),
            ({"dim": 10**15}, "."),
            ({"dim": 32}, "its tensors are not those of its configuration: pos_embed: got shape"),
            ({"vocab_size": 12}, r"tok_embed.weight: got shape \[11, 16\], wanted shape \[12, 16\]"),
            ({"tied": False}, r"head.weight: got none, wanted shape \[11, 16\]"),
            ({"regime": "smooth"}, "blocks.0.attn"),
            ({"regime": 3}, "."),
            ({"mlp_ratio": "4"}, "."),
            ({"norm": "mid"}, "GPTConfig: norm: got 'mid', wanted 'pre' or 'post'"),
            ({"surprise": 1}, "unexpected keyword argument 'surprise'"),
        ],
    )
    def test_a_configuration_that_is_not_the_models(self, folder, fields, message):
        rewrite(folder, **fields)
        with pytest.raises(ValueError, match=f"load: .*model.safetensors: .*({message})"):
            ot.models.load(folder)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: {**state, "norm.bias": state["norm.bias"][:-1].clone()}, r"norm.bias: got shape \[15\]"),
            (lambda state: {n: x for n, x in state.items() if n != "norm.bias"}, "norm.bias: got none"),
            (lambda state: {**state, "extra": torch.zeros(3)}, r"extra: got shape \[3\], wanted none"),
            (lambda state: {**state, "norm.bias": torch.zeros(16, dtype=torch.int32)}, "norm.bias is torch.int32"),
            (lambda state: {}, "depth: got 3, wanted 0"),
        ],
    )
    def test_tensors_that_are_not_the_models(self, folder, change, message):
        rewrite(folder, change)
        with pytest.raises(ValueError, match=f"load: .*model.safetensors: .*{message}"):
            ot.models.load(folder)

    def test_a_file_of_others(self, folder):
        for told in (None, {"format": "pt"}):
            save_file({"weight": torch.zeros(3)}, folder / "model.safetensors", told)
            with pytest.raises(ValueError, match="it has no configuration, wanted a file that ot.models.save has"):
                ot.models.load(folder)
        save_file({"weight": torch.zeros(3)}, folder / "model.safetensors", {"checked_state": "{}"})
        with pytest.raises(ValueError, match="overtone.training.load_model loads the run's"):
            ot.models.load(folder)

    def test_a_damaged_configuration(self, folder):
        for text in ("{", "[1, 2]", '"', '{"model_type": "overtone_gpt"}'):
            (folder / "config.json").write_text(text)
            with pytest.raises(ValueError, match="load: .*model.safetensors: "):
                ot.models.load(folder)


def test_the_file_is_not_held_on_to(tmp_path):
    ot.models.save(gpt(), tmp_path)
    loaded = ot.models.load(tmp_path)
    wanted = loaded(inputs(loaded)).clone()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(10)
    assert torch.equal(loaded(inputs(loaded)), wanted)
