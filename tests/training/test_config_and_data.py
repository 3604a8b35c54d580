"""Configuration, keyed random numbers, data, augmentation and recipe of a training run."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import pickle
import tarfile

import pytest
import torch
from support import runs

from overtone import cli, hardware, training
from overtone.models import ViTConfig
from overtone.training import DataConfig, DataError, OptimConfig, RunConfig, TrainConfig, load_data, rng
from overtone.training.config import RENAMED, settings
from overtone.training.data import cifar
from overtone.training.data.augment import augment
from overtone.training.data.cifar import PIXELS, Cifar, File
from overtone.training.data.dataset import stratified
from overtone.training.optim import EMA, build_optimizer, learning_rate


def test_the_configuration_survives_json(tmp_path):
    config = TrainConfig(regime="smooth", depth=3, norm_sign=-1, ema=0.5)
    (tmp_path / "config.json").write_text(config.to_json())
    assert TrainConfig.from_json(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": "mnist"}, "data: got 'mnist', wanted one of digits, cifar10, cifar100, folder"),
        ({"depth": 0}, "depth: got int 0, wanted an integer of at least 1"),
        ({"depth": 2.0}, "depth: got 2.0, wanted int"),
        ({"flip": 1}, "flip: got 1, wanted bool"),
        ({"ema": 1.0}, "ema: got 1.0, wanted a number of at least 0 and below 1"),
        ({"learning_rate": float("nan")}, "learning_rate: got nan"),
        ({"train_fraction": 0.0}, "train_fraction: got 0.0, wanted more than 0"),
        ({"num_heads": 5}, "num_heads: got 5, wanted a divisor of dim = 192"),
        ({"size": "huge"}, "size: got 'huge', wanted one of tiny, small, base"),
        ({"method": "mixup"}, "method: got 'mixup', wanted "),
        ({"regime": ["free"]}, "regime: got 1 of them, wanted one, or one for each of 12 layers"),
        ({"learning_rat": 1}, "no field 'learning_rat'; did you mean 'learning_rate'?"),
    ],
)
def test_a_wrong_field_is_named(values, message):
    with pytest.raises(training.ConfigError, match=f"^here: {message.replace('?', '[?]')}"):
        TrainConfig.from_dict(values, "here")


@pytest.mark.parametrize("value", [torch.zeros(10**5), [0.5] * 10**5, {1: list(range(10**5))}, "x\n" * 10**5])
def test_an_array_in_a_field_is_not_printed(value):
    for name in settings():
        if isinstance(value, str) and name == "data_dir":
            continue  # text is what it takes; what it says is looked at later
        with pytest.raises(training.ConfigError, match=f"^{name}: got ") as caught:
            TrainConfig(**{name: value})
        assert len(str(caught.value)) < 500 and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 10**5])
def test_a_file_that_is_no_configuration_is_named(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(training.ConfigError, match="c.json"):
        TrainConfig.from_json(tmp_path / "c.json")


def test_every_field_is_a_flag_with_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    for name, setting in settings().items():
        assert f"--{name.replace('_', '-')} " in text or f"--{name.replace('_', '-')}," in text
        assert setting.help


def test_defaults_depend_on_the_data():
    assert TrainConfig(data="digits").model.patch_size == 2
    assert TrainConfig(data="cifar10", patch_size=8).model.patch_size == 8
    assert TrainConfig(data="folder").data.image_size == 224
    with pytest.raises(training.ConfigError, match="image_size: got 16, wanted 8"):
        TrainConfig(data="digits", image_size=16)
    with pytest.raises(training.ConfigError, match="patch_size: got 3, wanted a divisor of image_size = 8"):
        TrainConfig(data="digits", patch_size=3)
    other = TrainConfig(data="digits", shift=3).replace(data="cifar10")
    assert other.model.patch_size == 4 and other.data.shift == 3  # what was not asked for is the new data's own


def test_groups_and_single_settings_say_the_same():
    config = TrainConfig(
        data=DataConfig(name="cifar10", train_fraction=0.5),
        model=ViTConfig(image_size=32, patch_size=8, dim=64, num_heads=2),
        optim=OptimConfig(epochs=3),
        run=RunConfig(seed=4),
    )
    same = {"patch_size": 8, "dim": 64, "num_heads": 2, "epochs": 3, "seed": 4}
    assert config == TrainConfig(data="cifar10", train_fraction=0.5, **same)
    assert TrainConfig.from_dict(config.settings()) == TrainConfig.from_dict(config.to_dict()) == config
    assert config.replace(optim=OptimConfig(epochs=5), seed=1) == config.replace(epochs=5, seed=1)
    assert pickle.loads(pickle.dumps(config)) == config and hash(config) == hash(config.replace())
    assert TrainConfig(size="small").model.dim == TrainConfig().replace(size="small").model.dim == 384
    assert TrainConfig(dim=128).model.num_heads == TrainConfig().replace(dim=128).model.num_heads == 2


# What `TrainConfig(…).to_json()` wrote before there were groups.
OLD_JSON = """{
 "data": "digits", "data_dir": null, "fraction": 0.1, "image_size": 8, "workers": 2, "shift": 1, "flip": false,
 "crop": 1.0, "size": "tiny", "dim": 16, "heads": 2, "depth": 2, "patch_size": 2, "regime": "sharpen,free",
 "kind": "symmetric", "bounded": false, "norm": "pre", "norm_sign": null, "pool": "token", "method": "plain",
 "strength": null, "position_std": 0.02, "eigenvalue_size": null, "drop_path": 0.1, "epochs": 2, "batch_size": 32,
 "accumulate": 2, "learning_rate": 0.003, "final_learning_rate": 1e-05, "warmup": 0.5, "weight_decay": 0.05,
 "beta1": 0.9, "beta2": 0.999, "label_smoothing": 0.1, "clip": 1.0, "ema": 0.9, "precision": "float32",
 "recompute": false, "seed": 0, "device": "auto", "compile": false, "parallel": "ddp", "checkpoint_steps": 1,
 "timeout": 300.0, "tensorboard": false
}"""


def test_the_configuration_of_an_old_run_loads():
    assert TrainConfig.from_dict(json.loads(OLD_JSON)) == runs.TINY
    with pytest.warns(DeprecationWarning, match="TrainConfig: fraction is deprecated, use train_fraction"):
        assert TrainConfig(fraction=0.5).data.train_fraction == 0.5
    with pytest.warns(DeprecationWarning, match="TrainConfig.accumulate is deprecated, use TrainConfig.optim.grad_acc"):
        assert runs.TINY.accumulate == 2
    with pytest.raises(AttributeError, match="no attribute 'epoch'"):
        runs.TINY.epoch  # noqa: B018


@pytest.mark.parametrize("name", RENAMED)
def test_a_flag_of_one_release_ago_is_accepted(name, tmp_path):
    value = {"recompute": [], "parallel": ["fsdp"]}.get(name, ["1"])
    old, new = (f"--{word.replace('_', '-')}" for word in (name, RENAMED[name]))
    with pytest.warns(DeprecationWarning, match=f"overtone train: {old} is deprecated, use {new}"):
        assert cli.main(["train", "--out", str(tmp_path), "--data", "cifar10", old, *value]) == 2


def test_keyed_numbers_are_splitmix64():
    """The first two numbers of the generator seeded with zero, as its author's program prints them."""
    increment = rng._INCREMENT
    assert int(rng.hashed(0)) % 2**64 == 0xE220A8397B1DCDAF
    assert int(rng.hashed(increment)) % 2**64 == 0x6E789E6AA1B965F4


