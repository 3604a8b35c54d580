"""Slopes of known powers, sweeps that run, a page that needs nothing but itself."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

import overtone as ot
from overtone.benchmarks.harness import scaling, scaling_page
from overtone.benchmarks.harness.case import Case, Workload
from overtone.benchmarks.harness.scaling import Measured, Sweep, fit, measure
from overtone.benchmarks.harness.timing import Plan, Timing
from overtone.cli import main

pytestmark = pytest.mark.usefixtures("quiet_machine")

PLAN = Plan(rounds=1, seconds=1.0, slice_seconds=0.0)


def identity_case(value: int, ours=lambda x: x * 1) -> Case:
    return Case(
op="copy",
shape=str(value),
dtype=torch.float32,
mode="forward",
workload=Workload(
setup=lambda: (torch.ones(value),),
ours=ours,
baselines={"reference": lambda x: x * 1},
flops=0,
bytes=0,
bound_by="matmul",
),
)  # fmt: skip


def sweep(case=identity_case, values=(4, 8, 16), **fields) -> Sweep:
    given = {"time": {"ours": 1.0, "reference": 1.0}, "memory": {"ours": 1.0}}
    return Sweep("copy", "N", values, case, **{**given, **fields})


def with_times(measured: Measured, seconds) -> Measured:
    """The same with our time a function of the value."""
    for value, result in measured.results.items():
        result.measurement.timings["ours"] = Timing(0.0, seconds(value), 1, (), ())
    return measured


def our_time(measured: Measured) -> scaling.Curve:
    return next(curve for curve in measured.curves() if (curve.implementation, curve.quantity) == ("ours", "time"))


# Fits.


@pytest.mark.parametrize("power", [-1.0, 0.5, 1.0, 2.0, 3.0])
def test_a_power_is_found(power):
    x = (16, 32, 64, 128)
    slope = fit(x, [7.0 * value**power for value in x])
    assert slope.value == pytest.approx(power) and slope.error == pytest.approx(0.0, abs=1e-9)


def test_noise_is_in_the_error():
    x = (1, 2, 4, 8, 16, 32)
    noise = (1.1, 0.9, 1.1, 0.9, 1.1, 0.9)
    slope = fit(x, [value**2 * factor for value, factor in zip(x, noise, strict=True)])
    assert 0.01 < slope.error < 0.1 and abs(slope.value - 2) < 2 * slope.error


def test_too_few_points_have_no_slope_and_two_no_error():
    assert fit([4], [1.0]) is None and fit([4, 4], [1.0, 2.0]) is None
    assert fit([2, 4], [1.0, 2.0]).value == pytest.approx(1.0) and math.isnan(fit([2, 4], [1.0, 2.0]).error)
    assert fit([2, 4, 8], [0.0, 1.0, 2.0]).points == 2, "zero has no logarithm"


def test_only_points_where_the_leading_term_rules_are_fitted():
    values = (4, 8, 64, 128, 256)
    measured = measure(sweep(values=values, since=64), PLAN)
    with_times(measured, lambda n: n**2 if n >= 64 else 5000.0)
    assert our_time(measured).slope.value == pytest.approx(2.0)
    everywhere = with_times(measure(sweep(values=values), PLAN), lambda n: n**2 if n >= 64 else 5000.0)
    assert our_time(everywhere).slope.value < 1.5


# Sweeps.


def test_every_axis_is_there_for_ops_and_for_a_model():
    found = {(each.op.split()[0], each.axis) for each in scaling.sweeps()}
    assert {axis for _, axis in found} == {"N", "batch", "d", "n", "depth", "threads"}
    assert {("training_step", "depth"), ("training_step", "threads"), ("spectral_attention", "N")} <= found
    for each in scaling.sweeps():
        assert sum(value >= each.since for value in each.values) >= 3 or each.axis == "threads"


def test_the_smallest_point_of_every_sweep_is_right():
    if not ot.backends()["cpu"].available:
        pytest.skip(ot.backends()["cpu"].detail)
    for each in scaling.sweeps():
        smallest = Sweep(each.op, each.axis, each.values[:1], each.case, each.time, each.memory)
        measured = measure(smallest, PLAN)
        assert measured.failures == [], each.title
        assert {curve.implementation for curve in measured.curves()} == set(each.time), each.title


def test_a_wrong_result_has_no_point():
    measured = measure(sweep(lambda value: identity_case(value, ours=lambda x: x * (1 + (value == 8)))), PLAN)
    assert our_time(measured).x == (4, 16)
    assert "copy 8 float32 forward: ours" in measured.failures[0]


def test_threads_are_set_and_given_back():
    before, seen = torch.get_num_threads(), []

    def case(value):
        return identity_case(value, ours=lambda x: seen.append(torch.get_num_threads()) or x * 1)

    threads = Sweep("copy", "threads", (1, 2), case, {}, {})
    measure(threads, PLAN)
    assert set(seen) == {1, 2} and torch.get_num_threads() == before


# Table and page.


@pytest.fixture(scope="module")
def measured() -> Measured:
    return with_times(measure(sweep(), PLAN), lambda n: 1e-3 * n**2)


def test_the_table_has_the_slope_beside_the_theory(measured):
    row = next(row for row in scaling_page.slopes([measured]).rows if row[2:4] == ["time", "ours"])
    named = dict(zip(scaling_page.COLUMNS, row, strict=True))
    assert (named["slope"], named["theory"], named["from"], named["to"]) == (2.0, 1.0, 4, 16)
    assert named["smallest"] == pytest.approx(16.0), "milliseconds"


def test_the_page_needs_nothing_but_itself(measured):
    pytest.importorskip("matplotlib")
    facts = {"versions": {"torch": "2"}, "threads": 2, "cpu": "A CPU", "isa": "avx2", "commit": "abc"}
    html = scaling_page.page([measured], facts).html()
    assert "Time of copy against N" in html and "ours: 2.00" in html and "slope 1" in html
    assert not re.search(r'(?:src|href)="(?!#|data:)', html)


def test_the_command_prints_and_writes(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(scaling, "sweeps", lambda: [sweep()])
    page, data = tmp_path / "new" / "page.html", tmp_path / "curves.json"
    assert main(["bench", "--scaling", str(page), "--quick", "--json", str(data)]) == 0
    captured = capsys.readouterr()
    assert "theory" in captured.out and "copy against N: 16" in captured.err and page.exists()
    curves = json.loads(data.read_text())["curves"]
    assert {curve["implementation"] for curve in curves} == {"ours", "reference"} and curves[0]["x"] == [4, 8, 16]


def test_the_command_fails_on_a_wrong_result(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(scaling, "sweeps", lambda: [sweep(lambda n: identity_case(n, ours=lambda x: x * 2))])
    assert main(["bench", "--scaling", str(tmp_path / "page.html"), "--quick"]) == 1
    assert "FAILED copy 4" in capsys.readouterr().err
    assert main(["bench", "--scaling", str(tmp_path / "page.html"), "--op", "nothing"]) == 2
