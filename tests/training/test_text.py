"""Runs of text: what is read, what is measured, the exactness of runs of images, and prompts that are continued."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from support import runs

from overtone import cli
from overtone.models import GPTConfig
from overtone.training import ConfigError, DataError, TrainConfig, continue_text, load_data, load_model, predict, train
from overtone.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

# Every part of a run's state is in use; ten steps an epoch.
TINY = TrainConfig(
    data="text", train_fraction=0.006, dim=16, num_heads=2, depth=2, context_length=16, regime="sharpen,free",
    drop_path=0.1, epochs=2, batch_size=16, grad_accumulation=2, learning_rate=1e-2, warmup_epochs=0.5, ema=0.9,
    timeout=300.0, tensorboard=False,
)  # fmt: skip


def text_of(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def load(folder: Path, **changes):
    return load_data(TrainConfig(data="text", data_dir=str(folder), dim=16, num_heads=2, context_length=4, **changes))


class TestData:
    def test_the_documentation_of_this_python_is_split_by_topic(self):
        from pydoc_data.topics import topics

        data = load_data(TrainConfig(data="text"))
        train, test = (bytes(part.text.tolist()).decode() for part in (data.train, data.test))
        assert sum(topic in test for topic in topics.values()) == round(0.1 * len(topics))
        assert all((topic in train) != (topic in test) for topic in topics.values() if len(topic) > 200)
        assert "documentation of Python 3." in data.info.source
        assert load_data(TrainConfig(data="text", seed=1)).test.text.equal(data.test.text)

    def test_windows_predict_every_byte_once(self, tmp_path):
        data = load(text_of(tmp_path, train_txt=bytes(range(65, 95)), test_txt=b"abcdefghij"))
        (batch,) = data.test.batches([torch.arange(len(data.test))])
        assert batch.inputs.flatten().tolist() == list(b"abcdefgh")
        assert batch.targets.flatten().tolist() == list(b"bcdefghi")
        assert batch.inputs.dtype == torch.uint8 and batch.targets.dtype == torch.int64
        starts = set()
        for epoch in range(40):
            (batch,) = data.train.in_epoch(0, epoch).batches([torch.arange(len(data.train))])
            assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1].to(torch.uint8))
            starts.add(batch.inputs[0, 0].item() - 65)
        assert starts == {0, 1, 2, 3}

    def test_files_without_a_split_end_with_test_text(self, tmp_path):
        (tmp_path / "inner").mkdir()
        text_of(tmp_path / "inner", b_txt=b"b" * 100)
        data = load(text_of(tmp_path, a_txt=b"a" * 100, notes_md=b"no text"))
        assert bytes(data.train.text.tolist()) == b"a" * 90 + b"b" * 90
        assert bytes(data.test.text.tolist()) == b"a" * 10 + b"b" * 10
        one = load(tmp_path / "a.txt")
        assert bytes(one.test.text.tolist()) == b"a" * 10

    def test_wikitext_103(self, tmp_path):
        names = {f"wiki.{name}.raw": f"= {name} = ".encode() * 9 for name in ("train", "valid", "test")}
        (tmp_path / "wikitext-103-raw").mkdir()
        for name, content in names.items():
            (tmp_path / "wikitext-103-raw" / name).write_bytes(content)
        for evaluate_on, name in (("test", "test"), ("validation", "valid")):
            data = load(tmp_path, evaluate_on=evaluate_on)
            assert bytes(data.test.text.tolist()) == names[f"wiki.{name}.raw"] and "WikiText-103" in data.origin
        data = load(tmp_path, train_fraction=0.5)
        assert bytes(data.train.text.tolist()) == names["wiki.train.raw"][: 9 * 10 // 2]

    def test_validation_text_is_the_end_of_the_training_text(self, tmp_path):
        text_of(tmp_path, train_txt=b"a" * 90 + b"b" * 10, test_txt=b"c" * 50)
        data = load(tmp_path, evaluate_on="validation")
        assert bytes(data.train.text.tolist()) == b"a" * 90 and bytes(data.test.text.tolist()) == b"b" * 10

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            (None, "missing: .*; wanted a text file, or a folder"),
            ({"notes_md": b"x"}, "has no text: wanted [*].txt, or wiki.train.raw"),
            ({"a_txt": b""}, "a.txt is empty"),
            ({"a_txt": b"x" * 70 + b"\xff" + b"x" * 40}, "a.txt is not UTF-8, at about byte 70: invalid start byte"),
            ({"a_txt": b"x" * 70 + b"\xc3"}, "a.txt is not UTF-8, at about byte 70: unexpected end of data"),
            ({"a_txt": b"short"}, "the training text has 4 bytes, wanted at least 8 for context_length = 4"),
            ({"train_txt": b"x" * 100}, "not readable: .*test.txt: No such file"),
        ],
    )
    def test_a_mistake_is_named(self, capsys, tmp_path, files, message):
        folder = tmp_path / "nowhere" if files is None else text_of(tmp_path, **files)
        with pytest.raises(DataError, match=message):
            load(folder)
        options = ["--data", "text", "--data-dir", str(folder), "--context-length", "4", "--out", str(tmp_path / "run")]
        assert cli.main(["train", *options]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1

    def test_a_python_without_documentation_says_so(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
        with pytest.raises(DataError, match="this Python has no pydoc_data .*--data-dir"):
            load_data(TINY)


def test_settings_of_images_are_refused():
    assert isinstance(TINY.model, GPTConfig) and TINY.model.depth == 2 and TINY.optim.label_smoothing == 0
    for name, value in (("patch_size", 4), ("pool", "mean")):
        with pytest.raises(ConfigError, match=f"{name}: models of text have no such field"):
            TINY.replace(**{name: value})
    with pytest.raises(ConfigError, match="context_length: models of digits have no such field"):
        TrainConfig(data="digits", context_length=8)
    with pytest.raises(ConfigError, match="image_size: got 8, wanted None"):
        TINY.replace(image_size=8)
    assert TINY.replace(data="digits").replace(data="text").model.dim == 16
    assert TrainConfig.from_dict(json.loads(TINY.to_json())) == TINY


def train_all(folder: Path) -> None:
    train(TINY, folder, progress=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "run"
    runs.run_well(train_all, folder)
    return folder


def test_bits_per_byte_are_the_models(run):
    """Of the saved weights, over all windows of the test text."""
    row = runs.outcome(run)[1][-1]
    model, data = load_model(run), load_data(TINY)
    total, count = 0.0, 0
    for batch in data.test.batches(torch.arange(len(data.test)).split(64)):
        with torch.no_grad():
            scores = model(batch.inputs.long()).double().log_softmax(-1)
        total -= scores.gather(-1, batch.targets[..., None]).sum().item()
        count += batch.targets.numel()
    assert row["test_bits_per_byte"] == pytest.approx(total / count / math.log(2), rel=1e-5)
    assert row["test_perplexity"] == pytest.approx(2 ** row["test_bits_per_byte"], rel=1e-12)
    assert row["test_bits_per_byte"] < 6.5  # a uniform guess has 8, and the frequencies of bytes about 4.8


def test_a_killed_run_resumes_to_the_bit(run, monkeypatch, tmp_path):
    config = TINY.replace(checkpoint_steps=7)
    step = Trainer._step

    def dying(self, *arguments):
        if self.step == 9:
            raise KeyboardInterrupt
        step(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_step", dying)
        train(config, tmp_path, progress=False)
    train(config, tmp_path, resume=True, progress=False)
    runs.check_same_bits(tmp_path, run)


def test_other_text_is_not_continued(tmp_path):
    text_of(tmp_path / "a", a_txt=b"some text " * 60)
    config = TINY.replace(data_dir=str(tmp_path / "a"), train_fraction=1.0, context_length=4, epochs=1)
    train(config, tmp_path / "run", progress=False)
    text_of(tmp_path / "a", a_txt=b"some text." * 60)
    with pytest.raises(DataError, match="texts changed: all|texts changed: "):
        train(config.replace(epochs=2), tmp_path / "run", resume=True, progress=False)


def train_exactly(folder: Path, changes: dict) -> None:
    train(TINY.replace(precision="float64", drop_path=0.0, **changes), folder, progress=False)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(tmp_path, strategy):
    runs.run_well(train_exactly, tmp_path / "alone", {"epochs": 1})
    runs.run_well(train_exactly, tmp_path / "both", {"epochs": 1, "strategy": strategy}, processes=2)
    (both, _), (alone, _) = runs.outcome(tmp_path / "both"), runs.outcome(tmp_path / "alone")
    for name, expected in alone.items():
        torch.testing.assert_close(both[name], expected, rtol=1e-9, atol=1e-9, msg=name)


class TestContinuing:
    def test_the_same_seed_writes_the_same(self, run):
        first = continue_text(run, "The with statement", max_new_bytes=40, seed=3)
        assert first == continue_text(run, "The with statement", max_new_bytes=40, seed=3)
        assert first != continue_text(run, "The with statement", max_new_bytes=40, seed=4)

    def test_the_likeliest_byte(self, run):
        (letter,) = continue_text(run, "abc", max_new_bytes=1, temperature=0).encode()
        with torch.no_grad():
            assert letter == load_model(run)(torch.tensor([list(b"abc")]))[0, -1].argmax()

    def test_the_command(self, run, capsys):
        assert cli.main(["predict", str(run), "one", "two", "--max-new-bytes", "20", "--seed", "1", "--json"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [each["prompt"] for each in found] == ["one", "two"] and all(each["text"] for each in found)
        assert cli.main(["predict", str(run), "one", "--max-new-bytes", "20"]) == 0
        assert capsys.readouterr().out.startswith("one")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([""], "a prompt of 0 letters"),
            (["x", "--max-new-bytes", "0"], "max_new_bytes=0"),
            (["x", "--temperature", "-1"], "temperature"),
            (["x", "--csv"], "a run of text has no classes"),
        ],
    )
    def test_a_mistake_is_one_line(self, run, capsys, arguments, message):
        assert cli.main(["predict", str(run), *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("overtone predict: ") and message in error and len(error.splitlines()) == 1

    def test_images_and_text_are_not_mixed_up(self, run, tmp_path):
        with pytest.raises(ConfigError, match="a run of text: it continues prompts"):
            list(predict(run, [tmp_path]))