def test_keyed_numbers_are_uniform_and_depend_on_every_key():
    samples = torch.arange(10_000)
    values = rng.uniform(1, 2, samples)
    # The mean of n uniform numbers has a standard deviation of 1/√(12 n); six of them are not met by chance.
    assert abs(values.mean() - 0.5) < 6 / (12 * len(samples)) ** 0.5
    assert values.min() >= 0 and values.max() < 1
    for other in (rng.uniform(2, 2, samples), rng.uniform(1, 3, samples), rng.uniform(2, 1, samples)):
        correlation = torch.corrcoef(torch.stack((values, other)))[0, 1]
        assert abs(correlation) < 6 / len(samples) ** 0.5
    assert torch.equal(values[17:20], rng.uniform(1, 2, samples[17:20]))


def test_a_permutation_has_every_number_once():
    order = rng.permutation(1000, rng.ORDER, 5)
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert not torch.equal(order, rng.permutation(1000, rng.ORDER, 6))


def test_digits_are_split_evenly_and_the_same_for_every_seed():
    data = load_data(TrainConfig(data="digits"))
    assert len(data.train.labels) + len(data.test.labels) == 1797
    assert torch.equal(data.test.labels.unique(), torch.arange(10))
    shares = data.test.labels.bincount() / (data.test.labels.bincount() + data.train.labels.bincount())
    assert (shares - 0.2).abs().max() < 0.5 / 150  # a class has about 180 images
    again = load_data(TrainConfig(data="digits", seed=1))
    everything = torch.arange(len(data.test.labels))
    assert torch.equal(data.test.images(everything), again.test.images(everything))
    pixels = data.info.normalize(data.train.images(torch.arange(len(data.train.labels))))
    assert pixels.shape[1:] == (1, 8, 8)
    assert abs(pixels.mean()) < 0.05 and abs(pixels.std() - 1) < 0.05


