"""The files of a run: damage never passes, the disk may fill up at any byte, and permissions follow the umask."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import stat
import sys
from pathlib import Path

import pytest
import torch
from support import runs

from overtone import cli
from overtone.training import CheckpointError, TrainingError, checkpoint, load_model, model, train

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = runs.TINY.replace(checkpoint_steps=0, grad_accumulation=1, drop_path=0.0, ema=0.0, epochs=1)
STATE = {"step": 3, "seconds": 0.5, "config": {"seed": 0}, "history": [{"loss": 1e-300, "worst": float("inf")}]}


def tensors() -> dict[str, torch.Tensor]:
    """Every dtype and kind of shape that a run may hold."""
    found = {str(dtype): torch.arange(5).to(dtype) for dtype in (torch.float32, torch.float64, torch.int64, torch.bool)}
    found |= {"half": torch.linspace(-1, 1, 6).view(2, 3).bfloat16(), "one": torch.tensor(7.0), "none": torch.empty(0)}
    return found


@pytest.fixture
def file(tmp_path) -> Path:
    checkpoint.write_tensors(tmp_path / "x.safetensors", tensors(), STATE)
    return tmp_path / "x.safetensors"


def check_exact_or_refused(file: Path, content: bytes) -> bool:
    """A load of this content gives what was written, or one line. Whether it was refused."""
    file.write_bytes(content)
    try:
        state, found = checkpoint.read_run(file), checkpoint.read_tensors(file)
    except CheckpointError as error:
        assert str(file) in str(error) and len(str(error).splitlines()) == 1 and len(str(error)) < 600
        return True
    assert {name: state[name] for name in STATE} == STATE
    expected = tensors()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)
    return False


def test_a_state_survives_writing(file):
    assert not check_exact_or_refused(file, file.read_bytes())


def test_a_flipped_bit_never_passes(file):
    """Two bits of every byte of the file. Those that change nothing (a space of the header) may load."""
    whole, draw = file.read_bytes(), random.Random(0)
    refused = 0
    for place in range(len(whole)):
        for bit in draw.sample(range(8), 2):
            content = bytearray(whole)
            content[place] ^= 1 << bit
            refused += check_exact_or_refused(file, bytes(content))
    assert refused > 0.95 * 2 * len(whole)


def test_no_other_damage_passes(file):
    """Cut off, extended, parts exchanged, overwritten, left out and repeated, at any place."""
    whole, draw = file.read_bytes(), random.Random(0)
    for _ in range(300):
        start, middle, end = sorted(draw.randrange(len(whole) + 1) for _ in range(3))
        first, second, noise = whole[start:middle], whole[middle:end], draw.randbytes(end - start)
        for content in (
            whole[:start],
            whole + noise[:64],
            whole[:start] + second + first + whole[end:],
            whole[:start] + noise + whole[end:],
            whole[:start] + whole[end:],
            whole[:end] + whole[start:],
        ):
            if content != whole:
                check_exact_or_refused(file, content)


@pytest.mark.parametrize("state", [None, "", "[", "[]", "[" * 10**5, "{}", '{"config": {}, "data": {}}', "NaN"])
def test_a_hostile_header_is_one_line(tmp_path, state):
    """Without a checksum anything may be there, as in files of the time before there was one."""
    from safetensors.torch import save_file

    for name in (checkpoint.CHECKPOINT, checkpoint.WEIGHTS):
        save_file({"x": torch.zeros(1)}, tmp_path / name, None if state is None else {"state": state})
    for load in (lambda: train(QUICK, tmp_path, resume=True, progress=False), lambda: load_model(tmp_path)):
        with pytest.raises(CheckpointError) as caught:
            load()
        assert str(tmp_path) in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("changes", [{"depth": 10**9}, {"dim": 2**20}, {"classes": ["x"] * 10**6}, {"precision": 3}])
def test_a_model_file_that_names_another_size_builds_nothing(monkeypatch, tmp_path, changes):
    train(QUICK, tmp_path, progress=False)
    path = tmp_path / checkpoint.WEIGHTS
    state, found = checkpoint.read_state(path), checkpoint.read_tensors(path)
    for name, value in changes.items():
        state["data" if name == "classes" else "config"][name] = value
    checkpoint.write_tensors(tmp_path / "hostile.safetensors", found, state)
    monkeypatch.setattr(model, "build_model", None)
    with pytest.raises(TrainingError) as caught:
        load_model(tmp_path / "hostile.safetensors")
    assert "hostile.safetensors: " in str(caught.value) and len(str(caught.value).splitlines()) == 1


def without_checksums(folder: Path) -> None:
    """Make a run's files those of the first version."""
    from safetensors.torch import save_file

    for path in (folder / checkpoint.CHECKPOINT, folder / checkpoint.WEIGHTS):
        state, found = checkpoint.read_state(path), checkpoint.read_tensors(path)
        state.pop("data_sha256", None)
        state["config"]["run"].pop("compile")
        save_file({name: value.clone() for name, value in found.items()}, path, {"state": json.dumps(state)})


