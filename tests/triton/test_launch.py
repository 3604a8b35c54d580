"""How attention's kernels are launched: everything between the op and the GPU, which is replaced by a recorder."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from ops.test_attention import random_call
from support.attention_calls import run_both_ways
from support.fake_driver import STREAM, recording
from support.interpreter import needs_triton

pytestmark = needs_triton


@pytest.fixture
def attention():
    from overtone.triton_kernels.attention import launch as attention

    return attention


@pytest.mark.parametrize("name", ["sm_90", "gfx942"])
def test_what_reaches_the_driver(attention, name):
    """Grid, stream, warps, shared memory, and that ahead-of-time compilation compiles the very same thing."""
    from overtone.tools import triton_aot as aot
    from overtone.triton_kernels.runtime import assume_architecture, record_launches

    architecture = aot.ARCHITECTURES[name]
    args = random_call(2, 3, 197, 197, 64, 384, torch.bfloat16, packed=True)
    with assume_architecture(name):
        with record_launches() as asked:
            run_both_ways(attention, args, output_mask=0b1111)
        with recording(architecture.target, architecture.shared_per_block) as launches:
            run_both_ways(attention, args, output_mask=0b1111)
    names = [launch.name for launch in launches]
    assert names == [launch.kernel.fn.__name__ for launch in asked]
    assert names[:2] == ["attention_kernel", "projection_kernel"]
    for launch, wanted in zip(launches, asked, strict=True):
        assert launch.stream == STREAM
        assert launch.grid == (*wanted.grid, 1, 1)[:3] and math.prod(launch.grid) > 0
        assert launch.metadata.num_warps == wanted.meta["num_warps"]
        assert launch.metadata.shared <= architecture.shared_per_block
        source = aot._source(wanted, architecture.target)
        assert source.signature == launch.source.signature
        assert source.constants == launch.source.constants
        assert source.attrs == {index: attributes for index, attributes in launch.source.attrs.items() if attributes}


def test_programs_cover_every_token_and_channel_once(attention):
    """The number of programs of each kernel, by the blocks of the table."""
    from overtone.triton_kernels.attention import config as attention_configs
    from overtone.triton_kernels.runtime import assume_architecture, record_launches

    batch, heads, queries, keys, width, channels = 2, 3, 130, 70, 80, 300
    args = random_call(batch, heads, queries, keys, width, channels, torch.float16)
    with assume_architecture("sm_90"), record_launches() as launches:
        run_both_ways(attention, args, output_mask=0b1111, norms=False)
    table = attention_configs.table("sm_90", torch.float16, "ieee", width, masked=False)
    grids = {launch.kernel.fn.__name__.removesuffix("_kernel"): launch.grid for launch in launches}

    def blocks(kernel, name, size):
        return -(-size // table.by_kernel[kernel].tile[name])

    first = table.attention(keys).tile["BM"]
    assert grids["attention"] == (batch * heads * -(-queries // first),)
    tokens = batch * blocks("projection", "BM", queries)
    assert grids["projection"] == (tokens * blocks("projection", "E_TILE", channels),)
    assert grids["dout"] == (heads * blocks("dout", "BM", batch * queries),)  # tokens of all images
    assert grids["dkv"] == (batch * heads * blocks("dkv", "BN", keys),)
    assert grids["dq"] == (batch * heads * blocks("dq", "BM", queries),)
    tiles = blocks("dweight", "BM", heads * width) * blocks("dweight", "BE", channels)
    assert grids["dweight"] == (tiles,)  # 260 tokens are one split


def test_strides_are_passed_as_they_are(attention):
    """No copy of a packed qkv, of a transposed residual, or of a broadcast mask."""
    from overtone.triton_kernels.runtime import record_launches

    args = list(random_call(2, 3, 33, 33, 64, 200, torch.float16, packed=True))  # two launches
    args[5] = args[5].detach().transpose(0, 1).contiguous().transpose(0, 1)
    mask = torch.ones(33, dtype=torch.bool).expand(2, 3, 33, 33)
    with record_launches() as launches:
        run_both_ways(attention, args, mask)
    first, second = launches[0], launches[1]
    values = dict(zip(first.kernel.arg_names, first.args, strict=False))
    for name, tensor in (("q", args[0]), ("k", args[1]), ("v", args[2])):
        assert values[f"p_{name}"].data_ptr() == tensor.data_ptr()
        assert tuple(values[f"{name}_s{d}"] for d in "bhtd") == tensor.stride()
    assert [values[f"mask_s{d}"] for d in "bhqk"] == [0, 0, 0, 1]
    values = dict(zip(second.kernel.arg_names, second.args, strict=False))
    assert values["p_r"].data_ptr() == args[5].data_ptr()
    assert tuple(values[f"r_s{d}"] for d in "bte") == args[5].stride()


@pytest.mark.parametrize("width, unit", [(64, 1), (80, 1), (72, 8), (88, 8), (20, 1)])
def test_kernels_are_told_what_divides_strides_that_16_does_not(attention, width, unit):
    from overtone.triton_kernels.runtime import record_launches

    with record_launches() as launches:
        run_both_ways(attention, random_call(2, 3, 33, 33, width, 200, torch.float16, packed=True))
    assert {launch.meta["STRIDE_ALIGN"] for launch in launches if "STRIDE_ALIGN" in launch.meta} == {unit}
    assert sum("STRIDE_ALIGN" in launch.meta for launch in launches) == 3


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("sm_80", "sm_80"), ("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_90", "sm_90"), ("sm_100", "sm_90"),
        ("sm_103", "sm_90"), ("sm_120", "sm_80"), ("sm_75", "sm_80"), ("gfx942", "gfx942"), ("gfx950", "gfx942"),
        ("gfx90a", "gfx942"), ("gfx1100", "gfx1100"), ("gfx1201", "gfx1100"),
    ],
)  # fmt: skip
def test_every_gpu_has_configurations(name, wanted):
    from overtone.triton_kernels.attention import config as attention_configs

    assert attention_configs.config_arch(name) == wanted
    for dtype, precision in ((torch.float32, "ieee"), (torch.float32, "tf32"), (torch.bfloat16, "ieee")):
        if precision == "tf32" and not attention_configs.has_tf32(name):
            continue
        for width, masked in ((1, False), (64, True), (72, False), (128, True)):
            if attention_configs.unsupported_reason(name, dtype, width) is not None:
                assert (dtype, wanted) == (torch.float32, "gfx1100") and width > 64
                continue
            table = attention_configs.table(name, dtype, precision, width, masked)
            assert width <= table.BD and table.BD % 16 == 0
            everywhere = {"attention", "projection", "dout", "dweight", "dq"}
            assert everywhere <= set(table.by_kernel)
            assert ("dkv" in table.by_kernel) != ("dkv_split" in table.by_kernel)


def test_heads_that_no_registers_hold_are_refused(attention):
    from overtone.triton_kernels.runtime import assume_architecture, record_launches

    with assume_architecture("gfx1100"), record_launches() as launches:
        with pytest.raises(NotImplementedError, match="on gfx1100 supports head_dim ≤ 64 in torch.float32, got 72"):
            run_both_ways(attention, random_call(width=72), output_mask=0b1111)
        assert not launches
        run_both_ways(attention, random_call(width=64), output_mask=0b1111)
        run_both_ways(attention, random_call(width=72, dtype=torch.bfloat16), output_mask=0b1111)


@pytest.mark.parametrize(
    "channels, keys, masked, single_pass, tiles",
    [
        (192, 197, False, True, 3), (64, 65, False, True, 1), (192, 1000, False, False, 3),
        (193, 65, False, None, None), (192, 65, True, False, 3),
    ],
)  # fmt: skip
def test_which_form_of_forward(channels, keys, masked, single_pass, tiles):
    from overtone.triton_kernels.attention import config as attention_configs

    config = attention_configs.table("sm_80", torch.bfloat16, "ieee", 64, masked).fused(channels, keys)
    if single_pass is None:
        assert config is None
    else:
        assert config.tile["SINGLE_PASS"] == single_pass and config.tile["NUM_E_TILES"] == tiles
        assert not single_pass or keys <= config.tile["BN"] < 4 * keys


@pytest.mark.parametrize("tokens, tiles", [(0, 9), (1, 9), (1024, 9), (25_000, 9), (25_000, 144), (10**7, 9)])
def test_splits_of_dweight(tokens, tiles):
    from overtone.triton_kernels.attention import config as attention_configs

    split = attention_configs.tokens_per_split(tokens, tiles, 64)
    splits = -(-tokens // split)
    assert split % 64 == 0 and split > 0
    assert splits <= max(1, tokens // attention_configs.SPLIT_TOKENS)
    assert splits * tiles < attention_configs.PROGRAMS + tiles
    if splits > 1:
        assert split >= attention_configs.SPLIT_TOKENS - 64


TF32_SWITCHES = """
import itertools, torch
from overtone.triton_kernels.attention.launch import _dot_precision
from overtone.triton_kernels.runtime import assume_architecture

