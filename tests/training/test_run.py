"""One run in this process: what it leaves behind, how it stops, and the trained model it gives back."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from support import runs
from torch._dynamo import lookup_backend

from overtone import cli, hardware, training
from overtone.training import CheckpointError, checkpoint, load_model, logging, train, trainer
from overtone.training.config import Setting, settings
from overtone.training.distributed import Distributed
from overtone.training.optim import learning_rate
from overtone.training.run_folder import identified_data
from overtone.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = runs.TINY.replace(checkpoint_steps=0, grad_accumulation=1, drop_path=0.0, ema=0.0, epochs=1)


def flags(config: training.TrainConfig) -> list[str]:
    """The command line that gives this configuration."""
    return [word for name, value in config.settings().items() if value is not None for word in flag(name, value)]


def flag(name: str, value: object) -> list[str]:
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", ",".join(value) if isinstance(value, tuple) else str(value)]


def test_the_command_line_leaves_a_whole_run(capsys, tmp_path):
    config = runs.TINY.replace(tensorboard=True)
    assert cli.main(["train", "--out", str(tmp_path / "run"), *flags(config)]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert "regime=sharpen,free" in output.out  # the configuration is printed
    assert lines[-2].startswith("test accuracy ") and lines[-1] == f"Run: {tmp_path / 'run'}"
    assert "images/s" in output.err and "HFC/LFC" in output.err  # the progress bar
    assert training.TrainConfig.from_json(tmp_path / "run" / "config.json") == config
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert all(float(row[logging.ratio_column(layer)]) > 0 for row in rows for layer in (1, 2))
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert not list((tmp_path / "run").glob("*.draft"))
    # The same command again would repeat it: refused; with --resume there is nothing left to do.
    assert cli.main(["train", "--out", str(tmp_path / "run"), *flags(config)]) == 2
    assert "holds a run already" in capsys.readouterr().err
    before = (tmp_path / "run" / checkpoint.CHECKPOINT).stat().st_mtime_ns
    assert cli.main(["train", "--out", str(tmp_path / "run"), "--resume", *flags(config)]) == 0
    assert (tmp_path / "run" / checkpoint.CHECKPOINT).stat().st_mtime_ns == before


def test_a_configuration_file_and_flags_over_it(capsys, tmp_path):
    (tmp_path / "c.json").write_text(QUICK.to_json())
    arguments = ["--config", str(tmp_path / "c.json"), "--seed", "3", "--no-tensorboard"]
    assert cli.main(["train", "--out", str(tmp_path / "run"), *arguments]) == 0
    assert training.load_config(tmp_path / "run") == QUICK.replace(seed=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "cifar10"], "cifar10: data_dir is not given"),
        (["--regime", "wild"], "regime"),
        (["--config", "nowhere.json"], "nowhere.json"),
        (["--device", "cuda"], "torch finds no GPU"),
        (["--train-fraction", "0.01", "--batch-size", "64"], "at most the 10 training images"),
        (["--batch-size", "30", "--grad-accumulation", "4"], "a multiple of grad_accumulation × processes = 4"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, tmp_path, arguments, message):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert cli.main(["train", "--out", str(tmp_path / "run"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("overtone train: ") and message in error and len(error.splitlines()) == 1


def test_the_trained_model_comes_back(tmp_path):
    config = QUICK.replace(ema=0.5, regime="smooth")
    result = train(config, tmp_path, progress=False)
    model = load_model(tmp_path)
    assert not model.training
    data = training.load_data(config)
    images = data.test.images(torch.arange(len(data.test.labels)))
    with torch.no_grad():
        right = model(training.load_info(tmp_path).normalize(images)).argmax(1) == data.test.labels
    assert right.double().mean().item() == result.test_accuracy  # the averaged weights, as they were tested
    saved = checkpoint.read_tensors(tmp_path / checkpoint.CHECKPOINT)
    assert torch.equal(model.head.weight, saved["average.head.weight"])
    assert not torch.equal(model.head.weight, saved["model.head.weight"])


def test_training_learns_and_leaves_the_generator_alone(tmp_path):
    before = torch.get_rng_state()
    config = QUICK.replace(epochs=8, shift=0, patch_size=4, pool="mean", learning_rate=1e-2)
    result = train(config, tmp_path, progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert result.history[-1]["train_loss"] < 0.8 * result.history[0]["train_loss"]
    assert result.test_accuracy > 0.5  # chance is 0.1


def test_parts_of_a_step_and_recomputing_change_nothing(tmp_path):
    config = QUICK.replace(precision="float64")
    train(config, tmp_path / "whole", progress=False)
    train(config.replace(grad_accumulation=4, grad_checkpointing=True), tmp_path / "parts", progress=False)
    (tensors, _), (expected, _) = runs.outcome(tmp_path / "parts"), runs.outcome(tmp_path / "whole")
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_bfloat16_trains(tmp_path):
    if not hardware.bf16_matmul_works():
        pytest.skip("bfloat16 matrix products crash on this CPU")
    result = train(QUICK.replace(precision="bfloat16"), tmp_path, progress=False)
    plain = train(QUICK, tmp_path / "plain", progress=False)
    assert load_model(tmp_path).head.weight.dtype == torch.float32
    assert result.history != plain.history
    # One rounding of a logit to bfloat16 is 2⁻⁸ of it, and logits after four steps are below 1.
    assert result.history[0]["test_loss"] == pytest.approx(plain.history[0]["test_loss"], abs=0.05)


@pytest.mark.parametrize(("checkpoint_steps", "last"), [(0, "no checkpoint was written yet"), (1, "of step 2, is")])
def test_a_loss_that_is_not_finite_stops_the_run(monkeypatch, tmp_path, checkpoint_steps, last):
    update = Trainer._step

    def poisoned(self, *arguments):
        if self.step == 2:
            with torch.no_grad():
                self.model.head.bias[0] = float("nan")
        update(self, *arguments)

    monkeypatch.setattr(Trainer, "_step", poisoned)
    with pytest.raises(training.DivergedError, match=f"loss of the epoch is nan.*{last}"):
        train(QUICK.replace(checkpoint_steps=checkpoint_steps), tmp_path, progress=False)
    if checkpoint_steps:
        tensors = checkpoint.read_tensors(tmp_path / checkpoint.CHECKPOINT)
        assert all(value.isfinite().all() for value in tensors.values())


def test_a_gradient_that_is_not_finite_stops_the_run(monkeypatch, tmp_path):
    """The weights never see it, however late it is noticed, and the error names the step."""
    weights = []

    def poisoned(scores, *_):
        weights.append(scores.detach().clone())
        total = scores.sum() - scores.sum().detach()
        return total.sqrt() if len(weights) > 2 else total

    monkeypatch.setattr(trainer, "loss_of", poisoned)
    monkeypatch.setattr(Trainer, "_finish_epoch", lambda *_: None)
    run = Trainer(QUICK, tmp_path, *parts_of_a_trainer(QUICK, tmp_path))
    run.look_steps = 4
    with pytest.raises(training.DivergedError, match="stopped at step 2 of 4: .* the gradient is not finite"):
        run.run(progress=False)
    assert run.step == 4  # the epoch's last step looks at once
    assert all(value.isfinite().all() for value in run.model.parameters())
    steps = {int(state["step"]) for state in run.optimizer.state.values()}
    assert steps == {2}


def parts_of_a_trainer(config: training.TrainConfig, folder: Path) -> tuple:
    data, images = identified_data(folder, config, None)
    return Distributed(config), data, images


def test_another_run_is_not_continued(capsys, tmp_path):
    train(QUICK, tmp_path, progress=False)
    other = QUICK.replace(seed=1, depth=3, regime="free")
    with pytest.raises(CheckpointError, match="differ .saved, requested.: depth: 2, 3; regime: .*; seed: 0, 1$"):
        train(other, tmp_path, resume=True, progress=False)
    # Options that do not go together with the run's.
    assert cli.main(["train", "--out", str(tmp_path), "--resume", "--depth", "3"]) == 2
    assert "these settings differ (saved, requested): depth: 2, 3\n" in capsys.readouterr().err


def stop_after(monkeypatch, epochs: int) -> None:
    """Every run ends like a killed one after so many epochs of its own."""
    finish = Trainer._finish_epoch

    def finish_and_stop(self, *arguments):
        finish(self, *arguments)
        if len(self.history) == epochs:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_finish_epoch", finish_and_stop)


def test_resume_needs_no_other_option(capsys, monkeypatch, tmp_path):
    """The run's own configuration counts, whatever it is, also before its first checkpoint."""
    config = runs.TINY.replace(seed=3, num_workers=1, timeout=100.0)
    train(config, tmp_path / "whole", progress=False)
    resume = ["train", "--out", str(tmp_path / "run"), "--resume"]
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert cli.main(["train", "--out", str(tmp_path / "run"), *flags(config)]) == 130
    assert "--resume" in capsys.readouterr().err
    assert cli.main(resume) == 0
    runs.check_same_bits(tmp_path / "run", tmp_path / "whole")
    (tmp_path / "run" / checkpoint.CHECKPOINT).unlink()
    assert cli.main(resume) == 0
    runs.check_same_bits(tmp_path / "run", tmp_path / "whole")
    assert training.load_config(tmp_path / "run") == config