def test_validation_images_are_training_images_and_no_test_image_is_seen():
    test, held_out = (load_data(TrainConfig(evaluate_on=name)) for name in ("test", "validation"))
    whole = {image.numpy().tobytes() for image in test.train.images(torch.arange(len(test.train.labels)))}
    parts = [
        {image.numpy().tobytes() for image in images.images(torch.arange(len(images.labels)))}
        for images in (held_out.train, held_out.test)
    ]
    assert parts[0] | parts[1] == whole and not parts[0] & parts[1]
    counts = torch.bincount(test.train.labels)
    assert torch.bincount(held_out.test.labels).tolist() == [round(0.2 * count) for count in counts.tolist()]
    part = load_data(TrainConfig(evaluate_on="validation", train_fraction=0.1))
    assert torch.equal(part.test.labels, held_out.test.labels), "a fraction is one of the training images only"


def test_saved_general_spectra_without_a_limit_have_none():
    config = TrainConfig(kind="general")
    assert TrainConfig.from_saved(config.to_dict(), "here") == config
    values = config.settings()
    del values["condition_limit"]
    assert TrainConfig.from_saved(values, "here").model.condition_limit is None
    assert TrainConfig.from_saved(values | {"kind": "symmetric"}, "here") == TrainConfig()


def test_a_smaller_fraction_is_part_of_a_larger_one():
    labels = torch.arange(1000) % 7
    half, _ = stratified(labels, 0.5, rng.FRACTION)
    tenth, rest = stratified(labels, 0.1, rng.FRACTION)
    assert set(tenth.tolist()) < set(half.tolist())
    assert len(tenth) == 98 and len(rest) == 902  # 14 of each of 7 classes of 142 or 143


LABEL_BYTES, IMAGES = 2, 3


@pytest.fixture
def small_cifar(tmp_path, monkeypatch) -> Cifar:
    """The layout of CIFAR-100 with three images a file, as an archive in tmp_path."""
    contents = {
        name: bytes((7 * position + offset) % 251 for position in range(IMAGES * (LABEL_BYTES + PIXELS)))
        for offset, name in enumerate(("train.bin", "test.bin"))
    }
    contents["names.txt"] = "\n".join(f"class{number}" for number in range(251)).encode()
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"inside/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))

    def described(content: bytes) -> File:
        return File(len(content), hashlib.sha256(content).hexdigest())

    small = cifar.CIFAR["cifar100"]._replace(
        archive="archive.tar.gz",
        archive_file=described((tmp_path / "archive.tar.gz").read_bytes()),
        folder="inside",
        train={"train.bin": described(contents["train.bin"])},
        test={"test.bin": described(contents["test.bin"])},
        names="names.txt",
        classes=251,
    )
    monkeypatch.setitem(cifar.CIFAR, "cifar100", small)
    return small


def load_small(folder) -> training.Data:
    return load_data(TrainConfig(data="cifar100", data_dir=str(folder)))