def set_to(place, name, value):
    return lambda: setattr(place, name, value)

matmul, half, single = torch.backends.cuda.matmul, torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
switches = {
    "old high": lambda: torch.set_float32_matmul_precision("high"),
    "old highest": lambda: torch.set_float32_matmul_precision("highest"),
    "old allow": set_to(matmul, "allow_tf32", True), "old forbid": set_to(matmul, "allow_tf32", False),
    "new tf32": set_to(matmul, "fp32_precision", "tf32"), "new ieee": set_to(matmul, "fp32_precision", "ieee"),
    "new tf32 everywhere": set_to(torch.backends, "fp32_precision", "tf32"),
    "new ieee everywhere": set_to(torch.backends, "fp32_precision", "ieee"),
}
wanted = {"old high": True, "old allow": True, "new tf32": True, "old highest": False, "new ieee": False}
with assume_architecture("sm_80"):
    assert _dot_precision(single) == "ieee"
    for names in itertools.permutations(switches, 2):
        for name in names:
            switches[name]()
            allows = _dot_precision(single) == "tf32"
            assert allows == (matmul.fp32_precision == "tf32") and allows == wanted.get(name, allows), names
            assert _dot_precision(half) == "ieee"
"""


def test_tf32_by_torchs_old_switches_and_new_ones_in_any_order():
    """In a process of its own: once a new switch was used, torch's old getters raise."""
    result = subprocess.run([sys.executable, "-c", TF32_SWITCHES], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_tf32_only_where_there_is_tf32(attention, monkeypatch):
    from overtone.triton_kernels.runtime import assume_architecture, record_launches

    def precisions(dtype, architecture):
        with assume_architecture(architecture), record_launches() as launches:
            run_both_ways(attention, random_call(dtype=dtype), output_mask=0b1111)
        return {launch.meta["PRECISION"] for launch in launches if "PRECISION" in launch.meta}

    from overtone.tools.triton_aot import _matmul_precision

    with _matmul_precision("ieee"):
        assert precisions(torch.float32, "sm_80") == {"ieee"}
    with _matmul_precision("tf32"):
        for name in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"):
            assert precisions(torch.float32, name) == {"tf32"}
        for without in ("sm_75", "gfx942", "gfx1100"):
            assert precisions(torch.float32, without) == {"ieee"}
        assert precisions(torch.float16, "sm_80") == {"ieee"}


def test_far_strides_are_copied(attention):
    """Offsets inside a tile are 32 bits wide. What fits them is passed as it is."""
    from overtone.triton_kernels.runtime import record_launches

    def token_stride(stride):
        args = [a if a is None else a.detach().to("meta") for a in random_call(2, 2, 33, 33, 16, 24)]
        args[0] = torch.empty(1, device="meta").as_strided((2, 2, 33, 16), (16, 32, stride, 1))
        with record_launches() as launches:
            run_both_ways(attention, args, output_mask=0b1111)
        return {dict(zip(x.kernel.arg_names, x.args, strict=False)).get("q_st", stride) for x in launches}

    assert token_stride(attention.MAX_TILE_STRIDE - 1) == {attention.MAX_TILE_STRIDE - 1}
    assert token_stride(attention.MAX_TILE_STRIDE) == {16, attention.MAX_TILE_STRIDE}  # a copy, where q is an argument


@pytest.mark.parametrize("size, name", [("keys", "kv_len"), ("channels", "out_dim")])
def test_too_many_for_32_bits(attention, size, name):
    sizes = {"queries": 1, "keys": 1, "width": 1, "channels": 1} | {size: attention.MAX_TILE_STRIDE}
    args = [a if a is None else a.detach().to("meta") for a in random_call(1, 1, **sizes)]
    with pytest.raises(ValueError, match=f"{name} < 4194304, got 4194304"):
        run_both_ways(attention, args)


def test_wide_float32_on_consumer_gpus_of_amd_is_the_reference(monkeypatch):
    from types import SimpleNamespace

    from overtone.backends import _triton_attention
    from overtone.triton_kernels import runtime

    monkeypatch.setattr(torch.version, "hip", "7.0")
    for gpu, dtype, width, runs in (
        ("gfx1100", torch.float32, 65, False), ("gfx1100", torch.float32, 64, True),
        ("gfx1100", torch.float16, 128, True), ("gfx942:xnack-", torch.float32, 128, True),
    ):  # fmt: skip
        properties = SimpleNamespace(gcnArchName=gpu)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        runtime._device_architecture.cache_clear()
        query = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, shape=(1, 1, 1, width))
        obstacle = _triton_attention(query)
        assert obstacle is None if runs else "on gfx1100 supports head_dim ≤ 64 in torch.float32" in obstacle
    runtime._device_architecture.cache_clear()


