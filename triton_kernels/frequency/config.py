"""The launch configurations that are shipped: a fixed table, no autotuning. `overtone kernels --check` compiles all."""

from __future__ import annotations

import torch

from overtone.triton_kernels.runtime import LaunchConfig


def _tokens_by_channels(tokens: int, channels: int, num_warps: int) -> LaunchConfig:
    """A tile of BT tokens (rows) and BC channels (columns), and the warps that hold it."""
    return LaunchConfig({"BT": tokens, "BC": channels}, num_warps)


# Tiles that hold all tokens of a sample, so that they are read once: 32 values per thread.
SINGLE_PASS = (
    _tokens_by_channels(64, 64, 4),
    _tokens_by_channels(128, 32, 4),
    _tokens_by_channels(256, 32, 8),
    _tokens_by_channels(1024, 16, 16),
)
# More tokens than that: their moments are taken over splits of the tokens, tile by tile.
SPLIT = _tokens_by_channels(128, 32, 8)
SPLIT_TOKENS = 1024
MAX_SPLITS = 32
# The running mean carries from tile to tile.
CAUSAL = _tokens_by_channels(64, 32, 8)
# Sums over the rows of small matrices.
FINISH_NORMS = _tokens_by_channels(32, 16, 4)
REDUCE_GAINS = _tokens_by_channels(64, 32, 4)


def for_dtype(config: LaunchConfig, dtype: torch.dtype) -> LaunchConfig:
    """float64 takes two registers per value: half the channels."""
    return _with_channels(config, config.tile["BC"] // 2) if dtype == torch.float64 else config


def single_pass(tokens: int, dtype: torch.dtype, tiles: int = 1) -> LaunchConfig | None:
    """The smallest tile that holds all tokens, or None if there are too many. Several tiles share the registers."""
    for config in SINGLE_PASS:
        if tokens <= config.tile["BT"]:
            return for_dtype(_with_channels(config, config.tile["BC"] // tiles), dtype)
    return None


def tokens_per_split(tokens: int) -> int:
    """A multiple of the split's tile, such that there are at most MAX_SPLITS splits."""
    at_least = max(SPLIT_TOKENS, -(-tokens // MAX_SPLITS))
    tile = SPLIT.tile["BT"]
    return -(-at_least // tile) * tile


def _with_channels(config: LaunchConfig, channels: int) -> LaunchConfig:
    return config._replace(tile=config.tile | {"BC": channels})
