"""Compiles every kernel as its launcher would, for GPUs that need not be there, and says what it takes of them.

The launchers run on "meta" tensors and their launches are recorded, so what is compiled here is what will be launched.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overtone.triton_kernels import configs, frequency
from overtone.triton_kernels.launch import Launch, record_launches

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
    "sm_90": Architecture(GPUTarget("cuda", 90, 32), 227 * KIB, 228 * KIB, 255, 65536, 8, 64),
    "sm_100": Architecture(GPUTarget("cuda", 100, 32), 227 * KIB, 228 * KIB, 255, 65536, 8, 64),
    "sm_120": Architecture(GPUTarget("cuda", 120, 32), 99 * KIB, 100 * KIB, 255, 65536, 8, 48),
    "gfx942": Architecture(GPUTarget("hip", "gfx942", 64), 64 * KIB, 64 * KIB, 512, 4 * 512 * 64, 8, 32),
    "gfx1100": Architecture(GPUTarget("hip", "gfx1100", 32), 64 * KIB, 128 * KIB, 256, 4 * 1536 * 32, 24, 64),
}


class Kernel(NamedTuple):
    """A kernel in one shipped configuration, as it is launched for this many tokens."""

    name: str
    tokens: int
    dtype: torch.dtype
    config: configs.Config
    launch: Launch


class Usage(NamedTuple):
    """What a compiled kernel takes. Spills: bytes of local memory per thread; occupancy: resident warps / possible."""

    registers: int
    spills: int
    shared: int
    occupancy: float

    def problem(self, architecture: Architecture) -> str | None:
        if self.spills:
            return f"spills {self.spills} bytes"
        if self.shared > architecture.shared_per_block:
            return f"wants {self.shared} bytes of shared memory, a block may have {architecture.shared_per_block}"
        if self.registers > architecture.registers_per_thread:
            return f"wants {self.registers} registers, a thread may have {architecture.registers_per_thread}"
        return None if self.occupancy else "does not fit on a processor"


def kernels(dtype: torch.dtype) -> list[Kernel]:
    """Every kernel in every configuration that is shipped for `dtype`, as the ops launch it for tokens with a mask."""
    found: dict[tuple, Kernel] = {}
    for tokens in (*(config.BT for config in configs.WHOLE), 4 * configs.SPLIT_TOKENS):
        with record_launches() as launches:
            _call_frequency_ops(torch.empty(64, tokens, 192, dtype=dtype, device="meta"))
        for launch in launches:
            name = launch.kernel.fn.__name__.removesuffix("_kernel")
            config = configs.Config(**launch.meta)
            absent = tuple(arg is None for arg in launch.args)  # what is absent is compiled away
            found.setdefault((name, config, absent), Kernel(name, tokens, dtype, config, launch))
    return list(found.values())


def _call_frequency_ops(x: torch.Tensor) -> None:
    mask = torch.empty(x.shape[:-1], dtype=torch.bool, device=x.device)
    gain = x.new_empty(x.shape[-1], dtype=frequency.statistics_dtype(x.dtype))
    low, high = frequency.norms(x, mask)
    frequency.norms_backward(low, high, x, low, high, mask)
    for is_causal in (False, True):
        frequency.filter(x, gain, gain, mask, is_causal)
        frequency.filter_backward(x, x, gain, gain, mask, is_causal, True)


def compile(kernel: Kernel, architecture: Architecture) -> Usage:
    """Compile for `architecture`, without a GPU."""
    compiled = triton.compile(
        _source(kernel.launch), target=architecture.target, options={"num_warps": kernel.config.num_warps}
    )
    nvidia = architecture.target.backend == "cuda"
    registers, spills = _read_cubin(compiled.asm["cubin"]) if nvidia else _read_amdgcn(compiled.asm["amdgcn"])
    shared = compiled.metadata.shared
    return Usage(registers, spills, shared, occupancy(architecture, registers, shared, kernel.config.num_warps))


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


def _source(launch: Launch) -> ASTSource:
    """Types, constants and alignment as Triton's own launch derives them from arguments."""
    signature, constants, attributes = {}, {}, {}
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.meta
    for index, name in enumerate(launch.kernel.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
        elif value is None or value == 1 or launch.kernel.params[index].is_constexpr:
            signature[name] = "constexpr"
            constants[(index,)] = value
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (signature[name] != "constexpr" and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


_TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.bool: "i1",
    torch.int64: "i64",
}


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory per thread."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _read_amdgcn(assembly: str) -> tuple[int, int]:
    """Vector registers and bytes of private memory per thread."""
    usage = {
        key: int(value)
        for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", assembly)
    }
    return usage["vgpr_count"], max(4 * usage["vgpr_spill_count"], usage["private_segment_fixed_size"])