def test_resume_without_a_run_says_so(capsys, tmp_path):
    assert cli.main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 2
    assert "run: there is no run to resume" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def other_value(setting: Setting, value: object) -> object:
    """A value that the setting may also have."""
    words = {
        "regime": "smooth", "kind": "general", "norm": "post", "pool": "mean", "method": "feat_scale",
        "filter_place": "residual", "num_heads": 4, "patch_size": 4, "norm_sign": -1,
    }  # fmt: skip
    if setting.name in words:
        return words[setting.name]
    if not isinstance(setting.kinds[0], type):
        return next(choice for choice in setting.kinds if choice != value)
    return {bool: not value, int: 4, float: 0.25 if setting.name != "condition_limit" else 3.5}[setting.kinds[0]]


# A strength and a filter's place belong to a method that has them; digits have no other image_size.
TOGETHER = {"depth": {"regime": "free"}, "strength": {"method": "contranorm"}, "filter_place": {"method": "contranorm"}}


@pytest.mark.parametrize("where", ["flag", "file"])
def test_another_option_than_the_runs_is_refused_with_both_values(capsys, tmp_path, where):
    """Every setting that decides the result, given as a flag or in a file."""
    ours = runs.TINY.settings().keys() - {"data", "image_size", "epochs"}
    decisive = [setting for setting in settings().values() if setting.affects_result and setting.name in ours]
    assert len(decisive) > 30
    for setting in decisive:
        run = runs.TINY.replace(epochs=1, **TOGETHER.get(setting.name, {}))
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "config.json").write_text(run.to_json())
        value = run.settings()[setting.name]
        other = other_value(setting, value)
        arguments = flag(setting.name, other)
        if where == "file":
            (tmp_path / "c.json").write_text(json.dumps(run.settings() | {setting.name: other}))
            arguments = ["--config", str(tmp_path / "c.json")]
        assert cli.main(["train", "--out", str(tmp_path / "run"), "--resume", *arguments]) == 2, setting.name
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        shown = ",".join(value) if isinstance(value, tuple) else value
        assert f"these settings differ (saved, requested): {setting.name}: {shown!r}, {other!r}" in error


