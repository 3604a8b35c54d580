"""Timing in turns, and what the machine says of itself: noisy rounds do not count."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.benchmark_cases import PLAN, case, run, square, taking

from overtone import hardware
from overtone.benchmarks.harness import machine, report, runner, timing
from overtone.benchmarks.harness.case import Call

pytestmark = pytest.mark.usefixtures("quiet_machine")


def test_implementations_take_turns():
    turns = []
    calls = {name: Call(lambda _, name=name: turns.append(name)) for name in "AB"}
    timing.interleave(calls, PLAN)
    assert turns == ["A", "B"] * PLAN.rounds


def test_a_turn_repeats_the_call_until_its_time_is_over(clock):
    assert timing.time_slice(Call(lambda _: clock.sleep(1.0)), 2.5) == [1.0, 1.0, 1.0]
    assert timing.time_slice(Call(lambda _: clock.sleep(4.0)), 2.5) == [4.0]


@pytest.mark.parametrize(
    ("clean", "rounds"), [(timing.ENOUGH_ROUNDS, 10), (timing.ENOUGH_ROUNDS - 1, 10 * timing.MAX_RETRY_FACTOR)]
)
def test_patience_ends_with_enough_clean_rounds(clock, monkeypatch, clean, rounds):
    loads = iter([0.0] * clean + [1.0] * 1000)
    monkeypatch.setattr(machine, "OtherLoad", lambda: SimpleNamespace(cpus=lambda: next(loads)))
    plan = timing.Plan(rounds=100, seconds=10.0, slice_seconds=0.0)
    measurement = timing.interleave({"A": Call(lambda _: clock.sleep(1.0))}, plan)
    assert (measurement.clean_rounds, measurement.rounds) == (clean, rounds)


def test_ratios_minimum_and_median(clock):
    seconds = iter([9.0, 1.0, 2.0, 4.0, 8.0, 9.0])  # the first call is the check's, the last one memory's

    def ours(x):
        clock.sleep(next(seconds))
        return square(x)

    baselines = {"reference": taking(clock, 6.0), "quicker": taking(clock, 1.5)}
    result = run(case(ours=ours, baselines=baselines, targets={"reference": 2.0, "quicker": 2.0})).results[0]
    assert (result.ours.minimum, result.ours.median, result.ours.calls) == (1.0, 3.0, 4)
    assert result.ratios == {"reference": 2.0, "quicker": 0.5}
    assert result.fastest_baseline == ("quicker", 0.5)
    assert result.rate == 8000 / 3.0


def test_share_of_the_fastest_probe_or_of_matrix_products(clock):
    ours = taking(clock, 1.0)
    assert run(case(ours=ours)).results[0].share == 0.5
    assert run(case(ours=ours, bound_by="matmul", flops=int(2e10))).results[0].share == 0.2


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

    monkeypatch.setattr(machine, "OtherLoad", load)
    slowed = Call(lambda _: clock.sleep(1.0 + 10.0 * current.cpus))
    measurement = timing.interleave({"A": slowed}, PLAN)
    assert (measurement.rounds, measurement.clean_rounds, measurement.reliable) == (6, 4, True)
    assert measurement.timings["A"].round_medians == (1.0,) * 4


def test_figures_of_a_busy_machine_are_marked(clock, monkeypatch):
    monkeypatch.setattr(machine, "OtherLoad", lambda: SimpleNamespace(cpus=lambda: 1.0))
    outcome = run(case(ours=taking(clock, 1.0)), plan=timing.Plan(rounds=3, seconds=5.0, slice_seconds=0.0))
    assert not outcome.idle and not outcome.results[0].reliable
    text = report.table(outcome)
    assert "OTHER PROCESSES USED THE MACHINE" in text and "~1000" in text
    assert report.as_json(outcome)["idle"] is False


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ([5e-8, 5.1e-8, 4.9e-8, 6e-8], " 49 ns"),
        ([5e-8, 3.4e-7, 3.3e-7, 5.1e-8], " 50 to 340 ns"),
        ([None] * 4, " - "),
    ],
)
def test_the_way_between_threads_is_said_beside_the_figures(clock, monkeypatch, seconds, text):
    trips = iter(seconds)
    monkeypatch.setattr(hardware, "thread_latency", lambda: next(trips))
    outcome = run(case(ours=taking(clock, 1.0), targets={"reference": 2.0}))
    (row,) = [line for line in report.table(outcome).splitlines() if "2x reference: missed" in line]
    assert text in row
    assert report.as_json(outcome)["results"][0]["round_trips"] == seconds


# The machine. These need the real ones.

RealForeignLoad = machine.OtherLoad
real_thread_latency = hardware.thread_latency


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
    monkeypatch.setattr(machine, "OtherLoad", RealForeignLoad)
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert machine.is_noisy(machine.other_cpu_load(0.5))
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_line_goes_from_thread_to_thread_and_back(threads, cpu_kernels):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process has one CPU")
    threads(2)
    tries = (real_thread_latency() for _ in range(400))  # others may use the CPUs at the time
    trip = next((trip for trip in tries if trip is not None), None)
    assert trip is not None and 1e-9 < trip < 1e-4


def test_one_thread_has_nobody_to_send_a_line_to(threads, cpu_kernels):
    threads(1)
    assert math.isnan(cpu_kernels.line_round_trip())
    assert real_thread_latency() is None


def test_without_proc_stat_idleness_is_unknown_and_said(monkeypatch):
    monkeypatch.setattr(machine, "busy_seconds", lambda: None)
    assert RealForeignLoad().cpus() is None
    assert not machine.is_noisy(None)
    outcome = runner.run_cases([case()], PLAN, compiled=False)
    assert "does not say whether others use the machine" in report.table(outcome)


@pytest.mark.parametrize(("script", "works"), [("kill -ILL $$", False), ("exit 0", True)])
def test_bf16_probe_survives_a_crash(monkeypatch, tmp_path, script, works):
    executable = tmp_path / "python"
    executable.write_text(f"#!/bin/sh\n{script}\n")
    executable.chmod(0o755)
    monkeypatch.setattr(hardware.sys, "executable", str(executable))
    assert hardware.bf16_matmul_works.__wrapped__() is works


def test_bf16_products_that_would_kill_the_process_are_not_run(monkeypatch):
    monkeypatch.setattr(hardware, "bf16_matmul_works", lambda: False)
    outcome = run(case(dtype=torch.bfloat16, bound_by="matmul"))
    assert not outcome.passed and "ONEDNN_MAX_CPU_ISA" in report.table(outcome)
