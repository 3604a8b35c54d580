"""The blocks that attention's kernels are shipped with: a table by architecture, dtype, head width and mask.

overtone.tools.config_search derives it: an entry compiles without a spill and within the limits of every architecture
of its column (`overtone kernels --check` proves it), and is the fastest of those by attention_cost.time. None was
chosen by a measurement: no GPU has run them. OVERTONE_AUTOTUNE=1 measures (autotune.py).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """A kernel's tile by its constants' names, the warps that hold it, and how many loads its loop has under way."""

    tile: dict[str, int]
    num_warps: int
    num_stages: int = 1

    @property
    def meta(self) -> dict[str, int]:
        """As a launch takes it."""
        return self.tile | {"num_warps": self.num_warps, "num_stages": self.num_stages}


# The constants whose values an entry of the table begins with; the number of warps and of stages follow.
TILES = {
    "attention": ("BM", "BN"),
    "attention_whole": ("BM", "BN"),
    "fused": ("BM", "BN"),
    "fused_whole": ("BM", "BN"),
    "projection": ("BM", "BE", "BK"),
    "heads_gradient": ("BM", "BK"),
    "basis_gradient": ("BM", "BE", "BK"),
    "key_value_gradient": ("BM", "BN"),
    "key_value_apart": ("BM", "BN"),
    "query_gradient": ("BM", "BN"),
}

# dtype: half is float16 and bfloat16; float and tf32 are the two ways to multiply float32. width: of a head, up to.
# masked: with attn_mask, whose tile takes registers too. _whole: all keys (BN at most) in one pass. _apart: ∂K and ∂V
# one after the other, where registers do not hold both. "-": no blocks fit, or none are needed. gfx1100 has no matrix
# instructions for float32, and its registers do not hold backward's tiles of wide heads then: such heads are refused.
# What compilation said of the candidates is in tests/triton/config_search.csv.
_TABLE = """
dtype width mask   kernel             sm_80         sm_90         gfx942        gfx1100
half  any   any    projection         128.64.64.8.3 128.64.64.8.3 128.64.64.8.3 128.64.64.8.2
half  any   any    basis_gradient     64.64.64.4.3  64.32.32.8.3  64.32.32.4.3  32.32.32.4.3
half  64    any    heads_gradient     128.64.8.3    128.64.8.3    128.64.8.3    128.64.8.3
half  64    plain  attention          128.32.4.3    128.64.4.3    128.32.4.3    32.32.4.3
half  64    plain  attention_whole    32.256.4.1    64.256.4.1    32.256.4.1    -
half  64    plain  fused              32.64.4.3     64.64.4.1     64.64.4.2     32.64.8.3
half  64    plain  fused_whole        32.256.8.1    32.256.8.1    -             -
half  64    plain  key_value_gradient 64.128.8.3    64.128.8.3    32.128.4.1    16.32.4.1
half  64    plain  key_value_apart    -             -             -             -
half  64    plain  query_gradient     128.32.4.1    128.64.8.3    128.32.4.3    32.32.4.3
half  64    masked attention          128.32.8.3    128.32.8.3    128.64.8.3    128.64.8.1
half  64    masked fused              32.32.4.1     32.32.4.3     64.32.4.3     32.64.8.1
half  64    masked key_value_gradient 32.64.4.1     32.128.8.3    32.128.4.1    16.32.4.1
half  64    masked key_value_apart    -             -             -             -
half  64    masked query_gradient     128.32.8.3    128.32.8.3    128.32.4.3    32.32.4.1
half  128   any    heads_gradient     128.64.8.3    128.64.8.3    128.64.8.3    128.64.8.1
half  128   plain  attention          128.64.8.3    128.64.8.3    128.32.4.3    32.32.4.1
half  128   plain  attention_whole    32.256.8.1    64.256.8.1    16.256.4.1    -
half  128   plain  key_value_gradient 32.64.4.1     32.128.8.3    32.32.4.3     16.16.8.2
half  128   plain  key_value_apart    -             -             -             -
half  128   plain  query_gradient     128.32.8.3    64.64.4.2     128.32.4.3    32.16.4.1
half  128   masked attention          32.64.8.3     64.64.8.3     128.32.4.3    64.32.8.1
half  128   masked key_value_gradient 32.32.4.3     32.128.8.3    32.32.4.3     -
half  128   masked key_value_apart    -             -             -             16.16.4.1
half  128   masked query_gradient     32.32.4.2     128.32.8.3    128.32.4.2    16.16.4.1
tf32  any   any    projection         128.64.64.8.2 128.64.64.8.3 -             -
tf32  any   any    basis_gradient     64.64.64.4.3  64.32.32.8.3  -             -
tf32  64    any    heads_gradient     128.64.8.3    128.64.8.3    -             -
tf32  64    any    attention          32.64.4.1     128.32.8.3    -             -
tf32  64    any    fused              16.64.8.3     16.64.8.3     -             -
tf32  64    any    key_value_gradient 16.32.4.3     32.128.8.3    -             -
tf32  64    any    key_value_apart    -             -             -             -
tf32  64    any    query_gradient     32.32.4.3     32.32.4.2     -             -
tf32  128   any    heads_gradient     32.32.4.3     64.64.8.3     -             -
tf32  128   any    attention          32.32.4.3     32.32.4.3     -             -
tf32  128   any    key_value_gradient 16.32.4.3     16.32.4.3     -             -
tf32  128   any    key_value_apart    -             -             -             -
tf32  128   any    query_gradient     32.32.4.3     32.32.4.1     -             -
float any   any    projection         64.64.32.8.2  64.64.32.8.2  64.64.32.8.2  64.64.32.8.2
float any   any    basis_gradient     32.32.32.8.2  64.64.32.8.2  32.32.32.4.2  32.32.32.4.2
float 64    any    heads_gradient     16.16.8.2     16.16.8.2     16.16.4.2     32.32.8.2
float 64    any    attention          16.16.4.1     16.16.4.2     32.16.4.2     16.16.4.2
float 64    any    key_value_gradient 16.16.4.1     16.16.8.2     16.32.4.2     16.16.8.2
float 64    any    key_value_apart    -             -             -             -
float 64    any    query_gradient     16.16.4.2     16.16.8.2     32.16.4.2     16.16.8.2
float 128   any    heads_gradient     16.16.8.2     16.16.8.2     16.16.8.2     32.32.8.2
float 128   any    attention          16.16.8.2     16.16.8.2     32.16.4.2     16.16.8.2
float 128   any    key_value_gradient 16.16.4.2     16.16.8.1     16.32.4.1     -
float 128   any    key_value_apart    -             -             -             -
float 128   any    query_gradient     32.16.8.1     16.16.8.2     32.16.4.2     -
"""

COLUMNS = tuple(_TABLE.split("\n")[1].split()[4:])

# One launch holds so many accumulators of BE channels.
MAX_PIECES = 3
PIECE = 64
# Rows of so many keys can be held whole.
WHOLE_KEYS = (64, 128, 256)

# Sums over the rows of a matrix: a tile holds many rows of a narrow one (∂λ of every block of tokens), or few of a wide
# one (∂U of every split).
MANY_ROWS = Blocks({"BT": 64, "BC": 32}, 4)
FEW_ROWS = Blocks({"BT": 4, "BC": 512}, 4)

# ∂U is split over tokens until it has about so many programs, each of at least so many tokens.
PROGRAMS = 256
SPLIT_TOKENS = 1024


def tokens_per_split(tokens: int, tiles: int, multiple: int) -> int:
    """Of the basis gradient, whose `tiles` every split has."""
    splits = max(1, min(-(-PROGRAMS // max(tiles, 1)), tokens // SPLIT_TOKENS))
    return max(-(-tokens // (splits * multiple)), 1) * multiple


class Table(NamedTuple):
    """The blocks for one architecture, dtype, head width, and with or without a mask."""

    BD: int
    blocks: dict[str, Blocks]

    def attention(self, keys: int) -> Blocks:
        return self._whole("attention", keys) or self._loop("attention")

    def fused(self, channels: int, keys: int) -> Blocks | None:
        """Of the single launch; None where y does not fit a program's registers."""
        if "fused" not in self.blocks or channels > MAX_PIECES * PIECE:
            return None
        blocks = self._whole("fused", keys) or self._loop("fused")
        pieces = max(1, -(-channels // PIECE))
        return blocks._replace(tile=blocks.tile | {"BE": PIECE, "PIECES": pieces})

    def _whole(self, kernel: str, keys: int) -> Blocks | None:
        blocks = self.blocks.get(f"{kernel}_whole")
        if blocks is None or keys > blocks.tile["BN"]:
            return None
        fitting = next(size for size in WHOLE_KEYS if size >= keys)
        return blocks._replace(tile=blocks.tile | {"BN": fitting, "WHOLE": True})

    def _loop(self, kernel: str) -> Blocks:
        blocks = self.blocks[kernel]
        return blocks._replace(tile=blocks.tile | {"WHOLE": False})


def table(architecture: str, dtype: torch.dtype, precision: str, width: int, masked: bool) -> Table:
    """The shipped blocks, and the head's width as the kernels pad it. precision: of float32 products, as Triton's."""
    padded = padded_width(width)
    kind = {"ieee": "float", "tf32": "tf32"}[precision] if dtype == torch.float32 else "half"
    return Table(padded, _blocks(column_of(architecture), kind, 64 if padded <= 64 else 128, masked))


def padded_width(width: int) -> int:
    """The power of two in which the kernels hold a head: Triton has no other tiles."""
    return max(16, 1 << (width - 1).bit_length())


def is_shipped(architecture: str, dtype: torch.dtype, width: int) -> bool:
    """Whether there are blocks for heads of this dtype and width on this architecture, backward included."""
    return {"attention", "query_gradient"} <= table(architecture, dtype, "ieee", width, masked=False).blocks.keys()


def has_tf32(architecture: str) -> bool:
    """NVIDIA's have it since sm_80; AMD's Triton does not."""
    return architecture.startswith("sm_") and int(architecture.removeprefix("sm_")) >= 80


def column_of(architecture: str) -> str:
    """The column of the table that `architecture` uses.

    sm_90 and its successors in data centres multiply in groups of warps from 228 KiB of shared memory; all others of
    NVIDIA's, sm_120 among them, use sm_80's instructions, and its blocks fit in the 99 KiB that some of them have.
    """
    if architecture.startswith("gfx"):
        return "gfx942" if architecture.startswith("gfx9") else "gfx1100"
    return "sm_90" if architecture.startswith(("sm_90", "sm_10")) else "sm_80"


@cache
def _blocks(column: str, kind: str, width: int, masked: bool) -> dict[str, Blocks]:
    found = {}
    wanted = {kind}, {str(width), "any"}, {"masked" if masked else "plain", "any"}
    for line in _TABLE.strip().split("\n")[1:]:
        *case, kernel = line.split()[:4]
        cell = line.split()[4:][COLUMNS.index(column)]
        if cell != "-" and all(value in values for value, values in zip(case, wanted, strict=True)):
            *tile, num_warps, num_stages = map(int, cell.split("."))
            found[kernel] = Blocks(dict(zip(TILES[kernel], tile, strict=True)), num_warps, num_stages)
    return found
