"""What a study trains: every regime with every seed, on all and on parts of the data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from overtone.training import ConfigError, TrainConfig

# As the papers write them: + has positive eigenvalues and smooths, − has negative ones and sharpens.
REGIMES = {"free": "ViT", "smooth": "ViT⁺", "sharpen": "ViT⁻"}

FRACTIONS = (1.0, 0.5, 0.1)

# Per data set: what differs from TrainConfig's defaults.
RECIPES: dict[str, dict[str, Any]] = {
    "digits": {
        "dim": 48, "num_heads": 3, "depth": 8, "epochs": 10, "batch_size": 32, "learning_rate": 4e-3,
        "warmup_epochs": 1.0, "pos_embed_std": 0.3, "init_eigenvalue": 0.4, "shift": 0,
    },
    "cifar100": {"size": "tiny", "epochs": 100, "batch_size": 128, "warmup_epochs": 5.0},
}  # fmt: skip
QUICK = {"dim": 32, "num_heads": 2, "depth": 4, "epochs": 2, "warmup_epochs": 0.5}


class Run(NamedTuple):
    """One training of the study."""

    regime: str
    fraction: float
    seed: int
    config: TrainConfig

    @property
    def folder_name(self) -> str:
        """Says what it is, and ends with a hash of everything that decides the result: another plan, another folder."""
        return f"{self.regime}-{100 * self.fraction:g}-seed{self.seed}-{self.config.digest()[:8]}"

    def __str__(self) -> str:
        return f"{REGIMES[self.regime]}, {100 * self.fraction:g} % of the data, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """All of a study. `Plan.of` makes the usual ones."""

    config: TrainConfig  # of the free model on all data, seed 0
    seeds: int = 3
    images: int = 32  # test images whose tokens and attention are analysed
    quick: bool = False

    @classmethod
    def of(
        cls,
        data: str,
        *,
        data_dir: str | None = None,
        seeds: int | None = None,
        epochs: int | None = None,
        quick: bool = False,
    ) -> Plan:
        """The study of "digits", or of "cifar100" from data_dir. quick: one seed, a smaller model, 2 epochs."""
        if data not in RECIPES:
            raise ConfigError(f"data: got {data!r}, wanted one of {', '.join(RECIPES)}")
        recipe = RECIPES[data] | (QUICK if quick else {}) | ({} if epochs is None else {"epochs": epochs})
        config = TrainConfig(data=data, data_dir=data_dir, tensorboard=False, **recipe)  # type: ignore[arg-type]
        seeds = (1 if quick else 3) if seeds is None else seeds
        if seeds < 1:
            raise ConfigError(f"seeds: got {seeds}, wanted at least 1")
        return cls(config, seeds, images=8 if quick else 32, quick=quick)

    def runs(self) -> list[Run]:
        """Every run; those on all data, the longest, come first, so that no core is left with one at the end."""
        return [
            Run(regime, fraction, seed, self._config_of(regime, fraction, seed))
            for fraction in FRACTIONS
            for seed in range(self.seeds)
            for regime in REGIMES
        ]

    def _config_of(self, regime: str, fraction: float, seed: int) -> TrainConfig:
        return self.config.replace(
            regime=regime,
            bounded=regime == "sharpen",  # −ψ² without a bound is no guarantee
            train_fraction=fraction,
            seed=seed,
            # With a tenth of the data as many epochs would be too few steps to learn anything.
            epochs=round(self.config.optim.epochs / math.sqrt(fraction)),
        )
