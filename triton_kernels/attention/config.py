"""The configurations that attention's kernels are shipped with: by architecture, dtype, head width and mask.

overtone.tools.config_search derives the table: an entry compiles without a spill and within the limits of every
architecture of its column, and is the fastest of those by attention_cost.time. Some entries are smaller tiles put in by
hand where the kernels grew; `overtone kernels --check` proves what it compiles. None was chosen by a measurement: no
GPU has run them. OVERTONE_AUTOTUNE=1 measures (autotune.py).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from overtone.triton_kernels.runtime import LaunchConfig

# The constants whose values an entry of the table begins with; the number of warps and of stages follow.
TILES = {
    "attention": ("BM", "BN"),
    "attention_single_pass": ("BM", "BN"),
    "fused": ("BM", "BN"),
    "fused_single_pass": ("BM", "BN"),
    "projection": ("BM", "E_TILE", "BK"),
    "dout": ("BM", "BK"),
    "dweight": ("BM", "BE", "BK"),
    "dkv": ("BM", "BN"),
    "dkv_split": ("BM", "BN"),
    "dq": ("BM", "BN"),
}

# dtype: half is float16 and bfloat16; float and tf32 are the two ways to multiply float32. width: of a head, up to.
# masked: with attn_mask, whose tile takes registers too. _single_pass: all keys (BN at most) at once. _split: ∂K and ∂V
# one after the other, where registers do not hold both. "-": nothing fits, or none is needed. gfx1100 has no matrix
# instructions for float32, and its registers do not hold backward's tiles of wide heads then: such heads are refused.
_TABLE = """
dtype width mask   kernel                sm_80         sm_90         gfx942        gfx1100
half  any   any    projection            128.64.64.4.2 128.64.64.8.3 128.64.64.8.3 128.64.64.8.2
half  any   any    dweight               64.64.64.4.3  64.32.32.8.3  64.32.32.4.3  32.32.32.4.3
half  64    any    dout                  128.64.8.3    128.64.8.3    128.64.8.2    64.64.8.2
half  64    plain  attention             128.32.4.3    128.64.4.3    128.32.4.3    32.32.4.3
half  64    plain  attention_single_pass 32.256.4.1    64.256.4.1    32.256.4.1    -
half  64    plain  fused                 32.64.4.3     64.64.8.2     64.64.4.2     32.64.8.3
half  64    plain  fused_single_pass     32.256.8.1    32.256.8.1    -             -
half  64    plain  dkv                   64.128.8.3    64.128.8.3    32.128.4.1    16.32.4.1
half  64    plain  dq                    128.32.4.1    128.64.8.3    128.32.4.3    32.32.4.3
half  64    masked attention             128.32.8.3    128.32.8.3    128.64.8.3    128.64.8.1
half  64    masked fused                 32.32.4.1     32.32.4.3     64.32.4.3     32.64.8.1
half  64    masked dkv                   32.32.4.3     32.128.8.3    32.128.4.1    16.32.4.1
half  64    masked dq                    128.32.8.3    128.32.8.3    128.32.4.3    32.32.4.1
half  128   any    dout                  128.64.8.3    128.64.8.3    128.64.8.2    32.64.8.1
half  128   plain  attention             128.64.8.3    128.64.8.3    128.32.4.3    32.32.4.1
half  128   plain  attention_single_pass 32.256.8.1    64.256.8.1    16.256.4.1    -
half  128   plain  dkv                   32.64.4.1     32.64.8.3     32.32.4.3     16.16.8.2
half  128   plain  dq                    128.32.8.3    64.64.4.2     128.32.4.3    32.16.4.1
half  128   masked attention             32.64.8.3     64.64.8.3     128.32.4.3    64.32.8.1
half  128   masked dkv                   32.32.4.3     32.128.8.3    32.32.4.2     -
half  128   masked dkv_split             -             -             -             16.16.4.1
half  128   masked dq                    32.32.4.2     128.32.8.3    128.32.4.2    16.16.4.1
tf32  any   any    projection            128.64.64.8.2 128.64.64.8.3 -             -
tf32  any   any    dweight               64.64.64.4.3  64.32.32.8.3  -             -
tf32  64    any    dout                  128.64.8.3    128.64.8.3    -             -
tf32  64    any    attention             32.64.4.1     128.32.8.3    -             -
tf32  64    any    fused                 16.64.8.3     16.64.8.3     -             -
tf32  64    any    dkv                   16.32.4.3     32.128.8.3    -             -
tf32  64    any    dq                    32.32.4.3     32.32.4.3     -             -
tf32  128   any    dout                  32.32.4.3     64.64.8.3     -             -
tf32  128   any    attention             32.32.4.3     32.32.4.3     -             -
tf32  128   any    dkv                   16.32.4.3     16.32.4.3     -             -
tf32  128   any    dq                    32.32.4.3     32.32.4.1     -             -
float any   any    projection            64.64.32.8.2  64.64.32.8.2  64.64.32.8.2  64.64.32.8.2
float any   any    dweight               32.32.32.8.2  64.64.32.8.2  32.32.32.4.2  32.32.32.4.2
float 64    any    dout                  16.16.8.2     16.16.8.2     16.16.4.2     32.32.8.2
float 64    any    attention             16.16.4.1     16.16.4.2     32.16.4.2     16.16.4.2
float 64    any    dkv                   16.16.4.1     16.16.4.1     16.32.4.2     16.16.8.2
float 64    any    dq                    16.16.4.2     16.16.8.2     32.16.4.2     16.16.8.2
float 128   any    dout                  16.16.8.2     16.16.8.2     16.16.8.2     32.32.8.2
float 128   any    attention             16.16.8.2     16.16.8.2     32.16.4.2     16.16.8.2
float 128   any    dkv                   16.16.4.2     16.16.8.1     16.32.4.1     -
float 128   any    dq                    16.16.8.2     16.16.8.2     32.16.4.2     -
"""

COLUMNS = tuple(_TABLE.split("\n")[1].split()[4:])

MAX_HEAD_DIM = 128
# One launch holds so many accumulators of E_TILE channels.
MAX_E_TILES = 3
E_TILE = 64
# Rows of so many keys can be held at once.
SINGLE_PASS_KEYS = (64, 128, 256)

# Sums over the rows of a matrix: a tile holds few rows of a wide one (∂W of every split).
WIDE_REDUCE = LaunchConfig({"BT": 4, "BC": 512}, 4)

# ∂W is split over tokens until it has about so many programs, each of at least so many tokens.
PROGRAMS = 256
SPLIT_TOKENS = 1024


def tokens_per_split(tokens: int, tiles: int, multiple: int) -> int:
    """Of ∂W, whose `tiles` every split has."""
    splits = max(1, min(-(-PROGRAMS // max(tiles, 1)), tokens // SPLIT_TOKENS))
    return max(-(-tokens // (splits * multiple)), 1) * multiple


class ConfigTable(NamedTuple):
    """The configurations for one architecture, dtype, head width, and with or without a mask."""

    BD: int
    by_kernel: dict[str, LaunchConfig]

    def attention(self, keys: int) -> LaunchConfig:
        return self._single_pass("attention", keys) or self._loop("attention")

    def fused(self, channels: int, keys: int) -> LaunchConfig | None:
        """Of the single launch; None where y does not fit a program's registers."""
        if "fused" not in self.by_kernel or channels > MAX_E_TILES * E_TILE:
            return None
        config = self._single_pass("fused", keys) or self._loop("fused")
        num_tiles = max(1, -(-channels // E_TILE))
        return config._replace(tile=config.tile | {"E_TILE": E_TILE, "NUM_E_TILES": num_tiles})

    def _single_pass(self, kernel: str, keys: int) -> LaunchConfig | None:
        config = self.by_kernel.get(f"{kernel}_single_pass")
        if config is None or keys > config.tile["BN"]:
            return None
        fitting = next(size for size in SINGLE_PASS_KEYS if size >= keys)
        return config._replace(tile=config.tile | {"BN": fitting, "SINGLE_PASS": True})

    def _loop(self, kernel: str) -> LaunchConfig:
        config = self.by_kernel[kernel]
        return config._replace(tile=config.tile | {"SINGLE_PASS": False})


def table(architecture: str, dtype: torch.dtype, precision: str, head_dim: int, masked: bool) -> ConfigTable:
    """The shipped configurations, and the head's width as the kernels pad it.

    precision: of float32 products, as Triton's.
    """
    padded = padded_width(head_dim)
    kind = {"ieee": "float", "tf32": "tf32"}[precision] if dtype == torch.float32 else "half"
    return ConfigTable(padded, _configs(config_arch(architecture), kind, 64 if padded <= 64 else 128, masked))


def padded_width(head_dim: int) -> int:
    """The power of two in which the kernels hold a head: Triton has no other tiles."""
    return max(16, 1 << (head_dim - 1).bit_length())


def unsupported_reason(architecture: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels, backward included, do not take heads of this dtype and width there; None if they do."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"supports float32, bfloat16 and float16, got {dtype}"
    if head_dim > MAX_HEAD_DIM:
        return f"supports head_dim ≤ {MAX_HEAD_DIM}, got {head_dim}"
    if {"attention", "dq"} <= table(architecture, dtype, "ieee", head_dim, masked=False).by_kernel.keys():
        return None
    return f"on {architecture} supports head_dim ≤ 64 in {dtype}, got {head_dim}: the tiles exceed its registers"


def has_tf32(architecture: str) -> bool:
    """NVIDIA's have it since sm_80; AMD's Triton does not."""
    return architecture.startswith("sm_") and int(architecture.removeprefix("sm_")) >= 80


def config_arch(architecture: str) -> str:
    """The column of the table that `architecture` uses.

    sm_90 and its successors in data centers multiply in groups of warps from 228 KiB of shared memory; all others of
    NVIDIA's, sm_120 among them, use sm_80's instructions, and its tiles fit in the 99 KiB that some of them have.
    """
    if architecture.startswith("gfx"):
        return "gfx942" if architecture.startswith("gfx9") else "gfx1100"
    return "sm_90" if architecture.startswith(("sm_90", "sm_10")) else "sm_80"


@cache
def _configs(column: str, kind: str, width: int, masked: bool) -> dict[str, LaunchConfig]:
    found = {}
    wanted = {kind}, {str(width), "any"}, {"masked" if masked else "plain", "any"}
    for line in _TABLE.strip().split("\n")[1:]:
        *case, kernel = line.split()[:4]
        cell = line.split()[4:][COLUMNS.index(column)]
        if cell != "-" and all(value in values for value, values in zip(case, wanted, strict=True)):
            *tile, num_warps, num_stages = map(int, cell.split("."))
            found[kernel] = LaunchConfig(dict(zip(TILES[kernel], tile, strict=True)), num_warps, num_stages)
    return found
