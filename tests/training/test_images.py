"""Images of every kind, as they are read, changed behind a run's back, and classified by a trained one."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from overtone import cli
from overtone.training import (
    ConfigError,
    DataError,
    TrainConfig,
    inference,
    load_data,
    load_info,
    load_model,
    predict,
    train,
)
from overtone.training.data import identity
from overtone.training.data.image_folder import _WIDE, SUFFIXES, in_bytes, read_image

Image = pytest.importorskip("PIL.Image", reason="needs Pillow to make images")

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 16


def picture(seed: int = 0, colours: int = 1):
    """8-bit noise, every level from 0 to 255 in it."""
    levels = bytes(range(SIZE * SIZE)) * colours
    return Image.frombytes(
        "L" if colours == 1 else "RGB", (SIZE, SIZE), bytes(random.Random(seed).sample(levels, len(levels)))
    )


def wide(grey, mode: str, scale: float):
    """The grey picture with levels of `scale`, in a mode of more than 8 bits."""
    return grey.convert("F" if mode == "F" else "I").point(lambda value: value * scale + 0).convert(mode)


# Mode, file format, and a picture whose 8-bit version is the first argument.
GREY = {
    "L.png": lambda grey: grey,
    "L.tiff": lambda grey: grey,
    "P.png": lambda grey: grey.convert("P"),
    "LA.png": lambda grey: Image.merge("LA", (grey, grey.rotate(90))),
    "RGB.bmp": lambda grey: grey.convert("RGB"),
    "RGBA.png": lambda grey: Image.merge("RGBA", (grey, grey, grey, grey.rotate(90))),
    "RGBA.tiff": lambda grey: Image.merge("RGBA", (grey, grey, grey, grey.rotate(90))),
    "CMYK.tiff": lambda grey: grey.convert("RGB").convert("CMYK"),
    "I;16 times 257.png": lambda grey: wide(grey, "I;16", 257),
    "I;16 times 256.png": lambda grey: wide(grey, "I;16", 256),
    "I;16.tiff": lambda grey: wide(grey, "I;16", 257),
    "I;16B.tiff": lambda grey: wide(grey, "I;16B", 257),
    "I.pgm": lambda grey: wide(grey, "I", 257),
    "I of 16 bits.tiff": lambda grey: wide(grey, "I", 257),
    "I of 8 bits.tiff": lambda grey: wide(grey, "I", 1),
    "F of 8 bits.tiff": lambda grey: wide(grey, "F", 1),
    "F of 16 bits.tiff": lambda grey: wide(grey, "F", 257),
    "F to 1.tiff": lambda grey: wide(grey, "F", 1 / 255),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", GREY)
def test_every_mode_is_its_8_bit_picture(tmp_path, name, channels):
    grey = picture()
    grey.save(tmp_path / "expected.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GREY[name](grey).save(tmp_path / name)
        found = read_image(tmp_path / name, SIZE, channels)
        assert torch.equal(found, read_image(tmp_path / "expected.png", SIZE, channels))
    assert found.shape == (channels, SIZE, SIZE) and found.unique().numel() == 256


@pytest.mark.parametrize("mode", Image.MODES)
def test_every_mode_of_pillow_is_read(mode):
    """Whatever a file may decode to: black stays black, and white white."""
    for level in (0, 255):
        grey = Image.new("L", (SIZE, SIZE), level)
        grey.putpixel((0, 0), 255 - level)  # tells the range
        if mode in _WIDE:
            image = wide(grey, mode, 257)
        elif mode in ("La", "RGBa"):
            image = grey.convert(mode.upper()).convert(mode)
        else:
            image = grey.convert(mode)
        pixel = in_bytes(image, 3).getpixel((SIZE // 2, SIZE // 2))
        rounding = 1 if mode == "LAB" else 0  # of L*, a* and b* to 8 bits
        assert all(abs(value - level) <= rounding for value in pixel)


def test_one_bit_and_palettes_with_transparency(tmp_path):
    black_and_white = picture().convert("1")
    black_and_white.save(tmp_path / "1.png")
    assert read_image(tmp_path / "1.png", SIZE).unique().tolist() == [0, 255]
    colours = picture(colours=3).quantize(16)
    colours.save(tmp_path / "plain.png")
    plain = read_image(tmp_path / "plain.png", SIZE)
    for transparency in (3, bytes(range(16))):
        colours.save(tmp_path / "transparent.png", transparency=transparency)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(read_image(tmp_path / "transparent.png", SIZE), plain)


@pytest.mark.parametrize("values", [[-1.0, 1.0], [0.0, 70000.0], [0.0, float("nan")], [0.0, float("inf")]])
def test_numbers_without_a_range_are_refused(tmp_path, values):
    image = Image.new("F", (2, 1))
    for column, value in enumerate(values):
        image.putpixel((column, 0), value)
    image.save(tmp_path / "x.tiff")
    with pytest.raises(DataError, match=r"x.tiff: gray values from .*, wanted 0 to 1 \(of floats\), 255 or 65535"):
        read_image(tmp_path / "x.tiff", 2)


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_a_damaged_file_is_an_image_or_one_line(tmp_path, suffix):
    path, draw = tmp_path / f"x{suffix}", random.Random(0)
    (picture() if suffix == ".pgm" else picture(colours=3)).save(path)
    whole = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about what it mends
        for _ in range(150):
            content = bytearray(whole[: draw.choice((len(whole), draw.randrange(len(whole))))])
            for _ in range(draw.randrange(4) if content else 0):
                # Mostly in the header, whose numbers decide sizes and offsets.
                content[draw.randrange(min(len(content), draw.choice((64, len(content)))))] = draw.randrange(256)
            path.write_bytes(content)
            try:
                assert read_image(path, 8).shape == (3, 8, 8)
            except DataError as error:
                assert str(error).startswith(f"cannot read image {path}: ") and len(str(error).splitlines()) == 1


def test_a_decompression_bomb_is_one_line(monkeypatch, tmp_path):
    picture().save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match="bomb.png: .*decompression bomb"):
        read_image(tmp_path / "bomb.png", SIZE)


def make_folder(folder: Path) -> Path:
    """Uncompressed images, so that all of them have the same size."""
    for number in range(30):
        place = folder / ("cat", "dog", "emu")[number % 3] / f"{number:02d}.bmp"
        place.parent.mkdir(parents=True, exist_ok=True)
        picture(number, 3).save(place)
    return folder


def config_of(folder: Path, **changes) -> TrainConfig:
    small = {"image_size": 8, "patch_size": 4, "dim": 16, "num_heads": 2, "depth": 1, "batch_size": 4, "epochs": 1}
    return TrainConfig(data="folder", data_dir=str(folder), tensorboard=False, **(small | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """Images, and a run of them."""
    base = tmp_path_factory.mktemp("trained")
    folder = make_folder(base / "images")
    train(config_of(folder), base / "run", progress=False)
    return folder, base / "run"


CHANGES = {
    "an image added": (lambda f: picture(99, 3).save(f / "dog" / "99.bmp"), "images added: dog/99.bmp"),
    "an image removed": (lambda f: (f / "dog" / "01.bmp").unlink(), "images removed: dog/01.bmp"),
    "an image replaced by one of the same size": (
        lambda f: picture(99, 3).save(f / "emu" / "02.bmp"),
        "images changed: emu/02.bmp$",
    ),
    "two images exchanged": (
        lambda f: ((f / "cat" / "00.bmp").rename(f / "x"), (f / "dog" / "01.bmp").rename(f / "cat" / "00.bmp"),
                   (f / "x").rename(f / "dog" / "01.bmp")),
        "images changed: cat/00.bmp, dog/01.bmp$",
    ),
    "an image that is in another class": (
        lambda f: (f / "cat" / "00.bmp").rename(f / "dog" / "00.bmp"),
        "images added: dog/00.bmp; images removed: cat/00.bmp",
    ),
    "an image renamed": (
        lambda f: (f / "cat" / "00.bmp").rename(f / "cat" / "z.bmp"),
        "images added: cat/z.bmp; images removed: cat/00.bmp",
    ),
    "a class renamed": (
        lambda f: (f / "cat").rename(f / "yak"),
        "classes added: yak; classes removed: cat; classes given another label: dog, emu; "
        "images added: yak/00.bmp, yak/03.bmp, yak/06.bmp and 7 more",
    ),
    "a class added": (lambda f: shutil.copytree(f / "cat", f / "bat"), "classes added: bat"),
    "a split of its own": (lambda f: split_by_hand(f), "images added: train/cat/00.bmp"),
}  # fmt: skip


def split_by_hand(folder: Path) -> None:
    for name in ("cat", "dog", "emu"):
        for place in ("train", "val"):
            shutil.copytree(folder / name, folder / place / name)


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_goes_on_with_its_own_data_only(trained, tmp_path, change):
    """Every change of what is trained or tested on is refused, and named."""
    shutil.copytree(trained[0], tmp_path / "images")
    shutil.copytree(trained[1], tmp_path / "run")
    make_change, named = CHANGES[change]
    make_change(tmp_path / "images")
    more = config_of(tmp_path / "images", epochs=2)
    named = named.removesuffix("$") + (";" if named.endswith("$") else "")
    with pytest.raises(DataError, match=f"run: not the data that the run was trained on: .*{named}"):
        train(more, tmp_path / "run", resume=True, progress=False)


def test_what_does_not_change_the_data_does_not_matter(trained, tmp_path):
    """Another place, other times, other files beside the images."""
    shutil.copytree(trained[1], tmp_path / "run")
    for path in sorted(trained[0].rglob("*.bmp"), reverse=True):
        place = tmp_path / "elsewhere" / path.relative_to(trained[0])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
        os.utime(place, (1, 1))
    (tmp_path / "elsewhere" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "elsewhere" / ".hidden").mkdir()
    result = train(config_of(tmp_path / "elsewhere", epochs=2), tmp_path / "run", resume=True, progress=False)
    assert len(result.history) == 2


def test_large_data_are_known_by_names_and_sizes(trained, monkeypatch):
    monkeypatch.setattr(identity, "MAX_HASHED_BYTES", 100)
    monkeypatch.setattr(Path, "read_bytes", None)  # not read
    lines = identity.listed(load_data(config_of(trained[0]))).splitlines()
    assert len(lines) == 33 and all(line.split("\t")[3] == "-" for line in lines)


def test_a_list_that_is_damaged_is_said(trained, tmp_path):
    shutil.copytree(trained[1], tmp_path / "run")
    (tmp_path / "run" / identity.LIST).write_text("nonsense")
    shutil.copytree(trained[0], tmp_path / "images")
    (tmp_path / "images" / "cat" / "00.bmp").unlink()
    with pytest.raises(DataError, match=f"{identity.LIST}, which would say what, is missing or changed"):
        train(config_of(tmp_path / "images", epochs=2), tmp_path / "run", resume=True, progress=False)


def test_the_split_is_said(trained, capfd, tmp_path):
    train(config_of(trained[0]), tmp_path / "run")
    error = capfd.readouterr().err
    assert "data: 24 training and 6 test images (there is no " in error
    assert "20% of every class, at least one image, are test images, the same ones for every --seed)" in error
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    assert "20% of every class" in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize("mistake", ["one image", "empty class", "no class", "a file", "unreadable"])
def test_a_folder_that_cannot_be_trained_on_is_one_line(capsys, monkeypatch, tmp_path, mistake):
    folder = tmp_path / "images"
    if mistake != "no class":
        make_folder(folder)
    if mistake == "one image":
        (folder / "new").mkdir()
        picture().save(folder / "new" / "only.png")
    elif mistake == "empty class":
        (folder / "new").mkdir()
    elif mistake == "no class":
        folder.mkdir()
    elif mistake == "a file":
        folder = folder / "cat" / "00.bmp"
    else:
        scan = os.scandir

        def refusing(path):
            if "dog" in str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return scan(path)

        monkeypatch.setattr(os, "scandir", refusing)
    named = {
        "one image": "new has 1 image, wanted at least 2",
        "empty class": "new has no image",
        "no class": "images has 0 directories",
        "a file": "00.bmp",
        "unreadable": "not readable: .*dog: Permission denied",
    }
    arguments = ["--data", "folder", "--data-dir", str(folder), "--image-size", "8", "--patch-size", "4"]
    assert cli.main(["train", "--out", str(tmp_path / "run"), *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and error.startswith("overtone train: ")
    assert re.search(named[mistake], error)


def test_predictions_are_the_models_on_the_runs_own_images(trained):
    folder, run = trained
    paths = sorted(folder.rglob("*.bmp"))
    found = list(predict(run, [folder], batch_size=7))
    assert [prediction.image for prediction in found] == paths
    model, info = load_model(run), load_info(run)
    images = torch.stack([read_image(path, 8) for path in paths])
    with torch.no_grad():
        expected = model(info.normalize(images)).softmax(1).double()
    for prediction, probabilities in zip(found, expected, strict=True):
        assert prediction.error is None
        by_class = dict(zip(prediction.classes, prediction.probabilities, strict=True))
        # A batch of another size sums in another order: rounding of float32.
        assert [by_class[name] for name in info.classes] == pytest.approx(probabilities.tolist(), rel=1e-5)
        assert prediction.probabilities == sorted(prediction.probabilities, reverse=True)
        assert sum(prediction.probabilities) == pytest.approx(1, abs=1e-6)
    assert not torch.is_inference_mode_enabled()


def test_predictions_of_the_test_images_have_the_test_accuracy(tmp_path):
    """A run of the digits, whose images are written to files first: one channel, 8 pixels."""
    config = TrainConfig(
        data="digits", train_fraction=0.1, dim=16, num_heads=2, depth=1, epochs=2, batch_size=32, tensorboard=False
    )
    result = train(config, tmp_path / "run", progress=False)
    test = load_data(config).test
    for number, image in enumerate(test.images(torch.arange(len(test.labels)))):
        levels = wide(Image.frombytes("L", (8, 8), bytes(image.flatten().tolist())), "I;16", 257)
        levels.save(tmp_path / f"{number:04d}.png")  # 16 bits lose nothing
    found = list(predict(tmp_path / "run", sorted(tmp_path.glob("*.png"))))
    right = [int(prediction.classes[0]) == label for prediction, label in zip(found, test.labels.tolist(), strict=True)]
    assert sum(right) / len(right) == pytest.approx(result.test_accuracy, abs=1e-9)


def test_the_command_predicts_what_it_can(trained, capsys, tmp_path):
    folder, run = trained
    good, wide_, broken, gone = (
        folder / "cat" / "00.bmp",
        tmp_path / "16.png",
        tmp_path / "broken\n.png",
        tmp_path / "gone",
    )
    wide(picture(), "I;16", 257).save(wide_)
    broken.write_text("no image")
    (tmp_path / "empty").mkdir()
    images = [str(path) for path in (gone, good, broken, tmp_path / "empty", wide_)]
    assert cli.main(["predict", str(run), *images, "--batch-size", "2"]) == 1
    output = capsys.readouterr()
    assert [line.partition(": ")[0] for line in output.out.splitlines()] == [str(good), str(wide_)]
    assert all(line.count("%") == 3 for line in output.out.splitlines())
    errors = output.err.splitlines()
    assert len(errors) == 3 and all(line.startswith("overtone predict: ") for line in errors)
    for line, name in zip(errors, ("gone", "broken\\n.png", "empty: a folder without images"), strict=True):
        assert name in line
    assert cli.main(["predict", str(run), str(good)]) == 0


def test_the_command_writes_json_and_csv(trained, capsys):
    folder, run = trained
    expected = list(predict(run, [folder]))
    assert cli.main(["predict", str(run), str(folder), "--json", "--top-k", "2"]) == 0
    for line, prediction in zip(capsys.readouterr().out.splitlines(), expected, strict=True):
        found = json.loads(line)
        assert found == {
            "image": str(prediction.image),
            "classes": prediction.classes[:2],
            "probabilities": prediction.probabilities[:2],
        }
    assert cli.main(["predict", str(run), str(folder), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    for row, prediction in zip(rows, expected, strict=True):
        assert row["image"] == str(prediction.image) and row["class_3"] == prediction.classes[2]
        assert float(row["probability_1"]) == prediction.probabilities[0]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-cat", "@x", "a\tb", "a\x1b[31m", "\udcff"])
def test_names_are_no_formulas_and_no_control_characters(trained, capsys, monkeypatch, name):
    one = inference.Prediction(Path(name), [name], [1.0])
    monkeypatch.setattr("overtone.training.predict", lambda *_, **__: [one])
    for form in ([], ["--json"], ["--csv"]):
        assert cli.main(["predict", str(trained[1]), "x", "--top-k", "1", *form]) == 0
        text = capsys.readouterr().out
        text.encode()
        assert all(letter.isprintable() for letter in text.replace("\n", ""))
        if form == ["--csv"]:
            assert not any(
                cell.startswith(("=", "+", "-", "@")) for row in csv.reader(io.StringIO(text)) for cell in row
            )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "x"], "nowhere: no trained model there"),
        (["RUN", "x", "--top-k", "4"], "--top-k: got 4, wanted 1 to 3, the run's classes"),
        (["RUN", "x", "--top-k", "0"], "--top-k: got 0"),
        (["RUN", "x", "--batch-size", "0"], "batch_size=0"),
        (["RUN", "x", "--device", "cuda"], "torch finds no GPU"),
        (["RUN", "x", "--device", "toaster"], "device: got 'toaster'"),
    ],
)
def test_a_mistake_in_predict_is_one_line_and_status_2(trained, capsys, arguments, message):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    arguments = [str(trained[1]) if word == "RUN" else word for word in arguments]
    assert cli.main(["predict", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("overtone predict: ") and message in error and len(error.splitlines()) == 1


def test_predict_from_python_names_a_wrong_argument(trained):
    with pytest.raises(ConfigError, match="batch_size=0"):
        list(predict(trained[1], [], batch_size=0))
