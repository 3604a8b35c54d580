"""overtone analyze: sources, inputs, the report it writes, and mistakes in one line with status 2."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kit import libraries
from test_analysis import Model

from overtone import cli
from overtone.analysis import sources
from overtone.analysis.sources import Images, Source, SourceError, Words


class Picture(Model):
    """Images [B, C, 28, 36] as seven tokens of twelve numbers of each channel's mean."""

    def forward(self, images):
        return super().forward(images.mean(1).reshape(len(images), 7, 12, 12).mean(-1))


@pytest.fixture
def picture(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setitem(sources.LOADERS, "mine", lambda name, pretrained: Source(Picture(), Images(3, 28, 36)))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["analyze", *arguments])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_writes_a_report(capsys, tmp_path, picture):
    status, out, err = run(capsys, "mine:x", "--samples", "3", "--out", str(tmp_path / "new"))
    assert status == 0
    assert "mine:x: tokens after each layer, means over 3 samples" in out
    assert out.splitlines()[-1] == f"Report: {tmp_path / 'new' / 'report.html'}"
    assert "analyze" in err  # the progress bar
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert {"report.html", "layers.csv", "heads.csv", "dominance.csv", "ratio.png"} <= names


def test_images_of_a_folder(capsys, tmp_path, picture):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    (tmp_path / "inner").mkdir()
    for place, (mode, size) in enumerate([("RGB", (100, 50)), ("L", (20, 90)), ("P", (36, 28))]):
        image.new(mode, size, 7 * place).save(tmp_path / "inner" / f"{place}.png")
    (tmp_path / "notes.txt").write_text("no image")
    status, out, _ = run(capsys, "mine:x", "--images", str(tmp_path), "--no-report", "--batch-size", "2")
    assert status == 0 and "means over 3 samples" in out
    takes = Images(3, 28, 36, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    (batch,) = sources.images(takes, tmp_path, samples=1, batch_size=4)
    wanted = (torch.zeros(3) - 0.5) / 0.25  # black
    torch.testing.assert_close(batch, wanted[None, :, None, None].expand(1, 3, 28, 36))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "'nowhere': got neither a run's folder nor one of timm:NAME, hf:NAME"),
        (["mine:x", "--images", "/no/such/folder"], "got no folder, wanted one with images"),
        (["hf:no-such-type/x.json"], "hf:no-such-type"),
    ],
)
def test_mistakes_are_one_line(capsys, picture, arguments, message):
    if arguments[0].startswith("hf:"):
        libraries.transformers()
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1


def test_unknown_timm_model_has_a_hint(capsys):
    libraries.timm()
    status, _, err = run(capsys, "timm:vit_tiny_patch16_22")
    assert status == 2 and "timm has no such model; did you mean vit_tiny_patch16_224" in err


def test_timm_says_what_it_takes():
    libraries.timm()
    assert sources.load("timm:vit_tiny_patch16_224").takes == Images(3, 224, 224, (0.5,) * 3, (0.5,) * 3)


def test_hugging_face_by_configuration(tmp_path, capsys):
    libraries.transformers()
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 40, **sizes}))
    assert sources.load(f"hf:{tmp_path}").takes == Words(40, 512)
    status, out, _ = run(capsys, f"hf:{tmp_path}", "--tokens", "6", "--samples", "2", "--no-report")
    assert status == 0 and "image × layer × head" in out
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": 32, **sizes}))
    assert sources.load(f"hf:{tmp_path / 'config.json'}").takes == Images(3, 32, 32)


def test_a_run_is_loaded_through_its_three_functions(tmp_path, monkeypatch):
    """The interface between `overtone train` and this command."""
    training = ModuleType("overtone.training.model")
    training.load_model = lambda folder: Picture()
    training.load_config = lambda folder: SimpleNamespace(image_size=28)
    training.load_info = lambda folder: SimpleNamespace(channels=1, mean=[0.1], std=[0.3])
    monkeypatch.setitem(sys.modules, "overtone.training.model", training)
    assert sources.load(str(tmp_path)).takes == Images(1, 28, 28, (0.1,), (0.3,))


def test_a_folder_that_is_no_run_says_so(tmp_path):
    with pytest.raises(SourceError, match="no trained model there"):
        sources.load(str(tmp_path))


def test_a_run_without_the_package_that_reads_it_says_so(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SourceError, match=r"safetensors: pip install 'overtone\[study\]'"):
        sources.load(str(tmp_path))


def test_synthetic_inputs_are_repeatable():
    images, words = Images(1, 4, 5), Words(10, 6)
    assert torch.equal(sources.synthetic(images, 2), sources.synthetic(images, 2))
    assert sources.synthetic(words, 3).shape == sources.synthetic(words, 3, tokens=6).shape == (3, 6)
    with pytest.raises(sources.SourceError, match="--tokens: got 7, wanted at most 6, the model's longest sequence"):
        sources.synthetic(words, 3, tokens=7)
    assert not torch.equal(sources.synthetic(images, 2), sources.synthetic(images, 2, seed=1))