def test_launches_happen_on_the_tensors_device(monkeypatch):
    """The device guard is around the launch, and an empty grid is not launched."""
    from contextlib import contextmanager

    from overtone.triton_kernels import runtime as module

    events = []

    @contextmanager
    def guard(tensor):
        events.append(("device of", tensor))
        yield
        events.append("left")

    class OnGpu:
        is_cuda = True

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **meta: events.append((grid, args, meta))

    monkeypatch.setattr(torch.cuda, "device_of", guard)
    tensor = OnGpu()
    module.launch(Kernel(), (3,), tensor, 5, BM=16)
    assert events == [("device of", tensor), ((3,), (tensor, 5), {"BM": 16}), "left"]
    events.clear()
    module.launch(Kernel(), (0,), tensor, 5, BM=16)
    assert events == []


def test_the_device_tells_the_architecture(monkeypatch):
    from types import SimpleNamespace

    from overtone.triton_kernels import runtime as module

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    module._device_architecture.cache_clear()
    assert module.architecture(device) == "sm_90"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    module._device_architecture.cache_clear()
    assert module.architecture(device) == "gfx942"
    module._device_architecture.cache_clear()
    assert module.architecture(torch.device("cpu")) == "sm_80"


@pytest.mark.parametrize("interpret, key", [("0", "CUDA"), ("1", "CPU")])
def test_the_dispatcher_finds_the_launchers(interpret, key):
    """On CUDA tensors, and in the interpreter on CPU tensors; ROCm's PyTorch calls its key CUDA too."""
    code = (
        "import torch, overtone\n"
        "for op in ('spectral_attention', 'spectral_attention_backward'):\n"
        f"    assert torch._C._dispatch_has_kernel_for_dispatch_key(f'overtone::{{op}}', '{key}'), op\n"
    )
    import os

    environment = os.environ | {"TRITON_INTERPRET": interpret}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_nothing_waits_for_the_device(attention, monkeypatch):
    """No .item(), no copy to the host: a call can be captured in a CUDA graph. On "meta" any of them would raise."""
    from overtone.triton_kernels.runtime import record_launches

    args = [a if a is None else a.detach().to("meta") for a in random_call(mask="bias")]
    with record_launches() as launches:
        run_both_ways(attention, args, args[6].float().expand(2, 2, 33, 33))
    assert len(launches) > 6
