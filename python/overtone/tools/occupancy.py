"""Limits of every architecture, what a compiled kernel takes of them, and how many of its warps can be resident."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget


class Architecture(NamedTuple):
    """A GPU's limits: of a block (workgroup), and of the processor (SM, CU, WGP) that runs several of them."""

    target: GPUTarget
    shared_per_block: int
    shared_per_processor: int
    registers_per_thread: int
    registers_per_processor: int  # of 32 bits
    register_granularity: int  # per thread
    warps_per_processor: int


KIB = 1024
ARCHITECTURES = {
    "sm_80": Architecture(GPUTarget("cuda", 80, 32), 163 * KIB, 164 * KIB, 255, 65536, 8, 64),
    "sm_89": Architecture(GPUTarget("cuda", 89, 32), 99 * KIB, 100 * KIB, 255, 65536, 8, 48),
    "sm_90": Architecture(GPUTarget("cuda", 90, 32), 227 * KIB, 228 * KIB, 255, 65536, 8, 64),
    "sm_100": Architecture(GPUTarget("cuda", 100, 32), 227 * KIB, 228 * KIB, 255, 65536, 8, 64),
    "sm_120": Architecture(GPUTarget("cuda", 120, 32), 99 * KIB, 100 * KIB, 255, 65536, 8, 48),
    "gfx942": Architecture(GPUTarget("hip", "gfx942", 64), 64 * KIB, 64 * KIB, 512, 4 * 512 * 64, 8, 32),
    "gfx1100": Architecture(GPUTarget("hip", "gfx1100", 32), 64 * KIB, 128 * KIB, 256, 4 * 1536 * 32, 24, 64),
}


class Usage(NamedTuple):
    """What a compiled kernel takes. Spills: bytes of local memory per thread; occupancy: resident warps / possible."""

    registers: int
    spills: int
    shared: int
    occupancy: float

    def violation(self, architecture: Architecture) -> str | None:
        if self.spills:
            return f"spills {self.spills} bytes"
        if self.shared > architecture.shared_per_block:
            return f"wants {self.shared} bytes of shared memory, a block may have {architecture.shared_per_block}"
        if self.registers > architecture.registers_per_thread:
            return f"wants {self.registers} registers, a thread may have {architecture.registers_per_thread}"
        return None if self.occupancy else "does not fit on a processor"


def occupancy(architecture: Architecture, registers: int, shared: int, warps: int) -> float:
    """The share of a processor's warps that can be resident, by blocks of so many warps, registers and bytes."""
    granularity = architecture.register_granularity
    allocated = max(1, -(-registers // granularity)) * granularity * warps * architecture.target.warp_size
    blocks = min(
        architecture.warps_per_processor // warps,
        architecture.registers_per_processor // allocated,
        architecture.shared_per_processor // shared if shared else architecture.warps_per_processor,
    )
    return blocks * warps / architecture.warps_per_processor


def read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory per thread."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def read_amdgcn(assembly: str) -> tuple[int, int]:
    """Vector registers and bytes of private memory per thread."""
    usage = {
        key: int(value)
        for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", assembly)
    }
    return usage["vgpr_count"], max(4 * usage["vgpr_spill_count"], usage["private_segment_fixed_size"])
