"""The block sizes that are shipped: a fixed table, no autotuning. `overtone kernels --check` compiles every entry."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Config(NamedTuple):
    """A tile of BT tokens and BC channels (rows and columns) and the warps that hold it."""

    BT: int
    BC: int
    num_warps: int

    @property
    def meta(self) -> dict[str, int]:
        """As a launch takes it."""
        return self._asdict()


# Tiles that hold all tokens of a sample, so that they are read once: 32 values per thread.
WHOLE = (
    Config(BT=64, BC=64, num_warps=4),
    Config(BT=128, BC=32, num_warps=4),
    Config(BT=256, BC=32, num_warps=8),
    Config(BT=1024, BC=16, num_warps=16),
)
# More tokens than that: their statistics are taken over splits of the tokens, tile by tile.
SPLIT = Config(BT=128, BC=32, num_warps=8)
SPLIT_TOKENS = 1024
MAX_SPLITS = 32
# The running mean carries from tile to tile.
CAUSAL = Config(BT=64, BC=32, num_warps=8)
# Sums over the rows of small matrices.
ROOTS = Config(BT=32, BC=16, num_warps=4)
ROW_SUMS = Config(BT=64, BC=32, num_warps=4)


def for_dtype(config: Config, dtype: torch.dtype) -> Config:
    """float64 takes two registers per value: half the channels."""
    return config._replace(BC=config.BC // 2) if dtype == torch.float64 else config


def whole(tokens: int, dtype: torch.dtype, tiles: int = 1) -> Config | None:
    """The smallest tile that holds all tokens, or None if there are too many. Several tiles share the registers."""
    for config in WHOLE:
        if tokens <= config.BT:
            return for_dtype(config._replace(BC=config.BC // tiles), dtype)
    return None


def tokens_per_split(tokens: int) -> int:
    """A multiple of SPLIT.BT, such that there are at most MAX_SPLITS splits."""
    at_least = max(SPLIT_TOKENS, -(-tokens // MAX_SPLITS))
    return -(-at_least // SPLIT.BT) * SPLIT.BT
