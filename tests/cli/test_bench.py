"""`overtone bench`: what it runs, prints and returns."""

from __future__ import annotations

import argparse
import json
import re
from types import SimpleNamespace

import pytest
import torch
from support.benchmark_cases import case, wrong_square

import overtone as ot
from overtone.benchmarks.harness import machine, runner
from overtone.benchmarks.harness.case import Case, with_compiled
from overtone.cli import bench

pytestmark = pytest.mark.usefixtures("quiet_machine")


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", *arguments])
    return args.run(args)


@pytest.fixture
def only(monkeypatch):
    """Make these the only cases, on a machine that others use as much as given."""

    def install(*cases: Case, other_cpu_load: float = 0.0) -> None:
        monkeypatch.setattr(runner, "all_cases", lambda: list(cases))
        monkeypatch.setattr(bench, "_standard_names", lambda: {case.name for case in cases})
        monkeypatch.setattr(machine, "other_cpu_load", lambda: other_cpu_load)

    return install


def test_command_succeeds_and_writes_json(only, capsys, tmp_path):
    only(case())
    assert command("--quick", "--json", str(tmp_path / "new" / "out.json")) == 0
    captured = capsys.readouterr()
    assert "square" in captured.out and "[1/1] square 1000 float32 forward" in captured.err
    assert json.loads((tmp_path / "new" / "out.json").read_text())["passed"] is True


def test_an_interrupted_run_keeps_what_it_has(only, capsys, tmp_path, monkeypatch):
    """Its table is printed; the file had it already, as a killed run leaves it."""
    only(case(), case(op="second"), case(op="third"))
    file, on_disk, real = tmp_path / "out.json", [], runner.run_case

    def interrupted(each, *args, **options):
        if each.op == "second":
            on_disk.extend(json.loads(file.read_text())["results"])
            raise KeyboardInterrupt
        return real(each, *args, **options)

    monkeypatch.setattr(runner, "run_case", interrupted)
    assert command("--quick", "--json", str(file)) == 130
    printed = capsys.readouterr().out
    assert "square" in printed and "INTERRUPTED; 2 cases" in printed
    kept = json.loads(file.read_text())
    assert kept["left_out"] == 2 and kept["results"] == on_disk and [x["op"] for x in on_disk] == ["square"]


def test_a_run_ends_in_time_with_what_it_has(only, capsys, tmp_path):
    only(case(), case(op="second"), case(op="third"))
    file = tmp_path / "out.json"
    assert command("--quick", "--minutes", "1e-9", "--json", str(file)) == 1
    captured = capsys.readouterr()
    assert "THE TIME IS UP; 3 cases" in captured.out and "--minutes" in captured.err
    assert json.loads(file.read_text())["left_out"] == 3


def test_all_leaves_compiled_baselines_to_the_standard_set(only, capsys, monkeypatch, tmp_path):
    baselines = with_compiled({"reference": lambda x: x**2})
    only(case(baselines=baselines), case(op="second", baselines=baselines))
    monkeypatch.setattr(bench, "_standard_names", lambda: {"square 1000 float32 forward"})
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    file = tmp_path / "out.json"
    arguments = ("--all", "--rounds", "1", "--seconds", "0.1", "--json", str(file))
    assert command(*arguments) == 0
    assert [list(each["ratios"]) for each in json.loads(file.read_text())["results"]] == [[*baselines], ["reference"]]
    assert command(*arguments, "--op", "second") == 0
    assert [list(each["ratios"]) for each in json.loads(file.read_text())["results"]] == [[*baselines]]


def test_every_figure_is_said_as_it_comes(only, capsys):
    only(case(), case(op="broken", ours=wrong_square))
    command("--quick")
    first, second = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert re.fullmatch(r"\[1/2\] square 1000 float32 forward: \d+\.\d\dx reference", first)
    assert second == "[2/2] broken 1000 float32 forward: FAILED"