def test_files_without_checksums_load_with_a_note(capsys, monkeypatch, tmp_path):
    config = QUICK.replace(checkpoint_steps=1)
    train(config, tmp_path / "whole", progress=False)
    write, written = checkpoint.write_tensors, []

    def stopping_write(path, *arguments):
        write(path, *arguments)
        written.append(path)
        if len(written) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "write_tensors", stopping_write)
        train(config, tmp_path / "old", progress=False)
    (tmp_path / "old" / checkpoint.WEIGHTS).write_bytes((tmp_path / "whole" / checkpoint.WEIGHTS).read_bytes())
    without_checksums(tmp_path / "old")
    load_model(tmp_path / "old")
    assert capsys.readouterr().err.count("without checksums") == 1
    train(config, tmp_path / "old", resume=True, progress=False)
    error = capsys.readouterr().err
    assert (
        error.count("without checksums: damage, or other data than the run's, would not be noticed\n") == 1
        and "resumed at step 2" in error
    )
    runs.check_same_bits(tmp_path / "old", tmp_path / "whole")
    load_model(tmp_path / "old")
    assert capsys.readouterr().err == ""


def test_an_old_checkpoint_whose_tensors_do_not_fit_is_refused(tmp_path):
    """Copying would broadcast a tensor of one element over a parameter."""
    from safetensors.torch import save_file

    train(QUICK, tmp_path, progress=False)
    path = tmp_path / checkpoint.CHECKPOINT
    whole, state = checkpoint.read_tensors(path), checkpoint.read_state(path)
    state["history"] = []
    for name in ("model.head.bias", "optimizer.head.bias.exp_avg", "optimizer.head.bias.step", "sums"):
        for changed in ({}, {name: torch.zeros(1)}):
            rest = {key: value.clone() for key, value in whole.items() if key != name}
            save_file(rest | changed, path, {"state": json.dumps(state)})
            with pytest.raises(CheckpointError, match=f"the checkpoint's tensor {name}: got .*, wanted shape"):
                train(QUICK, tmp_path, resume=True, progress=False)


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_permissions_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        train(QUICK.replace(tensorboard=True), tmp_path / "a" / "run", progress=False)
    finally:
        os.umask(before)
    found = list((tmp_path / "a").rglob("*"))
    assert len(found) >= 7
    for path in found:
        wanted = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def train_on_a_full_disk(folder: Path, most: int) -> None:
    """No file may become larger than `most` bytes; exits with the command's status."""
    from training.test_run import flags

    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        status = cli.main(["train", "--out", str(folder), "--resume", *flags(runs.TINY)])
    (line,) = [line for line in said.getvalue().splitlines() if line.startswith("overtone train: ")]
    assert "cannot be written" in line and "Traceback" not in said.getvalue()
    sys.exit(status)


def test_a_disk_that_fills_up_at_any_file(tmp_path):
    """The command says so with status 2, leaves no part of a file, and goes on once there is room."""
    train(runs.TINY, tmp_path / "whole", progress=False)
    sizes = sorted({path.stat().st_size for path in (tmp_path / "whole").iterdir() if path.stat().st_size})
    assert len(sizes) >= 4
    folder = tmp_path / "full"
    for size in sizes:
        # A checkpoint's header has figures that were measured: their digits make it a few bytes longer or shorter.
        assert runs.statuses(runs.start(train_on_a_full_disk, folder, size - 64)) == [2]
        assert not [path for path in folder.iterdir() if "draft" in path.name or path.name.startswith(".tmp")]
    train(runs.TINY, folder, resume=True, progress=False)
    runs.check_same_bits(folder, tmp_path / "whole")


@pytest.mark.parametrize("place", ["file", "file/inside", "read only", "read only/inside"])
def test_a_folder_that_cannot_be_is_one_line(capsys, monkeypatch, tmp_path, place):
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "read only").mkdir()
    make, open_ = Path.mkdir, Path.open

    def refuse(call):
        def refusing(path, *arguments, **options):
            if "read only" in str(path) and not path.exists():
                raise OSError(30, "Read-only file system", str(path))
            return call(path, *arguments, **options)

        return refusing

    # The superuser, who may run the tests, writes wherever permissions forbid it.
    monkeypatch.setattr(Path, "mkdir", refuse(make))
    monkeypatch.setattr(Path, "open", refuse(open_))
    for options in ([], ["--resume"]):
        assert cli.main(["train", "--out", str(tmp_path / place), "--dim", "16", *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"overtone train: {tmp_path / place}: cannot be a run's folder: ")
        assert len(error.splitlines()) == 1 and ("is a file" in error) == place.startswith("file")


def test_too_little_memory_says_which_line_wanted_how_much(capsys, tmp_path):
    """No machine addresses the 2⁴⁶ · 3 numbers of such a layer."""
    assert cli.main(["train", "--out", str(tmp_path), "--dim", str(2**23), "--no-tensorboard"]) == 2
    error = capsys.readouterr().err
    assert f"wanted {3 * 2**48} bytes" in error and "torch.empty(" in error and len(error.splitlines()) == 1
