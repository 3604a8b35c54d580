"""nvcc compiles every CUDA kernel for every architecture: no spills, limits kept, registers in budget."""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
from pathlib import Path

import pytest
import torch
from support import nvcc

from overtone.cli import kernels as command
from overtone.tools import cuda_aot as aot
from overtone.tools.cuda_aot import shipped

ROOT = Path(__file__).resolve().parents[2]
BUDGET = ROOT / "tests" / "cuda" / "budget.csv"


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    return nvcc.ptxas_reports()


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["kernels", "--cuda", *arguments])
    return args.run(args)


@pytest.mark.slow
class TestEveryKernel:
    """The command's own checks, on what nvcc said."""

    def test_no_spills_and_no_exceeded_limit(self, reports, monkeypatch, capsys):
        monkeypatch.setattr(aot, "ptxas_report", reports.__getitem__)
        assert run_command("--check") == 0, capsys.readouterr().out
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 + len(aot.ARCHITECTURES) * sum(len(shipped(dtype)) for dtype in aot.DTYPES)
        assert lines[-1].endswith("0 with a spill or an exceeded limit")

    def test_budget(self, reports, monkeypatch, capsys):
        monkeypatch.setattr(aot, "ptxas_report", reports.__getitem__)
        with BUDGET.open(newline="") as file:
            rows = list(csv.DictReader(file))
        architectures = list(dict.fromkeys(row["architecture"] for row in rows))
        chosen = [word for name in architectures for word in ("--arch", name)]
        assert run_command("--check", "--budget", str(BUDGET), *chosen) == 0, capsys.readouterr().out
        assert len(rows) == len(architectures) * sum(len(shipped(dtype)) for dtype in aot.DTYPES)


def test_reading_a_report():
    symbol = "_ZN8overtone4cuda8eig_warpIfEEvNS0_9EigParamsIT_EE"
    report = f"""ptxas info    : Compiling entry function '{symbol}' for 'sm_80'
ptxas info    : Function properties for {symbol}
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 56 registers, used 0 barriers, 424 bytes cmem[0]"""
    assert aot.read_report(report) == {symbol: (56, 16)}
    launch = next(launch for launch in shipped(torch.float32) if launch.name == "eig_warp")
    assert symbol.startswith(launch.symbol)


def test_a_spill_is_a_problem(monkeypatch, capsys):
    launch = shipped(torch.float32)[0]
    monkeypatch.setattr(aot, "compile_all", lambda architectures, workers: iter([(launch, "sm_80", 50, 8)]))
    monkeypatch.setattr(aot, "obstacle", lambda: None)
    assert run_command("--check") == 1
    assert "spills 8 bytes" in capsys.readouterr().out


def test_unknown_architectures_are_named(monkeypatch, capsys):
    monkeypatch.setattr(aot, "obstacle", lambda: None)
    assert run_command("--arch", "sm_10") == 2
    assert "'sm_10'" in capsys.readouterr().err
    monkeypatch.setattr(aot, "obstacle", lambda: "nvcc was not found")
    assert run_command() == 2
    assert "nvcc was not found" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_launches_are_those_of_the_kernels(host_cuda, dtype):
    for launch in shipped(dtype):
        solver = getattr(host_cuda.module, str(dtype).removeprefix("torch."))
        grid = getattr(solver, f"{launch.op}_grid")(launch.n, getattr(host_cuda.module.Path, launch.path))
        assert grid == (launch.warps * 32, launch.shared_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", ["eigh", "eig"])
def test_the_largest_size_is_the_last_that_has_a_path(host_cuda, op, dtype):
    solver = getattr(host_cuda.module, str(dtype).removeprefix("torch."))
    for limit in (host_cuda.module.SHARED_EVERYWHERE, 163 * 1024, 227 * 1024):
        largest = solver.largest(op, limit)
        taken = [n for n in range(1, 300) if getattr(solver, f"{op}_path")(n, limit).name != "none"]
        assert taken == list(range(1, largest + 1))
    assert host_cuda.module.float32.largest("eig", 163 * 1024) == 240
    assert host_cuda.module.float32.largest("eig", host_cuda.module.SHARED_EVERYWHERE) >= 197
    assert solver.largest("qr", host_cuda.module.SHARED_EVERYWHERE) == 32


@pytest.mark.slow
def test_the_ops_compile():
    """Against this build of torch, whatever it is: linking would need a CUDA one."""
    folder = nvcc.cache_folder(torch.__version__)
    if not (folder / "op.o").exists():
        include = os.path.join(os.path.dirname(torch.__file__), "include")
        command = [
            *(aot.find_nvcc(), *aot.FLAGS, "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{include}"),
            *("-arch=sm_80", "-c", str(aot.SOURCE.with_name("op.cu")), "-o", str(folder / "unfinished.o")),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-5000:]
        (folder / "unfinished.o").rename(folder / "op.o")
