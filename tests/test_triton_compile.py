"""Every Triton kernel compiles for every architecture without a spill, within its limits and its budget, and to the
machine code that is wanted. No GPU is needed.

kernel_budget.csv holds what every kernel took of every architecture when it was last written, with
    overtone kernels --check --write-budget tests/kernel_budget.csv
To stay within minutes, the table is checked as a whole, and SAMPLE of it is compiled again;
`overtone kernels --check --budget tests/kernel_budget.csv` compiles everything.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton_process import needs_triton

from overtone.cli import kernels as command

pytestmark = needs_triton

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100")
EVERY_DTYPE = ("sm_120", "gfx1100")
BUDGET = Path(__file__).parent / "kernel_budget.csv"
# Every architecture's compiler path and every dtype at least once.
SAMPLE = {
    "bfloat16": ("sm_80", "sm_90", "gfx942"),
    "float32": ("sm_120",),
    "float64": ("gfx1100",),
    "float16": ("gfx1100",),
}


@pytest.fixture
def aot():
    from overtone.triton_kernels import compile as aot

    return aot


def test_the_budget_has_every_kernel_within_every_limit(aot):
    """A kernel, a configuration or an architecture that is new is missing there until the budget is written again."""
    with BUDGET.open(newline="") as file:
        budget = {tuple(row[: command._PLACE]): row[command._PLACE :] for row in csv.reader(file)}
    seen = 1  # the header
    for name, dtype in itertools.product(aot.ARCHITECTURES, aot.DTYPES):
        for kernel in aot.kernels(dtype, name):
            registers, spills, shared, occupancy = budget[command._row(kernel, name, _NOTHING)[: command._PLACE]]
            usage = aot.Usage(int(registers), int(spills), int(shared), float(occupancy.rstrip("%")) / 100)
            assert usage.problem(aot.ARCHITECTURES[name]) is None, (kernel.name, kernel.case, name, dtype)
            seen += 1
    assert seen == len(budget), "the budget has kernels that are no more"


_NOTHING = SimpleNamespace(registers=0, spills=0, shared=0, occupancy=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SAMPLE)
def test_limits_and_budget(capsys, dtype):
    """As a user would type it."""
    where = [argument for name in SAMPLE[dtype] for argument in ("--arch", name)]
    status = run_command("--check", "--budget", str(BUDGET), "--dtype", dtype, *where)
    report = capsys.readouterr().out
    assert status == 0, [line for line in report.splitlines() if line.startswith("problem")]


def test_every_architecture_is_tested(aot):
    assert set(aot.ARCHITECTURES) == set(ARCHITECTURES)


def test_every_kernel_and_configuration_is_compiled(aot):
    from overtone.triton_kernels import (
        attention_backward,
        attention_configs,
        attention_forward,
        configs,
        frequency,
    )

    attention = (attention_forward, attention_backward)
    for dtype in aot.DTYPES:
        compiled = aot.kernels(dtype, "sm_80")
        modules = (frequency, *attention) if dtype in aot.ATTENTION_DTYPES else (frequency,)
        written = {name.removesuffix("_kernel") for module in modules for name in vars(module) if _is_kernel(name)}
        if dtype == torch.float32:
            written.remove("fused")  # one launch is for half precision
        assert {kernel.name for kernel in compiled} == written
        shipped = {configs.for_dtype(config, dtype) for config in (*configs.WHOLE, configs.SPLIT, configs.CAUSAL)}
        shipped |= {configs.whole(config.BT, dtype, tiles=2) for config in configs.WHOLE}
        assert shipped <= {
            aot.configs.Config(**k.launch.meta)
            for k in compiled
            if "BT" in k.launch.meta and "BC" in k.launch.meta and "num_stages" not in k.launch.meta
        }
    for name in aot.ARCHITECTURES:
        for dtype in (torch.float32, torch.bfloat16):
            launched = [kernel.launch.meta.items() for kernel in aot.kernels(dtype, name)]
            for width, masked in itertools.product((64, 128), (False, True)):
                for blocks in attention_configs.table(name, dtype, width, masked).blocks.values():
                    assert any(blocks.meta.items() <= meta for meta in launched), (name, dtype, width, masked, blocks)


def _is_kernel(name: str) -> bool:
    return name.endswith("_kernel")


@pytest.mark.parametrize("architecture", EVERY_DTYPE)
def test_a_spill_is_seen(aot, architecture):
    """Two tiles of 512 × 16 values are too much for the registers of two warps."""
    kernel = next(k for k in aot.kernels(torch.float32, architecture) if k.name == "filter_backward")
    config = aot.configs.Config(BT=512, BC=16, num_warps=2)
    kernel = kernel._replace(launch=kernel.launch._replace(meta=config.meta))
    limits = aot.ARCHITECTURES[architecture]
    assert "spills" in aot.compile(kernel, limits).problem(limits)


def test_limits(aot):
    limits = aot.ARCHITECTURES["sm_120"]
    good = aot.Usage(registers=64, spills=0, shared=1024, occupancy=0.5)
    assert good.problem(limits) is None
    assert "shared memory" in good._replace(shared=100 * 1024).problem(limits)
    assert "does not fit" in good._replace(occupancy=0.0).problem(limits)


@pytest.mark.parametrize(
    "architecture, registers, shared, warps, wanted",
    [
        ("sm_80", 32, 0, 4, 1.0),  # 64 warps of 32 threads take all 65536 registers
        ("sm_80", 33, 0, 4, 0.75),  # 40 allocated: 12 blocks instead of 16
        ("sm_80", 255, 0, 4, 0.125),
        ("sm_90", 32, 100 * 1024, 4, 0.125),  # two blocks' shared memory
        ("sm_120", 40, 0, 4, 1.0),
        ("gfx942", 128, 0, 4, 0.5),  # 512 registers per lane: four waves of eight
        ("gfx1100", 96, 0, 4, 1.0),
    ],
)
def test_occupancy(aot, architecture, registers, shared, warps, wanted):
    limits = aot.ARCHITECTURES[architecture]
    assert aot.occupancy(limits, registers, shared, warps) == wanted


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["kernels", *arguments])
    return args.run(args)


def test_command(aot, monkeypatch, capsys, tmp_path):
    usage = aot.Usage(registers=77, spills=0, shared=512, occupancy=0.25)
    monkeypatch.setattr(aot, "compile", lambda kernel, architecture: usage)
    budget = tmp_path / "budget.csv"
    here = ("--jobs", "1", "--arch", "sm_90", "--dtype", "float64")
    assert run_command("--check", *here, "--arch", "gfx942", "--write-budget", str(budget)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == list(command._HEADER)
    assert lines[1].split() == ["norms", "N=64", "64×32", "4", "float64", "sm_90", "77", "0", "512", "25.0%"]
    assert lines[-1].endswith("0 with a spill or an exceeded limit")

    usage = usage._replace(spills=8)
    assert run_command(*here) == 0
    assert run_command("--check", *here) == 1
    assert "spills 8 bytes" in capsys.readouterr().out

    for worse in ({"registers": 78}, {"shared": 513}, {"occupancy": 0.2}):
        usage = aot.Usage(registers=77, spills=0, shared=512, occupancy=0.25)._replace(**worse)
        assert run_command("--check", *here, "--budget", str(budget)) == 1
        assert "the budget is 77, 0, 512, 25.0%" in capsys.readouterr().out
    usage = aot.Usage(registers=70, spills=0, shared=500, occupancy=0.5)
    assert run_command("--check", *here, "--budget", str(budget)) == 0
    capsys.readouterr()
    assert run_command("--check", "--jobs", "1", "--arch", "sm_80", "--dtype", "float64", "--budget", str(budget)) == 1
    assert "--write-budget adds it" in capsys.readouterr().out


def test_command_names_what_it_knows(capsys):
    assert run_command("--arch", "sm_10") == 2
    message = capsys.readouterr().err
    assert "'sm_10'" in message and all(name in message for name in ARCHITECTURES)


# What the machine code does. The kernels are in SAMPLE, so Triton's cache has them already.
CODE = [
    (name, architecture)
    for architecture in ("sm_80", "sm_90", "gfx942")
    for name in (
        "attention", "fused", "projection", "heads_gradient", "basis_gradient", "key_value_gradient", "query_gradient"
    )
]  # fmt: skip
# The instruction that multiplies matrices of bfloat16.
MATRIX_INSTRUCTION = {
    "sm_80": r"mma\.sync\.\S*bf16",
    "sm_90": r"(wgmma|mma\.sync)\S*bf16",
    "gfx942": r"v_mfma_f32_\S*bf16",
}


@pytest.fixture(scope="module")
def machine_code():
    """(kernel's name, architecture) -> its assembly, for the loop over many tokens in bfloat16, without a mask."""
    from overtone.triton_kernels import compile as aot

    def build(name, architecture):
        kernels = [k for k in aot.kernels(torch.bfloat16, architecture) if k.name == name and "causal" not in k.case]
        kernel = max(kernels, key=lambda k: (not k.launch.meta.get("WHOLE"), k.launch.meta.get("D", 64) == 64))
        compiled = aot.build(kernel, aot.ARCHITECTURES[architecture])
        return kernel, compiled.asm["amdgcn" if architecture.startswith("gfx") else "ptx"]

    return build


@pytest.mark.slow
@pytest.mark.parametrize("name, architecture", CODE)
def test_machine_code(machine_code, name, architecture):
    kernel, code = machine_code(name, architecture)
    assert re.search(MATRIX_INSTRUCTION[architecture], code), "no matrix instruction"
    if architecture.startswith("gfx"):
        assert not re.search(r"\bv_(add|mul|fma|max|min|rcp|sqrt)\w*_f64", code), "float64 arithmetic"
        assert not re.search(r"\bscratch_(load|store)", code), "local memory"
        assert re.search(r"\b(buffer|global)_load_dwordx4", code), "no vectorised load"
        assert re.search(r"\b(buffer|global)_store_(dwordx[24])", code), "no vectorised store"
        return
    assert not re.search(r"\.f64", code), "float64 arithmetic"
    assert not re.search(r"\b(ld|st)\.local|\.local\s+\.align", code), "local memory"
    is_copied = re.search(r"cp\.async\.cg\.shared\.global \[ ?%\S+ ?\+ ?\d+ ?\], \[ ?%\S+ ?\+ ?\d+ ?\], 0x10", code)
    assert is_copied or re.search(r"ld\.global\S*\.v4\.b32", code), "no vectorised load"
    assert re.search(r"st\.global\S*\.v[24]\.b32", code), "no vectorised store"
    if kernel.options["num_stages"] > 1:
        assert re.search(r"cp\.async", code), "loads are not asynchronous"


@pytest.mark.parametrize("shape", ["Ti-cifar", "Ti-224", "S-224", "B-224"])
@pytest.mark.parametrize("gpu", ["A100", "H100", "B200", "MI300X"])
def test_memory_traffic(shape, gpu):
    """At most half of eager PyTorch's in forward, 0.35 of it in one launch, and 0.65 with backward."""
    from overtone.triton_kernels import attention_model as model

    shape = next(s for s in model.SHAPES if s.label == shape)
    for training, wanted in ((False, 0.35 if shape.channels <= 192 else 0.5), (True, 0.65)):
        ours = model.ours(shape, torch.bfloat16, model.GPUS[gpu].architecture, training)
        eager = model.eager(shape, torch.bfloat16, training)
        assert (ours[0].name == "fused") == (shape.channels <= 192)
        assert sum(c.bytes for c in ours) <= wanted * sum(c.bytes for c in eager)


def test_the_model_is_printed(capsys):
    assert run_command("--model") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["shape", "GPU", "mode"]
    assert len(lines) == 1 + 4 * 4 * 2 + 1
    assert "not a measurement" in lines[-1]
