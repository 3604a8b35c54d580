"""The benchmark kit, proved on cases of known behavior: wrong results give no ratio."""

from __future__ import annotations

import json

import pytest
import torch
from support.benchmark_cases import PLAN, case, run, square, taking, wrong_square

from overtone.benchmarks.harness import report, runner
from overtone.benchmarks.harness.case import Compiled, InFloat32, bind, with_compiled

pytestmark = pytest.mark.usefixtures("quiet_machine")

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
    assert outcome.results[0].fastest_baseline == ("reference", 3.0)
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


def test_the_tolerance_can_come_from_another_function():
    off = lambda relative: lambda x: x if x.dtype == torch.float64 else x * (1 + relative)  # noqa: E731
    fields = {"setup": lambda: (torch.ones(8),), "baselines": {"reference": off(1e-6)}}
    assert not run(case(ours=off(2e-4), **fields)).results[0].checks["ours"].passed
    assert run(case(ours=off(2e-4), tolerance_from={"cpu": off(1e-4)}, **fields)).results[0].checks["ours"].passed
    assert not run(case(ours=off(4e-4), tolerance_from={"cpu": off(1e-4)}, **fields)).results[0].checks["ours"].passed
    assert (
        not run(case(ours=off(2e-4), tolerance_from={"triton": off(1e-4)}, **fields)).results[0].checks["ours"].passed
    )


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
    assert list(runner.implementations(case(baselines=baselines), compiled=False)) == ["ours", "reference", "float32"]


def test_a_case_has_its_own_check():
    def always_right(results, expected):
        return runner.Check(True, 0.0, 0.0)

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
    with pytest.raises(ValueError, match="bound_by: got 'disk'"):
        case(bound_by="disk")
    with pytest.raises(ValueError, match="got targets for nobody"):
        case(targets={"nobody": 2.0})


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
    assert list(runner.implementations(given)) == ["ours", "reference", "compiled reference"]
    assert list(runner.implementations(given, compiled=False)) == ["ours", "reference"]
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
