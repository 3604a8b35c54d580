"""overtone analyze: sources, inputs, the report it writes, and mistakes in one line with status 2."""

from __future__ import annotations

import errno
import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import optional
from support.attention_models import Model

import overtone as ot
from overtone import cli
from overtone.cli import sources
from overtone.cli.sources import Images, Source, SourceError, Words


class Picture(Model):
    """Images [B, C, 28, 36] as seven tokens of twelve numbers of each channel's mean."""

    def forward(self, images):
        return super().forward(images.mean(1).reshape(len(images), 7, 12, 12).mean(-1))


class Wrong(Picture):
    """It fails as models of others do, with an array in what it says."""

    def forward(self, images):
        raise RuntimeError(f"first line\n{images}")


@pytest.fixture
def picture(monkeypatch):
    torch.manual_seed(0)
    takes = Images(3, 28, 36)
    monkeypatch.setitem(sources.LOADERS, "mine", lambda name, pretrained: Source(Picture(), takes))
    monkeypatch.setitem(sources.LOADERS, "wrong", lambda name, pretrained: Source(Wrong(), takes))
    huge = lambda: torch.nn.Linear(10**6, 10**6, bias=False)  # noqa: E731
    monkeypatch.setitem(sources.LOADERS, "large", lambda name, pretrained: sources._build(f"large:{name}", huge))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["analyze", *arguments])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_writes_a_report(capsys, tmp_path, picture):
    status, out, err = run(capsys, "mine:x", "--samples", "3", "--out", str(tmp_path / "new"))
    assert status == 0
    first = out.splitlines()[0]
    assert first == "mine:x with weights as they were given (1,608 parameters), on 3 images of noise (seed 0)."
    assert "mine:x: tokens after each layer, means over 3 images" in out
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
    assert status == 0 and "means over 3 images" in out
    assert out.splitlines()[0].endswith(f"on 3 images of {tmp_path}.")
    takes = Images(3, 28, 36, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    (batch,) = sources.images(takes, tmp_path, samples=1, batch_size=4)
    wanted = (torch.zeros(3) - 0.5) / 0.25  # black
    torch.testing.assert_close(batch, wanted[None, :, None, None].expand(1, 3, 28, 36))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "'nowhere': got neither a folder of a run or of ot.models.save, nor one of timm:NAME, hf:NAME"),
        (["mine:x", "--images", "/no/such/folder"], "got no folder, wanted one with images"),
        (["hf:no-such-type/x.json"], "hf:no-such-type/x.json: got neither a folder or file with a configuration"),
        (["hf:bert2"], "nor a type that transformers knows; did you mean bert"),
        (["mine:x", "--device", "cuda:99"], "--device: got 'cuda:99', wanted cpu or a device that torch finds here"),
        (["mine:x", "--device", "gpu"], "--device: got 'gpu', wanted cpu or a device that torch finds here"),
        (["mine:x", "--device", "meta"], "--device: got 'meta', wanted cpu or a device that torch finds here"),
        (["mine:x", "--out", __file__], "test_analyze.py, wanted a folder that can be written to: File exists"),
        (["mine:x", "--out", f"{__file__}/inner"], "wanted a folder that can be written to: Not a directory"),
        (["wrong:x"], "Wrong does not run on these inputs: RuntimeError: first line"),
        (["large:x"], "large:x: 1,000,000,000,000 parameters need 4000.0 GB, and "),
    ],
)
def test_mistakes_are_one_line(capsys, picture, arguments, message):
    if arguments[0].startswith("hf:"):
        optional.transformers()
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    said = [line for line in err.splitlines() if line and not line.startswith("analyze: ")]  # but for the bar
    assert message in err and len(said) == 1


def test_unknown_timm_model_has_a_hint(capsys):
    optional.timm()
    status, _, err = run(capsys, "timm:vit_tiny_patch16_22")
    assert status == 2 and "timm has no such model; did you mean vit_tiny_patch16_224" in err


def test_timm_says_what_it_takes():
    optional.timm()
    assert sources.load("timm:vit_tiny_patch16_224").takes == Images(3, 224, 224, (0.5,) * 3, (0.5,) * 3)


def test_hugging_face_by_configuration(tmp_path, capsys):
    optional.transformers()
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 40, **sizes}))
    assert sources.load(f"hf:{tmp_path}").takes == Words(40, 512)
    status, out, _ = run(capsys, f"hf:{tmp_path}", "--tokens", "6", "--samples", "2", "--no-report")
    assert status == 0 and "sample × layer × head" in out
    assert " with random weights (18,032 parameters, seed 0), on 2 sequences of 6 random tokens (seed 0)." in out
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": 32, **sizes}))
    assert sources.load(f"hf:{tmp_path / 'config.json'}").takes == Images(3, 32, 32)