def test_an_interrupt_before_any_result_is_one(only, monkeypatch):
    only(case())
    monkeypatch.setattr(machine, "matmul_peak", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        command("--quick")


def test_command_fails_on_a_wrong_result(only, capsys):
    only(case(), case(op="broken", ours=wrong_square))
    assert command("--quick") == 1
    assert "FAILED broken" in capsys.readouterr().out


def test_command_warns_of_a_busy_machine_or_refuses_it(only, capsys):
    only(case(), other_cpu_load=1.5)
    assert command("--quick") == 0
    captured = capsys.readouterr()
    assert "THE MACHINE IS BUSY: other processes use 1.50 CPUs" in captured.err
    assert "OTHER PROCESSES USED THE MACHINE" in captured.out
    assert command("--quick", "--require-idle") == 1
    captured = capsys.readouterr()
    assert "--require-idle" in captured.err and not captured.out


def test_command_refuses_figures_disturbed_during_the_run(only, capsys, monkeypatch):
    only(case())
    monkeypatch.setattr(machine, "OtherLoad", lambda: SimpleNamespace(cpus=lambda: 1.0))
    assert command("--quick", "--require-idle") == 1
    assert "during the run" in capsys.readouterr().err


def test_command_filters(capsys):
    assert command("--list", "--op", "frequency_norms", "--dtype", "bfloat16", "--mode", "forward") == 0
    assert capsys.readouterr().out == "  frequency_norms 64x197x192 bfloat16 forward\n"
    assert command("--list", "--op", "frequency_nroms", "--mode", "forward") == 2
    assert "no case has --op frequency_nroms, --mode forward; `overtone bench --list`" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--seconds", "-1"], ["--threads", "two"]])
def test_command_refuses_senseless_numbers(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        command(*arguments)
    assert error.value.code == 2 and arguments[1] in capsys.readouterr().err


def test_command_sets_threads_and_lengths(only, monkeypatch, capsys):
    only(case())
    threads, plans = [], []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    real = runner.run_cases
    monkeypatch.setattr(runner, "run_cases", lambda cases, plan, **k: plans.append(plan) or real(cases, plan, **k))
    assert command("--quick", "--threads", "3", "--rounds", "1", "--seconds", "0.5") == 0
    assert threads == [3] and (plans[0].rounds, plans[0].seconds) == (1, 0.5)


def test_real_cases_run(capsys):
    """Without the extension they must fail, not time something else."""
    code = command("--quick", "--op", "frequency_norms", "de_escalate", "--shape", "8x197x768", "--mode", "forward")
    assert code == (0 if ot.backends()["cpu"].available else 1), capsys.readouterr().out


def test_real_cases_are_what_was_promised():
    cases = runner.all_cases()
    assert len({each.name for each in cases}) == len(cases)
    frequency = [each for each in cases if each.op in ("frequency_norms", "frequency_filter", "de_escalate")]
    wanted = {"16384x4": 40, "8192x8": 34, "4096x16": 24, "1024x32": 15, "256x64": 5}
    eigh = {each.shape: each.targets for each in cases if each.op == "eigh" and each.dtype == torch.float32}
    assert {shape: targets["torch.linalg"] for shape, targets in eigh.items() if targets} == wanted
    assert {each.shape for each in cases if each.op == "spectral_attention"} >= {"Ti-cifar", "Ti-224", "S-224", "B-224"}
    targets = {(each.op, each.variant, each.mode): dict(each.targets) for each in frequency if each.targets}
    assert targets == {
        ("frequency_norms", "", "forward"): {"reference": 3.0, "compiled reference": 1.5},
        ("frequency_filter", "", "forward+backward"): {"reference": 2.0},
        ("frequency_filter", "trained gains", "forward+backward"): {"reference": 2.0},
    }
    shapes = {"64x197x192", "8x197x768", "256x65x192"}
    for op in ("frequency_norms", "frequency_filter", "de_escalate"):
        assert {each.shape for each in cases if each.op == op} > shapes  # and sizes between
