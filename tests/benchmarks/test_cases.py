"""What is measured: every op, mode and backend present; baselines of other libraries with the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import overtone as ot
from overtone import libraries
from overtone.backends import SUPPORT, BackendStatus
from overtone.benchmarks import attention, metrics, module
from overtone.benchmarks.harness import backends, machine, report, runner, tables
from overtone.benchmarks.harness.case import MODES
from overtone.benchmarks.linalg import extremal, inverse
from overtone.benchmarks.shapes import AttentionShape, TokenShape
from overtone.cli import bench, main

SMALL = AttentionShape("small", 2, 9, 32, 2)


def passed(case) -> bool:
    with ot.use_backend("cpu" if ot.backends()["cpu"].available else "reference"):
        prepared = runner.PreparedCase(case)
        checks = {
            name: prepared.check(name, prepared.call(f))
            for name, f in runner.implementations(case, compiled=False).items()
        }
    assert {name: check.message for name, check in checks.items() if not (check.passed or check.skipped)} == {}
    return True


def test_every_op_is_measured():
    ops = {case.op for case in runner.all_cases()}
    linalg = {name for name in ot.linalg.__all__ if not name.endswith("_ex")} - {"ExtremalResult"}
    assert linalg <= ops and set(SUPPORT) - {"orthonormal_basis"} <= ops
    assert {"de_escalate", "cosine_similarity", "effective_rank", "stable_rank"} <= ops
    assert {"attention_module", "training_step", "dominance"} <= ops


def test_every_op_with_a_gradient_has_all_modes():
    found = {
        op: {case.mode for case in runner.all_cases() if case.op == op} for op in set(SUPPORT) - {"orthonormal_basis"}
    }
    found["eigvals"] = {case.mode for case in runner.all_cases() if case.op == "eigvals"}
    del found["eig"]  # its eigenvectors have no gradient to compare
    assert {op: modes for op, modes in found.items() if modes != set(MODES)} == {}


def test_growth_is_visible():
    for op, sizes in (("frequency_norms", 6), ("spectral_attention", 7), ("eigh", 8), ("inverse", 3)):
        assert len({case.shape for case in runner.all_cases() if case.op == op}) >= sizes


@pytest.mark.parametrize("kind", ["free", "symmetric", "general"])
@pytest.mark.parametrize("mode", ["forward", "forward+backward"])
def test_modules_agree(kind, mode):
    assert passed(module._case(kind, SMALL, mode))


def test_a_module_with_another_weight_does_not_pass():
    case = module._case("free", SMALL, "forward+backward")

    def build(shape, weights):
        return module._ours(shape, (weights[0], weights[1], 1.01 * weights[2], weights[3]))

    prepared = runner.PreparedCase(case)
    assert prepared.check("ours", prepared.call(case.workload.ours)).passed
    wrong = module.Implementation(build, SMALL, "forward+backward")
    assert not prepared.check("ours", prepared.call(wrong)).passed


def test_a_missing_library_is_skipped_with_a_message(monkeypatch):
    def missing(name):
        raise libraries.MissingLibrary("the package timm is not installed")

    monkeypatch.setattr(module, "imported", missing)
    monkeypatch.setattr(machine, "OtherLoad", lambda: SimpleNamespace(cpus=lambda: 0.0))
    case = module._case("free", SMALL, "forward")
    result = runner.run_case(case, runner.Plan(rounds=1, seconds=1.0, slice_seconds=0.0), compiled=False)
    outcome = runner.Run([result], runner.Plan(), True, machine.describe(), 0.0, {"cpu": 1e11})
    text = report.table(outcome)
    assert result.checks["timm"].skipped and "timm" not in result.ratios
    assert "skipped timm: the package timm is not installed" in text
    assert outcome.passed == ot.backends()["cpu"].available


def test_small_cases_of_the_new_files_agree(monkeypatch):
    monkeypatch.setattr(inverse, "LAYERS", 2)
    for mode in MODES:
        assert passed(inverse._case(24, mode))
    shape = TokenShape(2, 9, 16)
    for mode in MODES:
        assert passed(metrics._cosine(shape, mode))
    assert passed(metrics._rank("effective_rank", shape)) and passed(metrics._rank("stable_rank", shape))
    assert passed(extremal._case(2, 140, 2.0))


@pytest.mark.parametrize(
    ("level", "measure"), [("baseline", "reference"), ("avx512_bf16_emulated", "sdpa"), ("amx_emulated", "sdpa")]
)
def test_bfloat16_attention_is_measured_by_what_rounds_as_it_does(cpu_kernels, level, measure):
    before = cpu_kernels.isa()
    cpu_kernels.set_isa(level)
    try:
        case = attention._case(SMALL, torch.bfloat16, MODES[2])
        assert case.plain is case.workload.baselines[measure]
        assert passed(case)
    finally:
        cpu_kernels.set_isa(before)


# Backends.


def test_a_backend_that_is_here_is_added_by_itself(monkeypatch):
    present = {**ot.backends(), "triton": BackendStatus(True, "here"), "cuda": BackendStatus(True, "here")}
    monkeypatch.setattr(ot, "backends", lambda: present)
    found = {(case.op, case.backend) for case in runner.all_cases()}
    assert {("spectral_attention", "triton"), ("de_escalate", "triton"), ("eigvals", "cuda")} <= found
    assert ("eigh", "triton") not in found and ("spectral_attention", "cuda") not in found
    on_gpu = [case for case in runner.all_cases() if case.backend == "cuda"]
    assert not any("split" in name or "threads" in name for case in on_gpu for name in case.workload.baselines)
    assert not any(case.dtype == torch.float64 for case in runner.all_cases() if case.backend == "triton")
    assert len({case.name for case in runner.all_cases()}) == len(runner.all_cases())


def test_a_backend_that_is_not_here_is_not():
    here = {name for name, status in ot.backends().items() if status.available} | {"cpu"}
    assert {case.backend for case in runner.all_cases()} <= here


def test_inputs_move_to_the_backends_device(monkeypatch):
    monkeypatch.setattr(backends, "triton_interpreter_enabled", lambda: False)
    assert backends.device_of("triton") == backends.device_of("cuda") == "cuda"
    leaf = torch.ones(3, requires_grad=True)
    there = backends.moved(leaf, "meta")
    assert there.is_leaf and there.requires_grad and there.device.type == "meta"
    assert backends.moved(leaf, "cpu") is leaf and backends.moved("options", "meta") == "options"


@pytest.mark.slow
def test_triton_runs_in_its_interpreter():
    """The same case, on CPU tensors, in a process of its own: only the extension or the interpreter can be there."""
    command = [sys.executable, "-m", "overtone", "bench", "--quick", "--all", "--backend", "triton"]
    command += ["--op", "frequency_norms", "--shape", "64x50x192", "--mode", "forward"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "not installed" in result.stderr:
        pytest.skip("triton is not installed")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "frequency_norms [triton]" in result.stdout and "FAILED" not in result.stdout


# The standard set, and the rest.


def test_the_standard_set_is_what_the_readme_shows():
    names = {case.name for case in runner.all_cases()}
    assert tables.standard_names() <= names
    assert len(tables.standard_names()) < len(names) / 4


def test_the_list_shows_both(capsys):
    assert main(["bench", "--list", "--op", "qr", "--mode", "forward", "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "* qr 12x768 float32 forward" in lines
    assert main(["bench", "--list", "--op", "qr", "--mode", "backward"]) == 0
    assert all(line.startswith("  qr") for line in capsys.readouterr().out.splitlines())


def test_the_default_is_the_standard_set_and_all_is_all(monkeypatch):
    chosen = []
    monkeypatch.setattr(bench, "_compare", lambda args, cases: chosen.append([case.name for case in cases]) or 0)
    for arguments in ([], ["--all"], ["--op", "inverse", "attention_module"]):
        assert main(["bench", *arguments]) == 0
    standard, every, beyond = chosen
    assert set(standard) == tables.standard_names() and len(every) == len(runner.all_cases())
    assert sum(name.startswith("inverse") for name in beyond) == 9, "it has nothing in the standard set"
    assert {name for name in beyond if "module" in name} == {name for name in standard if "module" in name}


def test_pytest_runs_the_cases():
    """pytest-benchmark's table of one case: ours beside its baselines."""
    root = Path(__file__).resolve().parents[2]
    wanted = "qr_12x192_float32_forward"
    command = [sys.executable, "-m", "pytest", "benchmarks", "-k", wanted, "-p", "no:cacheprovider", "-q"]
    # Where it finds itself in a worker of xdist, pytest-benchmark measures nothing.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    if not ot.backends()["cpu"].available:
        pytest.skip(ot.backends()["cpu"].detail)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 passed" in result.stdout and "benchmark 'qr 12x192 float32 forward': 3 tests" in result.stdout
