"""The blocks that attention's kernels are shipped with: a fixed table by architecture, dtype, head width and mask.

An entry compiles without a spill and within the architecture's limits, which `overtone kernels --check` proves of every
one. Large tiles were tried first, since they read keys, values and weights less often, but no entry was chosen by a
measurement: none of them has run on a GPU. `scripts/attention_blocks` looks for larger ones.
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

# half: float16 and bfloat16. width: of a head, up to. masked: with attn_mask, whose tile takes registers too; where
# masks have no entry of their own, the kernel reads none. _whole: all keys (BN at most) in one pass. _apart: ∂K and ∂V
# one after the other, as registers do not hold both. "-": no such form on this architecture. gfx1100 multiplies float32
# without matrix instructions, and no tile of a head fits its registers then.
_TABLE = """
dtype width mask   kernel              sm_80         sm_89         sm_90         sm_100        sm_120        gfx942        gfx1100
half  64    plain  attention           128.64.8.3    128.64.8.3    128.64.8.3    128.64.8.3    128.64.8.3    128.64.8.3    128.64.8.2
half  64    plain  attention_whole     32.256.8.1    32.256.8.1    64.256.4.1    64.256.4.1    32.256.8.1    32.256.8.1    -
half  64    plain  fused               32.64.4.2     32.32.4.2     64.64.8.2     64.64.8.2     32.64.4.2     64.64.8.2     64.32.8.2
half  64    plain  fused_whole         32.256.8.1    32.256.8.1    32.256.8.1    32.256.8.1    32.256.8.1    -             -
half  64    plain  projection          128.64.64.8.3 128.64.64.8.3 128.64.64.8.3 128.64.64.8.3 128.64.64.8.3 128.64.64.8.3 64.64.32.4.2
half  64    plain  heads_gradient      128.64.8.3    128.64.8.3    128.64.8.3    128.64.8.3    128.64.8.3    128.64.8.3    128.64.8.3
half  64    plain  basis_gradient      64.64.64.4.3  64.64.64.4.3  64.64.64.4.3  64.64.64.4.3  64.64.64.4.3  64.64.64.4.3  64.64.64.4.3
half  64    plain  key_value_gradient  64.128.8.2    32.128.8.2    64.128.8.2    64.128.8.2    32.128.8.2    32.64.4.1     16.32.4.1
half  64    plain  query_gradient      128.64.8.2    128.64.8.2    128.64.8.2    128.64.8.2    128.64.8.2    128.64.8.2    64.32.4.1
half  64    masked attention           128.64.8.2    128.64.8.2    128.64.8.2    128.64.8.2    64.32.4.2     128.64.8.2    16.32.4.1
half  64    masked key_value_gradient  32.128.8.2    32.64.4.1     32.128.8.2    32.128.8.2    32.64.4.1     32.64.4.1     16.32.4.1
half  64    masked query_gradient      128.32.8.2    128.32.8.2    128.32.8.2    128.64.8.2    128.32.8.2    128.32.8.2    16.32.4.1
half  128   plain  attention           64.64.4.2     64.32.4.2     64.64.4.2     64.64.4.2     64.32.4.2     64.32.4.2     16.32.4.1
half  128   plain  attention_whole     64.256.8.1    64.256.8.1    64.256.8.1    64.256.8.1    64.256.8.1    -             -
half  128   plain  heads_gradient      64.64.4.2     64.64.4.2     64.64.4.2     64.64.4.2     64.64.4.2     64.64.4.2     32.32.4.2
half  128   plain  key_value_gradient  64.64.8.2     64.64.8.2     64.64.8.2     64.64.8.2     64.64.8.2     16.32.4.1     -
half  128   plain  key_value_apart     -             -             -             -             -             -             16.32.4.1
half  128   plain  query_gradient      64.64.8.2     64.64.8.2     64.64.8.2     64.64.8.2     64.64.8.2     64.32.4.1     32.16.8.1
half  128   masked attention           64.32.4.2     64.32.4.2     64.32.4.2     64.32.4.2     64.32.4.2     32.32.4.2     16.16.4.1
half  128   masked key_value_gradient  32.64.8.1     32.64.8.1     64.64.8.2     64.64.8.2     32.64.8.1     16.32.4.1     -
half  128   masked key_value_apart     -             -             -             -             -             -             16.16.4.1
half  128   masked query_gradient      64.64.8.2     64.64.8.2     64.64.8.2     64.32.8.2     64.64.8.2     64.32.4.1     32.16.8.1
float 64    plain  attention           32.32.4.1     32.32.4.1     32.32.4.1     32.32.4.1     32.32.4.1     32.32.4.1     -
float 64    plain  projection          64.64.32.4.2  64.64.32.4.2  64.64.32.4.2  64.64.32.4.2  64.64.32.4.2  64.64.32.4.2  -
float 64    plain  heads_gradient      32.32.4.2     32.32.4.2     32.32.4.2     32.32.4.2     32.32.4.2     32.32.4.2     -
float 64    plain  basis_gradient      64.64.32.4.2  64.64.32.4.2  64.64.32.4.2  64.64.32.4.2  64.64.32.4.2  64.64.32.4.2  -
float 64    plain  key_value_gradient  16.16.4.1     32.32.8.1     32.32.8.1     32.32.8.1     32.32.8.1     16.32.4.1     -
float 64    plain  query_gradient      32.32.8.1     32.32.8.1     32.32.8.1     32.32.8.1     32.32.8.1     32.32.8.1     -
float 64    masked attention           32.32.4.1     16.32.4.1     32.32.4.1     32.32.4.1     32.32.8.1     32.32.4.1     -
float 64    masked key_value_gradient  32.32.8.1     32.32.8.1     32.32.8.1     32.32.8.1     32.32.8.1     32.32.8.1     -
float 64    masked query_gradient      32.16.4.1     32.16.4.1     32.16.4.1     32.16.4.1     32.16.4.1     32.32.8.1     -
float 128   plain  attention           32.16.4.1     32.16.4.1     32.16.4.1     32.16.4.1     32.16.4.1     32.16.4.1     -
float 128   plain  heads_gradient      32.16.4.1     32.16.4.1     32.16.4.1     32.16.4.1     32.16.4.1     32.16.4.1     -
float 128   plain  key_value_gradient  16.16.4.1     16.16.4.1     16.16.4.1     16.16.4.1     16.16.4.1     16.16.4.1     -
float 128   plain  query_gradient      16.16.4.1     16.16.4.1     16.16.4.1     16.16.4.1     16.16.4.1     16.16.4.1     -
float 128   masked attention           32.16.4.1     32.16.4.1     32.16.4.1     32.16.4.1     32.16.4.1     32.16.4.1     -
float 128   masked key_value_gradient  16.16.4.1     16.16.4.1     16.16.4.1     16.16.4.1     16.16.4.1     16.16.4.1     -
float 128   masked query_gradient      16.16.4.1     16.16.4.1     16.16.4.1     16.16.4.1     16.16.4.1     16.16.4.1     -
"""  # noqa: E501

ARCHITECTURES = tuple(_TABLE.split("\n")[1].split()[4:])

# The table's architecture for those it does not name: the same generation, or one with no more shared memory.
_ALIKE = {"sm_86": "sm_89", "sm_87": "sm_80", "sm_103": "sm_100", "sm_121": "sm_120"}

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


def table(architecture: str, dtype: torch.dtype, width: int, masked: bool) -> Table:
    """The shipped blocks, and the head's width as the kernels pad it."""
    padded = max(16, 1 << (width - 1).bit_length())
    kind = "float" if dtype == torch.float32 else "half"
    return Table(padded, _blocks(known_architecture(architecture), kind, 64 if padded <= 64 else 128, masked))