SMALL = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
MODELS = {
    "llama": {**SMALL, "num_key_value_heads": 1},
    "distilbert": {"vocab_size": 40, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 32},
    "t5": {"vocab_size": 40, "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 3},
    "bart": {
        "vocab_size": 40, "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3,
        "decoder_attention_heads": 3, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_kinds_of_hugging_face(tmp_path, capsys, kind):
    """Two layers of self-attention of each; the decoders' cross attention is named, though it has as many keys."""
    optional.transformers()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **MODELS[kind]}))
    status, out, err = run(capsys, f"hf:{tmp_path}", "--tokens", "6", "--samples", "2", "--no-report")
    assert status == 0, err
    assert len(re.findall(r"^ *[0-9]+  ", out, re.MULTILINE)) == 3
    assert ("keys are not computed from its tokens" in out) == (kind in ("t5", "bart"))


def test_saved_models(tmp_path, capsys):
    blocks = {"dim": 16, "num_heads": 2, "depth": 2}
    ot.models.save(ot.models.gpt(30, 12, "smooth", **blocks), tmp_path / "gpt")
    config = ot.models.ViTConfig(image_size=8, patch_size=4, num_classes=3, **blocks)
    ot.models.save(ot.models.VisionTransformer(config), tmp_path / "vit")
    for kind in ("gpt", "vit"):
        status, out, err = run(capsys, str(tmp_path / kind), "--samples", "2", "--no-report")
        assert status == 0, err
        assert len(re.findall(r"^ *[0-9]+  ", out, re.MULTILINE)) == 3
    (tmp_path / "gpt" / "model.safetensors").write_bytes(b"short")
    status, _, err = run(capsys, str(tmp_path / "gpt"), "--no-report")
    assert status == 2 and "model.safetensors: " in err.splitlines()[-1]
    (tmp_path / "gpt" / "model.safetensors").unlink()
    status, _, err = run(capsys, str(tmp_path / "gpt"), "--no-report")
    assert status == 2 and "model.safetensors: there is no such file" in err.splitlines()[-1]


def test_models_that_cannot_be_read_are_refused_before_any_work(tmp_path, capsys, monkeypatch):
    transformers = optional.transformers()
    built = []
    from_config = transformers.AutoModel.from_config

    def recording(config, **options):
        model = from_config(config, **options)
        built.append((next(model.parameters()).device.type, options["trust_remote_code"]))
        return model

    monkeypatch.setattr(transformers.AutoModel, "from_config", recording)
    kinds = {"phi3": {**SMALL, "pad_token_id": 0}, "albert": SMALL}
    for kind, sizes in kinds.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
        status, out, err = run(capsys, f"hf:{tmp_path}", "--no-report")
        assert (status, out) == (2, "")
        assert f"no attention of {kind.capitalize()}Model could be read (" in err.splitlines()[-1]
    monkeypatch.setattr(sources, "available_bytes", lambda: 10**9)
    status, _, err = run(capsys, "hf:llama")
    message = err.splitlines()[-1]
    assert status == 2 and "6,607,343,616 parameters need 26.4 GB, and 1.0 GB of memory are available" in message
    assert built == [("meta", False)] * 3


@pytest.mark.parametrize("pretrained", [[], ["--pretrained"]])
def test_code_that_comes_with_a_model_is_not_run(tmp_path, capsys, pretrained):
    optional.transformers()
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    status, _, err = run(capsys, f"hf:{tmp_path}", *pretrained)
    assert status == 2 and "contains custom code" in err.splitlines()[-1]
    assert not (tmp_path / "was_run").exists()


def test_memory_that_can_be_had():
    available = sources.available_bytes()
    assert available is None or 0 <= available < 2**50


