"""The command line: every command has help, mistakes are one line with status 2, and info tells the truth."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import overtone as ot
from overtone import _extension, cli


def run(capsys, *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n    {command} " in text for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    assert exit_.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


@pytest.mark.parametrize("arguments", [["nonsense"], ["info", "--nonsense"], ["study", "--seeds", "x"]])
def test_a_mistake_is_one_line_and_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert "--help" in output.err


def test_a_backend_that_cannot_run_is_one_line_and_status_2(capsys):
    with ot.use_backend("cuda"):
        assert cli.main(["study"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("overtone study: spectral_attention: backend 'cuda' cannot run")
    assert len(error.splitlines()) == 1


def test_without_a_command_it_greets_and_shows_where_to_begin(capsys):
    text = run(capsys)
    assert ot.__version__ in text and text.count("\n  overtone ") == 3
    for name, status in ot.backends().items():
        assert f"  {name} " in text and status.detail in text


@pytest.mark.parametrize("command", cli.FIRST_COMMANDS)
def test_the_first_commands_are_understood(command):
    assert callable(cli.parser().parse_args(command.split()[1:]).run)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"overtone {ot.__version__}\n"


def test_python_m_overtone_is_the_same_command():
    result = subprocess.run([sys.executable, "-m", "overtone", "--help"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("usage: overtone ")


@pytest.mark.parametrize("buffering", ["", "1"])
def test_a_reader_that_stops_early_is_no_error(monkeypatch, buffering):
    monkeypatch.setenv("PYTHONUNBUFFERED", buffering)
    command = f"'{sys.executable}' -m overtone info | true"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("buffering", ["", "1"])
def test_an_output_that_has_no_room_is_one_line(monkeypatch, buffering):
    monkeypatch.setenv("PYTHONUNBUFFERED", buffering)
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "overtone", "info"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "overtone info: No space left on device\n")


def test_info_as_json(capsys, monkeypatch):
    monkeypatch.setenv("OVERTONE_CPU_ISA", "baseline")
    information = json.loads(run(capsys, "info", "--json"))
    assert information["versions"]["overtone"] == ot.__version__
    assert information["versions"]["torch"] == torch.__version__
    assert information["environment"]["OVERTONE_CPU_ISA"] == "baseline"
    assert {name: status["available"] for name, status in information["backends"].items()} == {
        name: status.available for name, status in ot.backends().items()
    }
    assert information["kernels"]["frequency_norms"]["cpu"] == ["float32", "float64", "bfloat16", "float16"]


def test_info_says_how_the_extension_was_built(capsys, cpu_kernels):
    information = json.loads(run(capsys, "info", "--json"))
    assert information["extension"] == cpu_kernels.build_info()
    assert information["cpu"]["level in use"] == cpu_kernels.isa()
    present = set(information["cpu"]["features"])
    assert ("avx512" in cpu_kernels.available_isas()) <= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}.issubset(
        present
    )


def test_info_without_the_extension_says_why(capsys, monkeypatch):
    monkeypatch.setattr(_extension, "module", None)
    monkeypatch.setattr(_extension, "load_error", "it was left out")
    text = run(capsys, "info")
    assert "missing" in text
    assert "not available: it was left out" in text


def test_info_as_text_names_every_backend_and_op(capsys):
    text = run(capsys, "info")
    for status in ot.backends().values():
        assert status.detail in text
    assert "frequency_filter" in text


def test_old_spellings_of_flags_work_with_a_warning(capsys):
    arguments = cli.parser().parse_args(["kernels", "--model", "--every", "7"])
    assert arguments.cost and arguments.sample_every == 7
    error = capsys.readouterr().err.splitlines()
    assert error == [
        "overtone kernels: --model is deprecated, use --cost",
        "overtone kernels: --every is deprecated, use --sample-every",
    ]
    arguments = cli.parser().parse_args(["kernels", "--cost"])
    assert arguments.cost and arguments.sample_every == 1 and not capsys.readouterr().err
