"""What a study trains: its comparisons, each a list of variants, every one with every seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from overtone.models import METHODS
from overtone.training import ConfigError, TrainConfig

# As the papers write them: + has positive eigenvalues and smooths, − has negative ones and sharpens.
REGIMES = {"free": "ViT", "smooth": "ViT⁺", "sharpen": "ViT⁻"}

FRACTIONS = (1.0, 0.5, 0.1)

# What `make study` compares besides the regimes, and what is compared when asked for.
PARTS = ("depth", "kinds", "text")
OPTIONAL_PARTS = ("methods",)

DEPTHS, LONG_DEPTHS = (6, 12, 24), (4, 8, 16, 24, 32)
TAUS = (0.1, 0.5, 1.0)

# Per data set: what differs from TrainConfig's defaults. The digits' learning rates were chosen on a validation split
# of the training images (overtone train --evaluate-on validation); the rest was not searched again: docs/cli.md.
RECIPES: dict[str, dict[str, Any]] = {
    "digits": {
        "dim": 48, "num_heads": 3, "depth": 8, "epochs": 10, "batch_size": 32, "learning_rate": 2e-3,
        "warmup_epochs": 1.0, "pos_embed_std": 0.3, "init_eigenvalue": 0.4, "shift": 0,
    },
    "cifar10": {"size": "tiny", "epochs": 100, "batch_size": 128, "warmup_epochs": 5.0},
    "cifar100": {"size": "tiny", "epochs": 100, "batch_size": 128, "warmup_epochs": 5.0},
}  # fmt: skip
# What the comparison of depths has instead, chosen there at 24 layers for all of its variants together.
DEPTH_RECIPES: dict[str, dict[str, Any]] = {"digits": {"learning_rate": 1e-3}}
# The factor by which the deepest models' learning rate is raised, to see what else would train.
FASTER = 2
QUICK = {"dim": 32, "num_heads": 2, "depth": 4, "epochs": 2, "batch_size": 32, "warmup_epochs": 0.5}

# Language models on the documentation that Python brings; their depth is not that of the images' models.
TEXT_RECIPE: dict[str, Any] = {
    "dim": 48, "num_heads": 3, "depth": 6, "context_length": 128, "epochs": 2, "batch_size": 16, "learning_rate": 2e-3,
    "warmup_epochs": 0.1, "init_eigenvalue": 0.4,
}  # fmt: skip
TEXT_QUICK = {"dim": 16, "num_heads": 2, "epochs": 1, "context_length": 32, "train_fraction": 0.02, "batch_size": 8}
TEXT_MODELS = {"free": "GPT", "smooth": "GPT⁺", "sharpen": "GPT⁻"}

# β of mimetic initialization: the usual one, and the size at which the spectra of the digits' recipe start.
MIMETIC = (0.05, 0.4)


class Run(NamedTuple):
    """One training of the study, as a comparison needs it. Comparisons may share a training."""

    part: str
    variant: str  # its name in tables
    seed: int
    config: TrainConfig

    @property
    def folder_name(self) -> str:
        """Says what it is, and ends with a hash of everything that decides the result: another plan, another folder."""
        regime = self.config.model.regime
        words = regime if isinstance(regime, str) else "mixed"
        share = f"{100 * self.fraction:g}"
        return f"{words}-{self.depth}-layers-{share}-seed{self.seed}-{self.config.digest()[:8]}"

    @property
    def depth(self) -> int:
        return self.config.model.depth

    @property
    def epochs(self) -> int:
        return self.config.optim.epochs

    @property
    def fraction(self) -> float:
        """Of the training images."""
        return self.config.data.train_fraction

    @property
    def work(self) -> float:
        """What it costs, in layers times epochs of all images."""
        return self.depth * self.epochs * self.fraction

    def __str__(self) -> str:
        share = "" if self.fraction == 1 else f", {100 * self.fraction:g} % of the data"
        return f"{self.variant}, {self.depth} layers{share}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """All of a study. `Plan.of` makes the usual ones."""

    config: TrainConfig  # of the free model on all data, seed 0
    seeds: int = 3
    images: int = 32  # test images whose tokens and attention are analyzed
    quick: bool = False
    parts: tuple[str, ...] = ("regimes", *PARTS)
    depths: tuple[int, ...] = DEPTHS
    methods: tuple[str, ...] = tuple(METHODS)
    long: bool = False

    @classmethod
    def of(
        cls,
        data: str,
        *,
        data_dir: str | None = None,
        seeds: int | None = None,
        epochs: int | None = None,
        quick: bool = False,
        parts: Sequence[str] = PARTS,
        depths: Sequence[int] | None = None,
        methods: Sequence[str] | None = None,
        long: bool = False,
    ) -> Plan:
        """The study of "digits", or of "cifar10" or "cifar100" from data_dir.

        The keywords are many because they are the command's options.

        Args:
            data: set, by its name.
            data_dir: where its archive is.
            seeds: of every variant; 3, or 1 where quick.
            epochs: with all data; the recipe's.
            quick: one seed, a smaller model, 2 epochs.
            parts: what is compared besides the regimes, of PARTS and OPTIONAL_PARTS.
            depths: in layers, of the comparison of depths; DEPTHS, or (4, 8) where quick.
            methods: of METHODS, for the comparison of methods; all of them.
            long: more depths, and both kinds of spectra on text and in mixed models.
        """
        if data not in RECIPES:
            raise ConfigError(f"data: got {data!r}, wanted one of {', '.join(RECIPES)}")
        methods = tuple(METHODS) if methods is None else tuple(methods)
        for name, values, known in (("parts", parts, (*PARTS, *OPTIONAL_PARTS)), ("methods", methods, METHODS)):
            for value in values:
                if value not in known:
                    raise ConfigError(f"{name}: got {value!r}, wanted some of {', '.join(known)}")
        recipe = RECIPES[data] | (QUICK if quick else {}) | ({} if epochs is None else {"epochs": epochs})
        config = TrainConfig(data=data, data_dir=data_dir, tensorboard=False, **recipe)
        seeds = (1 if quick else 3) if seeds is None else seeds
        usual = (4, 8) if quick else LONG_DEPTHS if long else DEPTHS
        depths = usual if depths is None else depths
        if seeds < 1:
            raise ConfigError(f"seeds: got {seeds}, wanted at least 1")
        if not depths or min(depths) < 1:
            raise ConfigError(f"depths: got {', '.join(map(str, depths))}, wanted numbers of at least 1")
        return cls(
            config, seeds, 8 if quick else 32, quick, ("regimes", *dict.fromkeys(parts)),
            tuple(sorted(set(depths))), methods, long,
        )  # fmt: skip

    def runs(self) -> list[Run]:
        """Every run; the longest come first, so that no core is left with one at the end."""
        return sorted((run for part in self.parts for run in self.runs_of(part)), key=lambda run: -run.work)

    def runs_of(self, part: str) -> list[Run]:
        """The runs of one comparison; none where it is not in the plan."""
        variants = {"regimes": self._regimes, "depth": self._depth, "kinds": self._kinds, "methods": self._methods,
                    "text": self._text}  # fmt: skip
        found = variants[part]() if part in self.parts else []
        return [
            Run(part, name, seed, config.replace(seed=seed)) for seed in range(self.seeds) for name, config in found
        ]

    def _regimes(self) -> list[tuple[str, TrainConfig]]:
        return [
            (REGIMES[regime], self.regime_config(regime).replace(
                train_fraction=fraction,
                # With a tenth of the data as many epochs would be too few steps to learn anything.
                epochs=round(self.config.optim.epochs / math.sqrt(fraction)),
            ))
            for fraction in FRACTIONS
            for regime in REGIMES
        ]  # fmt: skip

    def regime_config(self, regime: str) -> TrainConfig:
        """Of one regime, or of one per layer."""
        # −ψ² without a bound is no guarantee.
        return self.config.replace(regime=regime, bounded="sharpen" in regime)

    def _depth(self) -> list[tuple[str, TrainConfig]]:
        """Post-norm, de-escalated post-norm, pre-norm; other strengths and learning rates for the deepest only."""
        pre = self.config.replace(**DEPTH_RECIPES.get(self.config.data.name, {}))
        post = pre.replace(norm="post")
        strengths = {f"post-norm, τ = {tau:g}": post.replace(method="de_escalation", strength=tau) for tau in TAUS}
        main = {"post-norm": post, "post-norm, τ = 1": strengths["post-norm, τ = 1"], "pre-norm": pre}
        rate = FASTER * pre.optim.learning_rate
        faster = {f"{name}, {FASTER} × rate": config.replace(learning_rate=rate) for name, config in main.items()}
        found = [(name, config.replace(depth=depth)) for depth in self.depths for name, config in main.items()]
        others = {name: config for name, config in strengths.items() if name not in main} | faster
        return found + [(name, config.replace(depth=self.depths[-1])) for name, config in others.items()]

    def _kinds(self) -> list[tuple[str, TrainConfig]]:
        """V Λ V⁻¹ beside V Λ Vᵀ, and layers of different regimes."""
        found = [("ViT", self.config)]
        for regime, label in list(REGIMES.items())[1:]:
            config = self.regime_config(regime)
            found += [(f"{label}, V Λ Vᵀ", config), (f"{label}, V Λ V⁻¹", config.replace(kind="general"))]
        half, rest = self.config.model.depth // 2, self.config.model.depth - self.config.model.depth // 2
        for label, first, second in (("−, then free", "sharpen", "free"), ("free, then −", "free", "sharpen")):
            config = self.regime_config(",".join([first] * half + [second] * rest))
            found += [(f"{label}, V Λ Vᵀ", config)]
            found += [(f"{label}, V Λ V⁻¹", config.replace(kind="general"))] if self.long else []
        return found

    def _text(self) -> list[tuple[str, TrainConfig]]:
        """Free, smoothing and sharpening of both kinds, and a mixed model."""
        recipe = TEXT_RECIPE | (TEXT_QUICK if self.quick else {})
        base = TrainConfig(data="text", tensorboard=False, **recipe)
        found = [(TEXT_MODELS["free"], base)]
        for regime, label in list(TEXT_MODELS.items())[1:]:
            config = base.replace(regime=regime, bounded=regime == "sharpen")
            found += [(label, config)] + ([(f"{label}, V Λ V⁻¹", config.replace(kind="general"))] if self.long else [])
        half = recipe["depth"] // 2
        mixed = ",".join(["sharpen"] * half + ["free"] * (recipe["depth"] - half))
        return [*found, ("−, then free", base.replace(regime=mixed, bounded=True))]

    def _methods(self) -> list[tuple[str, TrainConfig]]:
        """The free ViT with every method, the two spectra, and the control for the start of the weights."""
        found = [(name, self.config.replace(method=name)) for name in self.methods]
        found += [(REGIMES[regime], self.regime_config(regime)) for regime in list(REGIMES)[1:]]
        return found + [(f"mimetic start, β = {beta:g}", self.config.replace(mimetic_init=beta)) for beta in MIMETIC]