def test_more_epochs_make_a_longer_run(capsys, monkeypatch, tmp_path):
    """From the end or from the middle, in one go or interrupted: the learning rates are those of the longer run."""
    resume = ["train", "--out", str(tmp_path / "run"), "--resume"]
    train(runs.TINY, tmp_path / "run", progress=False)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    capsys.readouterr()
    assert cli.main([*resume, "--epochs", "4"]) == 0
    error = capsys.readouterr().err
    rates = [learning_rate(8, 4, runs.TINY.replace(epochs=epochs).optim) for epochs in (2, 4)]
    assert "epochs: 2 become 4: from here the cosine is that of the longer run" in error
    assert f"the learning rate goes from {rates[0]:.3g} to {rates[1]:.3g}" in error and rates[0] < rates[1]
    assert "not that of 4 epochs from the start" in error
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    longer = runs.TINY.replace(epochs=4).optim
    assert [float(row["learning_rate"]) for row in rows[2:]] == [learning_rate(step, 4, longer) for step in (11, 15)]
    # Interrupted right after the extension, and between epochs; --resume alone knows the new length.
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert cli.main(["train", "--out", str(tmp_path / "again"), "--resume", "--epochs", "4"]) == 130
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert cli.main(["train", "--out", str(tmp_path / "again"), "--resume"]) == 130
    assert cli.main(["train", "--out", str(tmp_path / "again"), "--resume"]) == 0
    runs.check_same_bits(tmp_path / "again", tmp_path / "run")
    capsys.readouterr()
    assert cli.main([*resume, "--epochs", "2"]) == 2
    assert "these settings differ (saved, requested): epochs: 4, 2" in capsys.readouterr().err