def test_cifar_is_read_from_the_archive_and_from_the_folder(small_cifar, tmp_path):
    packed = load_small(tmp_path)
    assert packed.train.labels.tolist() == [7 * (1 + image * (LABEL_BYTES + PIXELS)) % 251 for image in range(IMAGES)]
    image = packed.train.images(torch.tensor([1]))[0]
    start = LABEL_BYTES + PIXELS + LABEL_BYTES
    assert image[2, 31, 5] == 7 * (start + 2 * 1024 + 31 * 32 + 5) % 251  # planes of red, green and blue, row by row
    with tarfile.open(tmp_path / "archive.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    for folder in (tmp_path / "unpacked", tmp_path / "unpacked" / "inside"):
        unpacked = load_small(folder)
        assert torch.equal(unpacked.train.images(torch.arange(3)), packed.train.images(torch.arange(3)))


@pytest.mark.parametrize("damage", ["short", "changed"])
@pytest.mark.parametrize("file", ["archive.tar.gz", "train.bin"])
def test_damaged_cifar_is_refused_by_name(small_cifar, tmp_path, file, damage):
    folder = tmp_path
    if file == "train.bin":
        folder = tmp_path / "unpacked"
        with tarfile.open(tmp_path / "archive.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        folder /= "inside"
    content = bytearray((folder / file).read_bytes())
    content[100] ^= 1
    (folder / file).write_bytes(content[:-1] if damage == "short" else content)
    wanted = "bytes, wanted" if damage == "short" else "has SHA-256"
    with pytest.raises(DataError, match=rf"damaged: .*{file} .*{wanted}.*https://www.cs.toronto.edu"):
        load_small(folder)


def test_missing_data_says_what_and_where_from(tmp_path):
    with pytest.raises(DataError, match=r"missing: .*cifar-10-binary.tar.gz.*https://www.cs.toronto.edu"):
        load_data(TrainConfig(data="cifar10", data_dir=str(tmp_path)))
    with pytest.raises(DataError, match="data_dir is not given"):
        load_data(TrainConfig(data="cifar10"))
    with pytest.raises(DataError, match=f"missing: {tmp_path}/nowhere"):
        load_data(TrainConfig(data="folder", data_dir=f"{tmp_path}/nowhere"))


@pytest.fixture
def photographs(tmp_path):
    """Ten images of each of two classes, of one colour each."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow to make images")
    for number in range(20):
        folder = tmp_path / "data" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (12, 9), (number, 2 * number, 255)).save(folder / f"{number:02d}.png")
    return tmp_path / "data"


def test_a_folder_is_read_class_by_class(photographs):
    data = load_data(TrainConfig(data="folder", data_dir=str(photographs), image_size=8, patch_size=4))
    assert data.info.classes == ["cat", "dog"]
    assert (len(data.train.labels), len(data.test.labels)) == (16, 4)
    batches = list(data.train.batches([torch.tensor([0, 15]), torch.tensor([8])]))
    assert [batch.inputs.shape for batch in batches] == [(2, 3, 8, 8), (1, 3, 8, 8)]
    assert [batch.targets.tolist() for batch in batches] == [[0, 1], [1]]
    assert torch.equal(batches[1].inputs, data.train.images(torch.tensor([8])))
    red = data.train.images(torch.arange(16))[:, 0, 0, 0]
    assert (red % 2).tolist() == data.train.labels.tolist()  # even numbers are cats


def test_a_folder_with_a_split_keeps_it(photographs, tmp_path):
    (tmp_path / "both").mkdir()
    photographs.rename(tmp_path / "both" / "train")
    with pytest.raises(DataError, match="missing: .*/val"):
        load_data(TrainConfig(data="folder", data_dir=f"{tmp_path}/both", image_size=8, patch_size=4))
    for name in ("cat", "dog"):
        (tmp_path / "both" / "val" / name).mkdir(parents=True)
        source = next((tmp_path / "both" / "train" / name).iterdir())
        source.rename(tmp_path / "both" / "val" / name / source.name)
    data = load_data(TrainConfig(data="folder", data_dir=f"{tmp_path}/both", image_size=8, patch_size=4))
    assert (len(data.train.labels), len(data.test.labels)) == (18, 2)


def test_an_image_that_is_none_is_named(photographs):
    (photographs / "cat" / "00.png").write_text("no image")
    (photographs / "empty").mkdir()
    with pytest.raises(DataError, match="empty has no image"):
        load_data(TrainConfig(data="folder", data_dir=str(photographs)))
    (photographs / "empty").rmdir()
    data = load_data(TrainConfig(data="folder", data_dir=str(photographs), image_size=8, patch_size=4))
    with pytest.raises(DataError, match="cannot read image .*00.png"):
        for images in (data.train, data.test):
            images.images(torch.arange(len(images.labels)))


def test_augmentation_does_not_depend_on_the_batch():
    config = DataConfig(shift=2, flip=True, crop=0.5)
    images = torch.randint(0, 256, (16, 3, 12, 12), dtype=torch.uint8)
    samples = torch.randperm(100)[:16]
    together = augment(images, samples, 3, config, 0)
    alone = torch.cat([augment(images[i : i + 1], samples[i : i + 1], 3, config, 0) for i in range(16)])
    assert torch.equal(together, alone)
    assert not torch.equal(together, augment(images, samples, 4, config, 0))


def test_shifts_and_flips_move_pixels_and_nothing_else():
    images = torch.arange(1, 26, dtype=torch.uint8).view(1, 1, 5, 5).expand(200, 1, 5, 5)
    moved = augment(images, torch.arange(200), 0, DataConfig(shift=1, flip=True, crop=1.0), 0)
    padded = torch.nn.functional.pad(images[0, 0], (1, 1, 1, 1))
    shifted = [padded[row : row + 5, column : column + 5] for row in range(3) for column in range(3)]
    possible = {tuple(view.flatten().tolist()) for one in shifted for view in (one, one.flip(1))}
    assert {tuple(image.flatten().tolist()) for image in moved} == possible  # all 18 of them occur


def test_a_crop_of_everything_is_the_image_and_smaller_ones_are_inside():
    images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).repeat(50, 3, 1, 1)
    assert torch.equal(augment(images, torch.arange(50), 0, DataConfig(crop=1.0), 0), images)
    cropped = augment(images, torch.arange(50), 0, DataConfig(crop=0.25), 0)
    # The image is a plane, v = 8 row + column: a crop of side s in [1/2, 1] is one with s times the slope.
    slopes = (cropped[:, 0, 7, 4].float() - cropped[:, 0, 0, 4]) / (7 * 8)
    assert slopes.min() >= 0.5 - 1 / 56 and slopes.max() <= 1 + 1 / 56
    assert slopes.max() - slopes.min() > 0.3


def test_the_learning_rate_rises_and_follows_half_a_cosine():
    config = OptimConfig(epochs=10, warmup_epochs=2, learning_rate=1.0, min_learning_rate=0.1)
    rates = [learning_rate(step, 5, config) for step in range(50)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0) and rates[-1] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(0, 5, dataclasses.replace(config, warmup_epochs=0.0)) == 1.0


def test_only_matrices_decay():
    model = training.build_model(runs.TINY, load_data(runs.TINY).info)
    decayed, others = build_optimizer(model, runs.TINY.optim).param_groups
    names = {id(value): name for name, value in model.named_parameters()}
    assert others["weight_decay"] == 0 and decayed["weight_decay"] == runs.TINY.optim.weight_decay
    kept = {names[id(value)] for value in others["params"]}
    assert {"pos_embed", "cls_token", "head.bias", "blocks.0.norm1.weight", "blocks.0.attn.spectrum.basis"} <= kept
    assert "head.weight" in {names[id(value)] for value in decayed["params"]}
    assert len(names) == len(decayed["params"]) + len(others["params"])


def test_the_average_is_applied_and_taken_back_to_the_bit():
    model = torch.nn.Linear(3, 2)
    average = EMA(model, 0.9)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    average.update(step=10**6)
    changed = model.weight.detach().clone()
    with average.swapped_in():
        torch.testing.assert_close(model.weight, start + 0.1)
    assert torch.equal(model.weight, changed)


def test_bfloat16_that_would_crash_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "bf16_matmul_works", lambda: False)
    with pytest.raises(training.ConfigError, match="ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
        training.train(runs.TINY.replace(precision="bfloat16", device="cpu"), tmp_path / "run")


def test_json_is_what_the_file_holds():
    assert json.loads(TrainConfig().to_json()) == TrainConfig().to_dict()
