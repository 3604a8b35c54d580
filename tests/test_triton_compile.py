"""Every Triton kernel compiles for every architecture without a spill and within its limits. No GPU is needed.

To stay within minutes, float32 is compiled for every architecture and the other dtypes for one of NVIDIA's and one of
AMD's; `overtone kernels --check` compiles everything for everything.
"""

from __future__ import annotations

import argparse

import pytest
import torch
from triton_process import needs_triton

from overtone.cli import kernels as command

pytestmark = needs_triton

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100")
EVERY_DTYPE = ("sm_120", "gfx1100")


@pytest.fixture
def aot():
    from overtone.triton_kernels import compile as aot

    return aot


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, dtype",
    [(name, torch.float32) for name in ARCHITECTURES]
    + [(name, dtype) for name in EVERY_DTYPE for dtype in (torch.float64, torch.bfloat16, torch.float16)],
)
def test_fits(aot, architecture, dtype):
    limits = aot.ARCHITECTURES[architecture]
    for kernel in aot.kernels(dtype):
        usage = aot.compile(kernel, limits)
        assert usage.problem(limits) is None, f"{kernel.name} {kernel.config}: {usage.problem(limits)} ({usage})"
        assert usage.registers > 0


def test_every_architecture_is_tested(aot):
    assert set(aot.ARCHITECTURES) == set(ARCHITECTURES)


def test_every_kernel_and_configuration_is_compiled(aot):
    from overtone.triton_kernels import configs, frequency

    written = {name.removesuffix("_kernel") for name in vars(frequency) if name.endswith("_kernel")}
    for dtype in aot.DTYPES:
        compiled = aot.kernels(dtype)
        assert {kernel.name for kernel in compiled} == written
        shipped = {configs.for_dtype(config, dtype) for config in (*configs.WHOLE, configs.SPLIT, configs.CAUSAL)}
        shipped |= {configs.whole(config.BT, dtype, tiles=2) for config in configs.WHOLE}
        assert shipped <= {kernel.config for kernel in compiled}


@pytest.mark.parametrize("architecture", EVERY_DTYPE)
def test_a_spill_is_seen(aot, architecture):
    """Two tiles of 512 × 16 values are too much for the registers of two warps."""
    kernel = next(k for k in aot.kernels(torch.float32) if k.name == "filter_backward")
    config = aot.configs.Config(BT=512, BC=16, num_warps=2)
    kernel = kernel._replace(config=config, launch=kernel.launch._replace(meta=config.meta))
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


def test_command(aot, monkeypatch, capsys):
    usage = aot.Usage(registers=77, spills=0, shared=512, occupancy=0.25)
    monkeypatch.setattr(aot, "compile", lambda kernel, architecture: usage)
    assert run_command("--check", "--arch", "sm_90", "--arch", "gfx942") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == list(command._HEADER)
    assert lines[1].split() == ["norms", "64", "64×64", "4", "float32", "sm_90", "77", "0", "512", "25%"]
    assert lines[-1].endswith("0 with a spill or an exceeded limit")

    usage = usage._replace(spills=8)
    assert run_command("--arch", "sm_90", "--dtype", "float64") == 0
    assert run_command("--check", "--arch", "sm_90", "--dtype", "float64") == 1
    assert "spills 8 bytes" in capsys.readouterr().out


def test_command_names_what_it_knows(capsys):
    assert run_command("--arch", "sm_10") == 2
    message = capsys.readouterr().err
    assert "'sm_10'" in message and all(name in message for name in ARCHITECTURES)