def compiled_by(monkeypatch, backend: str) -> list[str]:
    """torch.compile with another backend; the list gets an entry per graph."""
    graphs: list[str] = []
    compile_ = torch.compile

    def counted(graph, inputs):
        graphs.append(str(graph.graph))
        return lookup_backend(backend)(graph, inputs)

    monkeypatch.setattr(
        torch, "compile", lambda model, dynamic, options: compile_(model, dynamic=dynamic, backend=counted)
    )
    return graphs


def check_compiled_runs(monkeypatch, folder, config: training.TrainConfig) -> None:
    """A compiled run has ordinary names, resumes bit for bit, and differs from the other by rounding only."""
    config = config.replace(compile=True, precision="float64")
    train(config, folder / "whole", progress=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 1)
        train(config, folder / "run", progress=False)
    torch.compiler.reset()  # a new process has compiled nothing
    train(config, folder / "run", resume=True, progress=False)
    runs.check_same_bits(folder / "run", folder / "whole")
    train(config.replace(compile=False), folder / "plain", progress=False)
    (tensors, _), (expected, _) = runs.outcome(folder / "whole"), runs.outcome(folder / "plain")
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-9, atol=1e-9, msg=name)
    assert training.load_config(folder / "run").run.compile
    assert load_model(folder / "run").state_dict().keys() == load_model(folder / "plain").state_dict().keys()


def test_a_compiled_run(monkeypatch, tmp_path):
    graphs = compiled_by(monkeypatch, "eager")
    check_compiled_runs(monkeypatch, tmp_path, runs.TINY.replace(depth=1, regime="sharpen"))
    assert graphs


@pytest.mark.slow
def test_a_run_compiled_by_inductor(monkeypatch, tmp_path):
    check_compiled_runs(monkeypatch, tmp_path, runs.TINY)


def test_a_compiler_that_fails_is_one_line(capsys, monkeypatch, tmp_path):
    def broken(graph, inputs):
        raise ValueError("no compiler\nhere")

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, dynamic, options: compile_(model, backend=broken))
    assert cli.main(["train", "--out", str(tmp_path), "--compile", *flags(QUICK.replace(compile=True))]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("overtone train: compile: torch.compile fails here: ") and "no compiler here" in line


def test_two_processes_do_not_share_a_folder(tmp_path):
    with checkpoint.locked(tmp_path), pytest.raises(CheckpointError, match="another process is training here"):
        train(QUICK, tmp_path, progress=False)


@pytest.mark.parametrize("damage", ["short", "nothing", "foreign"])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    train(QUICK, tmp_path, progress=False)
    for name in (checkpoint.CHECKPOINT, checkpoint.WEIGHTS):
        path = tmp_path / name
        if damage == "foreign":
            from safetensors.torch import save_file

            save_file({"x": torch.zeros(1)}, path)
        else:
            path.write_bytes(path.read_bytes()[: -1 if damage == "short" else 0])
    message = ": not written by overtone" if damage == "foreign" else " is damaged"
    with pytest.raises(CheckpointError, match=f"{checkpoint.CHECKPOINT}{message}"):
        train(QUICK, tmp_path, resume=True, progress=False)
    with pytest.raises(CheckpointError, match=f"{checkpoint.WEIGHTS}{message}"):
        load_model(tmp_path)


def test_no_model_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no trained model there"):
        load_model(tmp_path)


def test_without_tensorboard_it_says_so_once(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr(logging.TensorBoardLogger, "_warned", False)
    with pytest.warns(UserWarning, match=r"pip install 'overtone\[tensorboard\]'") as said:
        for name in ("one", "two"):
            train(QUICK.replace(tensorboard=True), tmp_path / name, progress=False)
    assert len(said) == 1


def test_the_command_line_works_without_the_extra_packages(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["train", "--out", str(tmp_path)]) == 2
    assert "training needs safetensors and tqdm: pip install 'overtone[study]'" in capsys.readouterr().err


def test_the_profile_of_layers_is_drawn():
    assert logging.profile([2.0, 1.0, 0.0]) == "2.00 █▄▁ 0.00"
    assert logging.profile([1.0, float("inf"), float("nan")]) == "1.00 ██▁ nan"
    assert logging.profile([0.5]) == "0.50"


def test_the_state_of_a_checkpoint_is_json(tmp_path):
    train(QUICK, tmp_path, progress=False)
    state = checkpoint.read_state(tmp_path / checkpoint.CHECKPOINT)
    assert json.loads(json.dumps(state)) == state
    assert state["step"] == 4 and len(state["history"]) == 1
