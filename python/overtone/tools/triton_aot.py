"""Compiles every kernel as its launcher would, for GPUs that need not be there, and says what it takes of them.

The launchers run on "meta" tensors and their launches are recorded, so what is compiled here is what will be launched.
"""

from __future__ import annotations

import itertools
import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from overtone.tools.occupancy import ARCHITECTURES, Architecture, Usage, occupancy, read_amdgcn, read_cubin
from overtone.triton_kernels.attention import config as attention_configs
from overtone.triton_kernels.attention import launch as attention
from overtone.triton_kernels.frequency import config as configs
from overtone.triton_kernels.frequency import launch as frequency
from overtone.triton_kernels.runtime import Launch, accumulate_dtype, assume_architecture, record_launches

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ATTENTION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


_SIZES = ("BT", "BC", "BM", "BN", "BE", "E_TILE", "BK", "NUM_E_TILES")


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
    """What another compilation differs in: constants, dtypes of the tensors or that they are absent, unit strides."""
    values = zip(launch.kernel.arg_names, launch.args, strict=False)
    return launch.kernel.fn.__name__, tuple(launch.meta.items()), tuple(_kind(name, value) for name, value in values)


def _kind(name: str, value: Any) -> Any:
    if value is None or torch.is_tensor(value):
        return getattr(value, "dtype", None)
    # Triton takes an integer that is 1 for a constant. How many heads or tokens there are changes no kernel much.
    return "unit stride" if re.fullmatch(r"\w+_s\w", name) and value == 1 else "number"


def _cases(dtype: torch.dtype, architecture: str) -> dict[str, Callable[[], None]]:
    """Calls that together make every configuration, by name."""
    cases: dict[str, Callable[[], None]] = {}
    for tokens in (*(config.tile["BT"] for config in configs.SINGLE_PASS), 4 * configs.SPLIT_TOKENS):
        cases[f"N={tokens}"] = partial(_call_frequency_ops, dtype, tokens)
    for call in attention_calls(dtype, architecture) if dtype in ATTENTION_DTYPES else ():
        if attention_configs.unsupported_reason(architecture, dtype, call.width) is None:
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
    # What a model changes, joined by "+": "autocast" (residual and y are float32), "quiet" (no norms), "bare" (neither
    # norms nor residual), "bias", "drop" (stochastic depth), "gain", "addend" (of a head: float32), "value" (an addend
    # like the values).
    form: str = ""

    @property
    def name(self) -> str:
        sizes = f"N={self.tokens},D={self.width},E={self.channels}"
        precision, mode = self.precision.removeprefix("ieee"), "inference" * self.is_inference
        marks = ("causal" * self.is_causal, self.mask, precision, mode, self.form)
        return ",".join((sizes, *filter(None, marks)))

    def __call__(self) -> None:
        heads, batch, marks = 3, 64, set(self.form.split("+"))
        empty = partial(torch.empty, device="meta")
        qkv = empty(batch, self.tokens, 3, heads, self.width, dtype=self.dtype)
        wide = torch.float32 if "autocast" in marks else self.dtype
        residual = None if "bare" in marks else empty(batch, self.tokens, self.channels, dtype=wide)
        weight = empty(heads * self.width, self.channels)
        bias = empty(self.channels) if "bias" in marks else None
        sample_scale = empty(batch) if "drop" in marks else None
        gain = empty(heads) if "gain" in marks else None
        mask = self._mask(batch, heads)
        rest = mask, gain, self._addend(marks, batch, heads), self.is_causal, self.width**-0.5
        with _matmul_precision("tf32" if self.precision == "tf32" else "ieee"):
            y, _, _, attn_out, stats = attention.forward(
                *qkv.permute(2, 0, 3, 1, 4).unbind(0), weight, bias, residual, sample_scale, *rest,
                not marks & {"quiet", "bare"}, wide != self.dtype, not self.is_inference,
            )  # fmt: skip
            if not self.is_inference:
                wanted = (*(True,) * 4, self.mask == "bias", "gain" in marks, rest[2] is not None)
                output_mask = sum(want << bit for bit, want in enumerate(wanted))
                attention.backward_qkvpacked(y, qkv, weight, *rest, attn_out, stats, output_mask)

    def _mask(self, batch: int, heads: int) -> torch.Tensor | None:
        dtypes = {"bool": torch.bool, "bias": torch.float32}
        shape = batch, heads, self.tokens, self.tokens
        return torch.empty(shape, dtype=dtypes[self.mask], device="meta") if self.mask else None

    def _addend(self, marks: set[str], batch: int, heads: int) -> torch.Tensor | None:
        if "value" in marks:
            packed = torch.empty(batch, self.tokens, heads, self.width, dtype=self.dtype, device="meta")
            return packed.transpose(1, 2)
        if "addend" in marks:
            return torch.empty(batch, heads, 1, self.width, device="meta").expand(-1, -1, self.tokens, -1)
        return None


@contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = name
    try:
        yield
    finally:
        matmul.fp32_precision = before


# Of models: layers with ordinary weights have a bias; AttnScale has gain and addend, centered attention an addend, and
# NeuTRENO the first layer's values. For one architecture all of them are compiled, for the others the most common.
FORMS = ("autocast", "autocast+bias+drop+quiet", "autocast+gain+addend+quiet", "quiet", "bare")
PARTS = ("", "bias", "drop", "bias+drop", "gain+addend", "addend", "value")
MODEL_ARCHITECTURE = "sm_80"


# Every mask is compiled here; elsewhere one call of a ViT, which does not show what spills with a mask or a wide head.
THOROUGH = {
    torch.bfloat16: ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942"),
    torch.float32: ("sm_80", "sm_90"),
    torch.float16: ("gfx1100",),
}


def attention_calls(dtype: torch.dtype, architecture: str) -> list[AttentionCall]:
    """Calls that together make every configuration of the table: all keys at once or not, one launch or two, masks."""
    calls = []
    has_tf32 = dtype == torch.float32 and attention_configs.has_tf32(architecture)
    own_column = architecture == attention_configs.config_arch(architecture)
    for precision in ("ieee", "tf32") if has_tf32 else ("ieee",):
        calls.append(AttentionCall(dtype, 197, 64, 192, precision=precision))
        for width in (64, 128) if architecture in THOROUGH[dtype] else ():
            call = partial(AttentionCall, dtype, precision=precision)
            calls += [call(197, width, 192), *_masked_calls(call, width)]
            if dtype == torch.bfloat16 and own_column:
                calls += _more_calls(call, width)
    if architecture == MODEL_ARCHITECTURE and dtype != torch.float16:
        calls += _model_calls(partial(AttentionCall, dtype), "" if dtype == torch.float32 else "autocast")
    return calls


def _masked_calls(call: Callable[..., AttentionCall], width: int) -> list[AttentionCall]:
    calls = [call(1024, width, 768), call(1024, width, 768, "bool", is_causal=True)]
    # A width that does not fill its tile.
    calls.append(call(1024, width * 3 // 4, 192, "bias", is_causal=True))
    if width == 64:
        calls += [call(197, width, 192, "bool"), call(1024, width, 192, "bias")]
        calls += [call(tokens, width, channels, is_inference=True) for tokens, channels in ((1024, 192), (197, 768))]
        calls.append(call(197, width, 192, is_causal=True))
    return calls


def _more_calls(call: Callable[..., AttentionCall], width: int) -> list[AttentionCall]:
    calls = [call(50, width, 192), call(65, width, 192), call(1024, width, 192), call(1024, width, 768, is_causal=True)]
    for channels in (192, 768):
        calls += [call(197, width, channels, form=form) for form in (FORMS if width == 64 else FORMS[:1])]
        calls.append(call(197, width // 2 + 8, channels))  # 16 does not divide it
    calls.append(call(1024, width, 192, form="autocast"))
    calls.append(call(1024, width, 768, "bias", form="gain+addend"))
    return calls


def _model_calls(call: Callable[..., AttentionCall], autocast: str) -> list[AttentionCall]:
    """Every form in which a ViT's layers are trained, and those of inference."""
    calls = []
    for channels, part, norms in itertools.product((192, 768), PARTS, ("", "quiet")):
        calls.append(call(197, 64, channels, form="+".join(filter(None, (autocast, part, norms)))))
    for channels, part, norms in itertools.product((192, 768), ("", "bias"), ("", "quiet")):
        form = "+".join(filter(None, (autocast, part, norms)))
        calls.append(call(197, 64, channels, form=form, is_inference=True))
    return calls


def _call_frequency_ops(dtype: torch.dtype, tokens: int) -> None:
    """On tokens with a mask."""
    x = torch.empty(64, tokens, 192, dtype=dtype, device="meta")
    mask = torch.empty(x.shape[:-1], dtype=torch.bool, device=x.device)
    gain = x.new_empty(x.shape[-1], dtype=accumulate_dtype(x.dtype))
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
    registers, spills = read_cubin(compiled.asm["cubin"]) if nvidia else read_amdgcn(compiled.asm["amdgcn"])
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
