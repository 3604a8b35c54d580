"""Compiles every kernel as its launcher would, for GPUs that need not be there, and says what it takes of them.

The launchers run on "meta" tensors and their launches are recorded, so what is compiled here is what will be launched.
"""

from __future__ import annotations

import itertools
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from overtone.triton_kernels.attention import config as attention_configs
from overtone.triton_kernels.attention import launch as attention
from overtone.triton_kernels.frequency import config as configs
from overtone.triton_kernels.frequency import launch as frequency
from overtone.triton_kernels.runtime import Launch, assume_architecture, record_launches

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ATTENTION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


class Kernel(NamedTuple):
    """A kernel in one shipped configuration, as it is launched in this case."""

    name: str
    case: str
    dtype: torch.dtype
    launch: Launch

    @property
    def options(self) -> dict[str, int]:
        """What the compiler is told besides the kernel's own constants."""
        return {name: value for name, value in self.launch.meta.items() if name in ("num_warps", "num_stages")}

    @property
    def tile(self) -> str:
        return "×".join(str(size) for name, size in self.launch.meta.items() if name in _SIZES)


_SIZES = ("BT", "BC", "BM", "BN", "BE", "BK", "PIECES")


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


def kernels(dtype: torch.dtype, architecture: str) -> list[Kernel]:
    """Every kernel in every configuration that is shipped for `dtype` on `architecture`, as the ops launch it."""
    found: dict[tuple, Kernel] = {}
    with assume_architecture(architecture):
        for case, call in _cases(dtype, architecture).items():
            with record_launches() as launches:
                call()
            for launch in launches:
                name = launch.kernel.fn.__name__.removesuffix("_kernel")
                key = variant(launch)
                if key not in found:
                    alike = [k for k in found.values() if (k.name, k.case, k.launch.meta) == (name, case, launch.meta)]
                    found[key] = Kernel(name, case + ",again" * len(alike), dtype, launch)
    return list(found.values())


def variant(launch: Launch) -> tuple:
    """What another compilation differs in: constants, and dtypes of the tensors or that they are absent."""
    kinds = tuple(
        getattr(arg, "dtype", None) if arg is None or torch.is_tensor(arg) else "number" for arg in launch.args
    )
    return launch.kernel.fn.__name__, tuple(launch.meta.items()), kinds


def _cases(dtype: torch.dtype, architecture: str) -> dict[str, Callable[[], None]]:
    """Calls that together make every configuration, by name."""
    cases: dict[str, Callable[[], None]] = {}
    for tokens in (*(config.BT for config in configs.WHOLE), 4 * configs.SPLIT_TOKENS):
        cases[f"N={tokens}"] = partial(_call_frequency_ops, dtype, tokens)
    for call in attention_calls(dtype, architecture) if dtype in ATTENTION_DTYPES else ():
        if attention_configs.is_shipped(architecture, dtype, call.width):
            cases[call.name] = call.__call__
    return cases


class AttentionCall(NamedTuple):
    """A call of attention: forward with norms and, unless it is for inference, every gradient, on a packed qkv."""

    dtype: torch.dtype
    tokens: int
    width: int
    channels: int
    mask: str = ""  # "bool", or "bias", which needs a gradient
    is_causal: bool = False
    precision: str = "ieee"
    is_inference: bool = False

    @property
    def name(self) -> str:
        sizes = f"N={self.tokens},D={self.width},E={self.channels}"
        precision, mode = self.precision.removeprefix("ieee"), "inference" * self.is_inference
        marks = ("causal" * self.is_causal, self.mask, precision, mode)
        return ",".join((sizes, *filter(None, marks)))

    def __call__(self) -> None:
        heads = 3
        empty = partial(torch.empty, dtype=self.dtype, device="meta")
        qkv = empty(64, self.tokens, 3, heads, self.width).permute(2, 0, 3, 1, 4).unbind(0)
        residual, basis = empty(64, self.tokens, self.channels), empty(heads * self.width, self.channels)
        call = *qkv, torch.empty(heads * self.width, device="meta"), basis
        dtypes = {"bool": torch.bool, "bias": torch.float32}
        shape = 64, heads, self.tokens, self.tokens
        mask = torch.empty(shape, dtype=dtypes[self.mask], device="meta") if self.mask else None
        rest = mask, self.is_causal, self.width**-0.5
        with _matmul_precision("high" if self.precision == "tf32" else "highest"):
            y, low, high, _, kept, rows = attention.forward(*call, residual, *rest, True, False, not self.is_inference)
            needs = 63 if self.mask == "bias" else 31
            if not self.is_inference:
                attention.backward(y, low, high, y, low, high, *call, *rest, kept, rows, needs)


@contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def attention_calls(dtype: torch.dtype, architecture: str) -> list[AttentionCall]:
    """Calls that together make every configuration of the table: all keys at once or not, one launch or two, masks."""
    calls = []
    has_tf32 = dtype == torch.float32 and attention_configs.has_tf32(architecture)
    for precision, width in itertools.product(("ieee", "tf32") if has_tf32 else ("ieee",), (64, 128)):
        call = partial(AttentionCall, dtype, precision=precision)
        calls += [call(tokens, width, channels) for tokens in (50, 65, 197, 1024) for channels in (192, 768)]
        for channels in (192, 768):
            calls += [call(tokens, width, channels, is_inference=True) for tokens in (197, 1024)]
            if dtype != torch.float32:  # whose blocks are the same with and without a mask
                calls += [call(tokens, width, channels, is_causal=True) for tokens in (197, 1024)]
            calls += [call(197, width, channels, "bool"), call(1024, width, channels, "bool", is_causal=True)]
            calls.append(call(1024, width, channels, "bias"))
            # Widths that do not fill their tile, one of which 16 does not divide.
            calls.append(call(1024, width * 3 // 4, channels, "bias", is_causal=True))
            narrow = width // 2 + 8
            calls += [call(197, narrow, channels), call(197, narrow, channels, "bias")]
    return calls


def _call_frequency_ops(dtype: torch.dtype, tokens: int) -> None:
    """On tokens with a mask."""
    x = torch.empty(64, tokens, 192, dtype=dtype, device="meta")
    mask = torch.empty(x.shape[:-1], dtype=torch.bool, device=x.device)
    gain = x.new_empty(x.shape[-1], dtype=frequency.statistics_dtype(x.dtype))
    low, high = frequency.norms(x, mask)
    frequency.norms_backward(low, high, x, low, high, mask)
    for is_causal in (False, True):
        frequency.filter(x, gain, gain, mask, is_causal)
        frequency.filter_backward(x, x, gain, gain, mask, is_causal, True)


def build(kernel: Kernel, architecture: Architecture) -> CompiledKernel:
    """Compile for `architecture`, without a GPU."""
    return triton.compile(
        _source(kernel.launch, architecture.target), target=architecture.target, options=kernel.options
    )


def compile(kernel: Kernel, architecture: Architecture) -> Usage:
    """What the kernel takes, compiled for `architecture`."""
    compiled = build(kernel, architecture)
    nvidia = architecture.target.backend == "cuda"
    registers, spills = _read_cubin(compiled.asm["cubin"]) if nvidia else _read_amdgcn(compiled.asm["amdgcn"])
    shared = compiled.metadata.shared
    return Usage(registers, spills, shared, occupancy(architecture, registers, shared, kernel.options["num_warps"]))


def compile_all(
    jobs: Sequence[tuple[str, torch.dtype]], workers: int, every: int = 1
) -> Iterator[tuple[Kernel, str, Usage]]:
    """Every kernel of every (architecture, dtype), or one of so many, with what it takes, in order."""
    todo = [
        (kernel, name, (name, dtype, index))
        for name, dtype in jobs
        for index, kernel in enumerate(kernels(dtype, name))
    ][::every]
    if workers == 1:
        for kernel, name, _ in todo:
            yield kernel, name, compile(kernel, ARCHITECTURES[name])
        return
    # Spawned, not forked: torch may have started threads here. Kernels cannot be sent, so a worker lists them again.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        usages = pool.map(_compile_listed, *zip(*(place for _, _, place in todo), strict=True))
        for (kernel, name, _), usage in zip(todo, usages, strict=True):
            yield kernel, name, usage


def _compile_listed(architecture: str, dtype: torch.dtype, index: int) -> Usage:
    return compile(_listed(architecture, dtype)[index], ARCHITECTURES[architecture])


@cache
def _listed(architecture: str, dtype: torch.dtype) -> list[Kernel]:
    return kernels(dtype, architecture)


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


def _source(launch: Launch, target: GPUTarget) -> ASTSource:
    """Types, constants and alignment as Triton's own launch derives them from arguments."""
    signature, constants, attributes = {}, {}, {}
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.meta
    for index, name in enumerate(launch.kernel.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            attributes[(index,)] = _ALIGNED + (_IN_32_BITS if target.backend == "hip" and _is_small(value) else [])
        elif value is None or launch.kernel.params[index].is_constexpr or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = _ALIGNED
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


_ALIGNED = [["tt.divisibility", 16]]
_IN_32_BITS = [["tt.pointer_range", 32]]  # lets AMD's compiler use buffer instructions


def _is_small(x: torch.Tensor) -> bool:
    return x.untyped_storage().size() < 2**31


_TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.bool: "i1",
    torch.uint8: "u8",
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