def test_images_that_cannot_be_read_are_one_line(capsys, tmp_path, picture):
    """Empty, cut off, no image, a bomb: each is named."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    whole = tmp_path / "whole.png"
    image.effect_noise((64, 64), 50).save(whole)
    content = whole.read_bytes()
    whole.unlink()
    size = (30_000).to_bytes(4, "big")
    broken = {
        "empty": b"", "cut": content[: len(content) // 2], "text": b"no image at all", "head": content[:30],
        "bomb": png_with(content, size + size), "noise": bytes(range(256)), "flipped": png_with(content, b"\0" * 8),
    }  # fmt: skip
    for name, data in broken.items():
        path = tmp_path / f"{name}.png"
        path.write_bytes(data)
        status, out, err = run(capsys, "mine:x", "--images", str(tmp_path), "--no-report")
        line = err.splitlines()[-1]
        assert (status, out) == (2, "") and f"{path}: cannot read image " in line and "Traceback" not in err
        path.unlink()


def png_with(content: bytes, size: bytes) -> bytes:
    """A PNG that claims another size, with a right checksum."""
    header = content[12:16] + size + content[24:29]
    return content[:12] + header + zlib.crc32(header).to_bytes(4, "big") + content[33:]


def test_grey_of_16_bits_is_scaled(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    for place, level in enumerate((0, 256, 100 * 256, 65535)):
        image.new("I;16", (8, 8), level).save(tmp_path / f"{place}.png")
    (batch,) = sources.images(Images(1, 8, 8, (0.0,), (1.0,)), tmp_path, samples=4, batch_size=4)
    torch.testing.assert_close(batch.mean((1, 2, 3)), torch.tensor([0, 1 / 255, 100 / 255, 1]))


def test_a_disk_that_is_full_is_one_line(capsys, tmp_path, monkeypatch, picture):
    def write(path, *arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(cli, "_discard_output", lambda: None)  # it would end the tests' own
    status, _, err = run(capsys, "mine:x", "--samples", "1", "--out", str(tmp_path))
    assert status == 2
    assert re.match(rf"overtone analyze: {tmp_path}/.*: No space left on device", err.splitlines()[-1])


@pytest.mark.skipif(os.name != "posix", reason="needs a umask")
def test_files_have_the_modes_that_the_umask_allows(capsys, tmp_path, picture):
    before = os.umask(0o027)
    try:
        assert run(capsys, "mine:x", "--samples", "1", "--out", str(tmp_path / "report"))[0] == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "report").iterdir()} == {0o640}


def test_a_run_is_analysed_on_its_test_images(tmp_path, capsys):
    """The images are those of the run's test set, normalized as the run does; what they are is said first."""
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    from overtone.training import TrainConfig, load_data, train

    config = TrainConfig(data="digits", epochs=1, train_fraction=0.02, batch_size=8, dim=12, num_heads=2, depth=1)
    train(config, tmp_path / "run")
    status, out, err = run(capsys, str(tmp_path / "run"), "--samples", "5", "--out", str(tmp_path / "report"))
    assert status == 0, err
    total = len(load_data(config).test.labels)
    words = rf"run with trained weights \([\d,]+ parameters\), on 5 of the run's {total} test images \(digits\)\."
    assert re.search(words, out.splitlines()[0])
    page = (tmp_path / "report" / "report.html").read_text()
    summary = html.unescape(page.partition('class="summary">')[2].partition("</p>")[0])
    assert re.search(words, summary)
    given, _ = sources.load(str(tmp_path / "run")).own_images(5)
    data = load_data(config)
    everything = data.info.normalize(data.test.images(torch.arange(total)))
    assert all((everything == image).flatten(1).all(1).any() for image in given)


@pytest.mark.parametrize("model", ["timm:vit_tiny_patch16_224", "hf:config.json"])
def test_a_torchvision_for_another_torch_is_no_obstacle(tmp_path, model):
    """The command, in a process of its own, with a torchvision whose compiled ops do not load; ops still say so."""
    found = importlib.util.find_spec("torchvision")
    if found is None or importlib.util.find_spec("timm") is None:
        pytest.skip("the packages timm and torchvision are not installed")
    original = Path(found.submodule_search_locations[0])
    package = shutil.copytree(original, tmp_path / "torchvision", ignore=shutil.ignore_patterns("*.so"))
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": 32, **sizes}))
    mended = package / "extension.py"
    mended.write_text(mended.read_text().partition("# added by overtone")[0])
    program = """
import sys
from overtone.cli import main
status = main(["analyze", sys.argv[1], "--samples", "1", "--no-report"])
import torch, torchvision
try:
    torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
except RuntimeError as error:
    print("refused:", str(error)[:40])
sys.exit(status)
"""
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    result = subprocess.run(
        [sys.executable, "-c", program, model],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert f"{model} with random weights" in result.stdout and "refused: Couldn't load custom C++ ops" in result.stdout


def test_a_run_is_loaded_through_its_three_functions(tmp_path, monkeypatch):
    """The interface between `overtone train` and this command."""
    training = ModuleType("overtone.training.model")
    training.load_model = lambda folder: Picture()
    training.load_config = lambda folder: SimpleNamespace(data=SimpleNamespace(image_size=28))
    training.load_info = lambda folder: SimpleNamespace(classes=["a"], channels=1, mean=[0.1], std=[0.3])
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


def test_the_report_is_there_though_only_the_first_lines_are_read(tmp_path, monkeypatch, picture):
    """As by `overtone analyze … | head`."""

    def closed(*words, **options):
        raise BrokenPipeError

    arguments = cli.parser().parse_args(["analyze", "mine:x", "--samples", "1", "--out", str(tmp_path)])
    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(BrokenPipeError):
        arguments.run(arguments)
    assert (tmp_path / "report.html").exists()
