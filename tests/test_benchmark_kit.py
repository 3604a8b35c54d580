"""The benchmark kit, proved on cases of known behaviour: wrong results give no ratio, disturbed rounds do not count."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import overtone as ot
from overtone.benchmarks import kit, machine, report, timing
from overtone.benchmarks.case import Call, Case, Compiled, InFloat32, bind, with_compiled
from overtone.cli import bench

PLAN = timing.Plan(rounds=4, seconds=60.0, slice_seconds=0.0)


def square(x):
    return x * x


def wrong_square(x):
    return x * x + 0.01


def case(**fields) -> Case:
    given = {
        "op": "square",
        "shape": "1000",
        "dtype": torch.float32,
        "mode": "forward",
        "setup": lambda: (torch.linspace(1, 2, 1000),),
        "ours": square,
        "baselines": {"reference": lambda x: x**2},
        "flops": 1000,
        "bytes": 8000,
    }
    return Case(**{**given, **fields})


def run(*cases: Case, plan: timing.Plan = PLAN) -> kit.Run:
    return kit.run_cases(cases, plan, compiled=False, quick=True, foreign_cpus=0.0)


@pytest.fixture(autouse=True)
def undisturbed_machine(monkeypatch):
    """These tests share the machine with whatever else runs on it; what they assert must not depend on that."""
    monkeypatch.setattr(machine, "ForeignLoad", lambda: SimpleNamespace(cpus=lambda: 0.0))
    monkeypatch.setattr(machine, "matmul_peak", lambda seconds, device: 1e11)


@pytest.fixture
def clock(monkeypatch):
    """Time that only `clock.sleep` advances; plain passes over memory take half a second of it or four."""
    fake = SimpleNamespace(now=0.0)
    fake.perf_counter = lambda: fake.now

    def sleep(seconds: float) -> None:
        fake.now += seconds

    fake.sleep = sleep
    monkeypatch.setattr(timing, "time", fake)
    probes = {"slow": Call(lambda _: sleep(4.0)), "fast": Call(lambda _: sleep(0.5))}
    monkeypatch.setattr(machine, "memory_probes", lambda limit, size, device: probes)
    return fake


def taking(clock, seconds: float, function=square):
    def call(*inputs):
        clock.sleep(seconds)
        return function(*inputs)

    return call


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", *arguments])
    return args.run(args)


# Checks.


def test_a_right_result_is_measured():
    result = run(case()).results[0]
    assert result.passed and result.ratio("reference") > 0


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (wrong_square, "error"),
        (lambda x: square(x) * float("nan"), "error nan"),
        (lambda x: square(x).double(), "torch.float64"),
        (lambda x: square(x)[:-1], "[999]"),
        (lambda x: (square(x), square(x)), "got 2 results, wanted 1"),
        (lambda x: x @ torch.ones(3), "raised RuntimeError"),
    ],
    ids=["wrong", "nan", "dtype", "shape", "count", "raises"],
)
def test_a_wrong_result_of_ours_gives_no_number(ours, message):
    outcome = run(case(ours=ours, targets={"reference": 1.0}))
    assert not outcome.passed
    assert outcome.results[0].measurement is None and not outcome.results[0].ratios
    text = report.table(outcome)
    row = next(line for line in text.splitlines() if line.startswith("  1000"))
    assert "FAILED" in row and " ms" not in row and "not measured" in row
    assert message in text.splitlines()[-1]


def test_a_wrong_baseline_is_never_the_best_plain(clock):
    baselines = {"reference": taking(clock, 3.0), "hasty": taking(clock, 0.5, wrong_square)}
    outcome = run(case(ours=taking(clock, 1.0), baselines=baselines))
    assert not outcome.passed
    assert outcome.results[0].best_plain == ("reference", 3.0)
    assert outcome.results[0].ratio("hasty") is None
    assert "hasty: result 1: error" in report.table(outcome)


def test_the_tolerance_is_three_times_plain_pytorchs_error_and_one_epsilon():
    eps = torch.finfo(torch.float32).eps
    error = 1e-4

    def off_by(relative):  # exact in float64, where the reference is the truth
        return lambda x: x if x.dtype == torch.float64 else x * (1 + relative)

    setup = lambda: (torch.ones(8),)  # noqa: E731
    reference = {"reference": off_by(error)}
    near = run(case(setup=setup, ours=off_by(2.9 * error), baselines=reference)).results[0]
    far = run(case(setup=setup, ours=off_by(3.1 * error), baselines=reference)).results[0]
    assert near.checks["ours"].tolerance == pytest.approx(3 * error + eps, rel=1e-2)
    assert near.passed and not far.checks["ours"].passed


def test_a_baseline_may_round_like_one_long_sum_and_ours_may_not():
    rounded = lambda x: x if x.dtype == torch.float64 else x * (1 + 1e-6)  # noqa: E731
    setup = lambda: (torch.ones(10_000),)  # noqa: E731
    identity = {"reference": lambda x: x * 1}
    assert run(case(setup=setup, ours=identity["reference"], baselines={**identity, "rounded": rounded})).passed
    assert not run(case(setup=setup, ours=rounded, baselines=identity)).passed


def test_a_baseline_may_round_its_intermediates_and_ours_may_not():
    def with_error_of(roundings):  # a float32 result of numbers that were rounded to bfloat16 on the way
        return lambda x: (
            x.to(torch.promote_types(x.dtype, torch.float32))
            * (1 if x.dtype == torch.float64 else 1 + roundings * torch.finfo(torch.bfloat16).eps / 2)
        )

    half = {"setup": lambda: (torch.ones(8, dtype=torch.bfloat16),), "dtype": torch.bfloat16}
    exact, rounded, wrong = (with_error_of(roundings) for roundings in (0, 1.9, 2.5))
    baselines = {"reference": exact, "rounded": rounded, "wrong": wrong}
    checks = run(case(**half, ours=exact, baselines=baselines)).results[0].checks
    assert checks["ours"].passed and checks["rounded"].passed and not checks["wrong"].passed
    assert not run(case(**half, ours=rounded, baselines={"reference": exact})).passed
    # In float32 nothing was rounded to less.
    single = {"setup": lambda: (torch.ones(8),), "ours": exact, "baselines": baselines}
    assert not run(case(**single)).results[0].checks["rounded"].passed


@pytest.mark.parametrize("mode", ["forward", "forward+backward"])
def test_a_float32_baseline_gets_float32_copies_and_is_checked_as_the_case(mode):
    seen = set()

    def square_in(x):
        seen.add(x.dtype)
        return square(x)

    setup = lambda: (torch.linspace(1, 2, 1000).bfloat16().requires_grad_(),)  # noqa: E731
    half = {"setup": setup, "dtype": torch.bfloat16, "mode": mode}
    baselines = {"reference": square, "square float32": InFloat32(square_in)}
    assert run(case(**half, baselines=baselines)).passed
    assert seen == {torch.float32}
    assert not run(case(**half, baselines={"reference": square, "wrong": InFloat32(lambda x: 1.1 * square(x))})).passed


def test_a_compiled_float32_baseline_is_left_out_with_the_compiled_ones():
    baselines = {"reference": square, **{name: InFloat32(f) for name, f in with_compiled({"float32": square}).items()}}
    assert list(kit.contenders(case(baselines=baselines), compiled=False)) == ["ours", "reference", "float32"]


def test_a_case_has_its_own_check():
    def always_right(results, evidence):
        return kit.Check(True, 0.0, 0.0)

    assert run(case(ours=wrong_square, check=always_right)).passed


def test_a_case_that_cannot_be_set_up_fails_alone():
    def setup():
        raise MemoryError("too large")

    outcome = run(case(setup=setup), case())
    assert [result.passed for result in outcome.results] == [False, True]
    assert "too large" in report.table(outcome)


# Modes.


@pytest.mark.parametrize(
    ("mode", "wanted"), [("forward", [9.0]), ("backward", [12.0]), ("forward+backward", [9.0, 12.0])]
)
def test_modes(mode, wanted):
    inputs = (torch.tensor(3.0, requires_grad=True),)
    call = bind(square, inputs, (torch.tensor(2.0),), mode)
    assert [result.item() for result in call.results()] == wanted


def test_a_wrong_gradient_fails():
    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return grad

    setup = lambda: (torch.linspace(1, 2, 1000, requires_grad=True),)  # noqa: E731
    outcome = run(case(setup=setup, mode="forward+backward", ours=WrongGradient.apply))
    assert "ours: result 2: error" in report.table(outcome)


def test_backward_does_not_time_the_forward(clock):
    setup = lambda: (torch.linspace(1, 2, 1000, requires_grad=True),)  # noqa: E731
    result = run(case(setup=setup, mode="backward", ours=taking(clock, 5.0))).results[0]
    assert result.passed and result.ours.median == 0.0


def test_a_case_refuses_unknown_words():
    with pytest.raises(ValueError, match="mode: got 'sideways'"):
        case(mode="sideways")
    with pytest.raises(ValueError, match="limit: got 'disk'"):
        case(limit="disk")
    with pytest.raises(ValueError, match="missing .*nobody"):
        case(targets={"nobody": 2.0})


# Timing.


def test_contenders_take_turns():
    turns = []
    calls = {name: Call(lambda _, name=name: turns.append(name)) for name in "AB"}
    timing.interleave(calls, PLAN)
    assert turns == ["A", "B"] * PLAN.rounds


def test_ratios_minimum_and_median(clock):
    seconds = iter([9.0, 1.0, 2.0, 4.0, 8.0, 9.0])  # the first call is the check's, the last one memory's

    def ours(x):
        clock.sleep(next(seconds))
        return square(x)

    baselines = {"reference": taking(clock, 6.0), "quicker": taking(clock, 1.5)}
    result = run(case(ours=ours, baselines=baselines, targets={"reference": 2.0, "quicker": 2.0})).results[0]
    assert (result.ours.minimum, result.ours.median, result.ours.calls) == (1.0, 3.0, 4)
    assert result.ratios == {"reference": 2.0, "quicker": 0.5}
    assert result.best_plain == ("quicker", 0.5)
    assert result.rate == 8000 / 3.0


def test_share_of_the_fastest_probe_or_of_matrix_products(clock):
    ours = taking(clock, 1.0)
    assert run(case(ours=ours)).results[0].share == 0.5
    assert run(case(ours=ours, limit="matmul", flops=int(2e10))).results[0].share == 0.2


@pytest.mark.parametrize("limit", ["read", "map"])
def test_probes_run_at_any_size(limit):
    for size in (1, 4096):
        for probe in machine.memory_probes(limit, size).values():
            assert probe.results()[0].numel()


def test_disturbed_rounds_are_thrown_away(clock, monkeypatch):
    loads = iter([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    current = SimpleNamespace(cpus=0.0)

    def load():
        current.cpus = next(loads)
        return SimpleNamespace(cpus=lambda: current.cpus)

    monkeypatch.setattr(machine, "ForeignLoad", load)
    slowed = Call(lambda _: clock.sleep(1.0 + 10.0 * current.cpus))
    measurement = timing.interleave({"A": slowed}, PLAN)
    assert (measurement.rounds, measurement.undisturbed_rounds, measurement.trusted) == (6, 4, True)
    assert measurement.timings["A"].round_medians == (1.0,) * 4


def test_figures_of_a_busy_machine_are_marked(clock, monkeypatch):
    monkeypatch.setattr(machine, "ForeignLoad", lambda: SimpleNamespace(cpus=lambda: 1.0))
    outcome = run(case(ours=taking(clock, 1.0)), plan=timing.Plan(rounds=3, seconds=5.0, slice_seconds=0.0))
    assert not outcome.idle and not outcome.results[0].trusted
    text = report.table(outcome)
    assert "OTHER PROCESSES USED THE MACHINE" in text and "~1000" in text
    assert report.as_json(outcome)["idle"] is False


# The machine. These need the real ForeignLoad.

RealForeignLoad = machine.ForeignLoad


@pytest.mark.parametrize(("busy", "own", "wanted"), [(1.5, 1.5, 0.0), (1.5, 0.5, 0.5), (0.51, 0.5, 0.0)])
def test_foreign_load_is_busy_time_minus_our_own(monkeypatch, busy, own, wanted):
    now = SimpleNamespace(busy=100.0, own=7.0, wall=50.0)
    monkeypatch.setattr(machine, "busy_seconds", lambda: now.busy)
    clocks = SimpleNamespace(process_time=lambda: now.own, perf_counter=lambda: now.wall)
    monkeypatch.setattr(machine, "time", clocks)
    load = RealForeignLoad()
    now.busy, now.own, now.wall = now.busy + busy, now.own + own, now.wall + 2.0
    assert load.cpus() == pytest.approx(wanted)


def test_a_busy_process_is_seen(monkeypatch):
    if machine.busy_seconds() is None:
        pytest.skip("this system has no /proc/stat")
    monkeypatch.setattr(machine, "ForeignLoad", RealForeignLoad)
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert machine.is_disturbed(machine.foreign_cpus(0.5))
    finally:
        child.kill()
        child.wait()


def test_without_proc_stat_idleness_is_unknown_and_said(monkeypatch):
    monkeypatch.setattr(machine, "busy_seconds", lambda: None)
    assert RealForeignLoad().cpus() is None
    assert not machine.is_disturbed(None)
    outcome = kit.run_cases([case()], PLAN, compiled=False)
    assert "does not say whether others use the machine" in report.table(outcome)


@pytest.mark.parametrize(("script", "works"), [("kill -ILL $$", False), ("exit 0", True)])
def test_bf16_probe_survives_a_crash(monkeypatch, tmp_path, script, works):
    executable = tmp_path / "python"
    executable.write_text(f"#!/bin/sh\n{script}\n")
    executable.chmod(0o755)
    monkeypatch.setattr(machine.sys, "executable", str(executable))
    assert machine.bf16_matmul_works.__wrapped__() is works


def test_bf16_products_that_would_kill_the_process_are_not_run(monkeypatch):
    monkeypatch.setattr(machine, "bf16_matmul_works", lambda: False)
    outcome = run(case(dtype=torch.bfloat16, limit="matmul"))
    assert not outcome.passed and "ONEDNN_MAX_CPU_ISA" in report.table(outcome)


# Baselines under torch.compile.


def test_compilation_waits_for_the_first_call_and_allows_no_graph_break(monkeypatch):
    options = []
    monkeypatch.setattr(torch, "compile", lambda function, **given: options.append(given) or function)
    compiled = Compiled(square)
    assert not options
    assert compiled(torch.tensor(3.0)) == 9.0 and compiled(torch.tensor(2.0)) == 4.0
    assert [given["fullgraph"] for given in options] == [True]


def test_compiled_baselines_can_be_left_out():
    given = case(baselines=with_compiled({"reference": square}), targets={"compiled reference": 1.5})
    assert list(kit.contenders(given)) == ["ours", "reference", "compiled reference"]
    assert list(kit.contenders(given, compiled=False)) == ["ours", "reference"]
    assert "1.5x compiled reference: not measured" in report.table(run(given))


# Reports.


def test_the_table_shows_wins_losses_and_targets(clock):
    baselines = {"reference": taking(clock, 4.0), "by hand": taking(clock, 0.5)}
    targets = {"reference": 3.0, "by hand": 1.5}
    text = report.table(run(case(ours=taking(clock, 1.0), baselines=baselines, targets=targets)))
    assert "4.00x" in text and "0.50x" in text
    assert "3x reference: reached; 1.5x by hand: missed" in text
    assert "in 0 of 1 cases; slower in:\n  0.50x square 1000 float32 forward" in text


def test_json_has_everything(clock):
    outcome = run(case(ours=taking(clock, 1.0), targets={"reference": 3.0}), case(ours=lambda x: x.double()))
    found = json.loads(json.dumps(report.as_json(outcome), allow_nan=False))
    assert {"passed", "idle", "machine", "plan", "matmul_peaks", "results"} <= set(found)
    assert {"cpu", "threads", "versions", "commit"} <= set(found["machine"])
    assert {"python", "torch", "overtone"} <= set(found["machine"]["versions"])
    right, wrong = found["results"]
    assert right["seconds"]["ours"]["round_medians"] == [1.0] * PLAN.rounds
    assert right["targets"]["reference"]["wanted"] == 3.0 and right["ratios"].keys() == {"reference"}
    assert not wrong["passed"] and wrong["ratios"] == {} and wrong["seconds"] == {}


# The command.


@pytest.fixture
def only(monkeypatch):
    """Make these the only cases, on a machine that others use as much as given."""

    def install(*cases: Case, foreign_cpus: float = 0.0) -> None:
        monkeypatch.setattr(kit, "all_cases", lambda: list(cases))
        monkeypatch.setattr(bench, "_standard_names", lambda: {case.name for case in cases})
        monkeypatch.setattr(machine, "foreign_cpus", lambda: foreign_cpus)

    return install


def test_command_succeeds_and_writes_json(only, capsys, tmp_path):
    only(case())
    assert command("--quick", "--json", str(tmp_path / "new" / "out.json")) == 0
    captured = capsys.readouterr()
    assert "square" in captured.out and "[1/1] square 1000 float32 forward" in captured.err
    assert json.loads((tmp_path / "new" / "out.json").read_text())["passed"] is True


def test_command_fails_on_a_wrong_result(only, capsys):
    only(case(), case(op="broken", ours=wrong_square))
    assert command("--quick") == 1
    assert "FAILED broken" in capsys.readouterr().out


def test_command_warns_of_a_busy_machine_or_refuses_it(only, capsys):
    only(case(), foreign_cpus=1.5)
    assert command("--quick") == 0
    captured = capsys.readouterr()
    assert "THE MACHINE IS BUSY: other processes use 1.50 CPUs" in captured.err
    assert "OTHER PROCESSES USED THE MACHINE" in captured.out
    assert command("--quick", "--require-idle") == 1
    captured = capsys.readouterr()
    assert "--require-idle" in captured.err and not captured.out


def test_command_refuses_figures_disturbed_during_the_run(only, capsys, monkeypatch):
    only(case())
    monkeypatch.setattr(machine, "ForeignLoad", lambda: SimpleNamespace(cpus=lambda: 1.0))
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
    real = kit.run_cases
    monkeypatch.setattr(kit, "run_cases", lambda cases, plan, **k: plans.append(plan) or real(cases, plan, **k))
    assert command("--quick", "--threads", "3", "--rounds", "1", "--seconds", "0.5") == 0
    assert threads == [3] and (plans[0].rounds, plans[0].seconds) == (1, 0.5)


def test_real_cases_run(capsys):
    """Without the extension they must fail, not time something else."""
    code = command("--quick", "--op", "frequency_norms", "de_escalate", "--shape", "8x197x768", "--mode", "forward")
    assert code == (0 if ot.backends()["cpu"].available else 1), capsys.readouterr().out


def test_real_cases_are_what_was_promised():
    cases = kit.all_cases()
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