def is_shipped(architecture: str, dtype: torch.dtype) -> bool:
    """Whether there are blocks for the dtype on this architecture."""
    return "attention" in table(architecture, dtype, 64, masked=False).blocks


def known_architecture(name: str) -> str:
    """The one of the table whose blocks `name` uses."""
    if name in ARCHITECTURES:
        return name
    if name.startswith("gfx"):
        return "gfx942" if name.startswith("gfx9") else "gfx1100"
    return _ALIKE.get(name, "sm_89")  # the least shared memory of NVIDIA's


@cache
def _blocks(architecture: str, kind: str, width: int, masked: bool) -> dict[str, Blocks]:
    found = {}
    for line in _TABLE.strip().split("\n")[1:]:
        row_kind, row_width, mask, kernel, *cells = line.split()
        cell = cells[ARCHITECTURES.index(architecture)]
        of_this_width = int(row_width) == width or kernel in ("projection", "basis_gradient")
        reads_masks = kernel in ("attention", "key_value_gradient", "key_value_apart", "query_gradient")
        of_this_mask = (mask == "masked") == masked or not reads_masks
        if masked and ("whole" in kernel or "fused" in kernel):
            continue
        if row_kind == kind and of_this_width and of_this_mask and cell != "-":
            *tile, num_warps, num_stages = map(int, cell.split("."))
            found[kernel] = Blocks(dict(zip(TILES[kernel], tile, strict=True)), num_warps, num_stages)
    return found
