"""How weights are updated: AdamW, the cosine, the moving average, and whether bfloat16 works here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from overtone.training.config import OptimConfig, TrainConfig
from overtone.training.errors import ConfigError


def learning_rate(step: int, steps_per_epoch: int, config: OptimConfig) -> float:
    """Of a step: from zero to the peak in the warm-up, then half a cosine down."""
    warmup = config.warmup_epochs * steps_per_epoch
    if step < warmup:
        return config.learning_rate * (step + 1) / math.ceil(warmup)
    rest = max(1, config.epochs * steps_per_epoch - 1 - warmup)
    share = (1 + math.cos(math.pi * min(1.0, (step - warmup) / rest))) / 2
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * share


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    decayed = [value for name, value in model.named_parameters() if _decays(name, value)]
    others = [value for name, value in model.named_parameters() if not _decays(name, value)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def _decays(name: str, value: Tensor) -> bool:
    """Matrices do. The basis of a spectrum has no size that decay could shrink."""
    return value.dim() >= 2 and not name.endswith(("pos_embed", "cls_token")) and ".spectrum." not in name


class EMA:
    """The exponential moving average of a model's parameters."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.reset()

    def reset(self) -> None:
        """The average is the parameters as they are now."""
        self.values = {name: value.detach().clone() for name, value in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        # The first steps count more, or the average would long remember the initial weights.
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.values.values()), list(self.parameters.values()), 1 - decay)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model has the averaged weights inside, and its own again, to the bit, afterwards."""
        own = {name: value.detach().clone() for name, value in self.parameters.items()}
        self._assign(self.values)
        try:
            yield
        finally:
            self._assign(own)

    @torch.no_grad()
    def _assign(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])


def check_precision(config: TrainConfig, device: torch.device) -> None:
    """bfloat16 is tried in a process of its own first: on some CPUs its matrix products would kill this one."""
    if config.optim.precision != "bfloat16":
        return
    if device.type == "cpu":
        from overtone.hardware import bf16_matmul_works

        if not bf16_matmul_works():
            raise ConfigError(
                "precision: bfloat16 matrix products crash on this CPU (tried in a process of its own); "
                "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or use float32"
            )
    elif not torch.cuda.is_bf16_supported():
        raise ConfigError(f"precision: {torch.cuda.get_device_name(device)} has no bfloat16; use float32")
