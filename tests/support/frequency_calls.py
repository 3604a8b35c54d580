"""Calls of the frequency ops on Triton kernels and what they must be near, for the interpreter and for GPUs."""

from __future__ import annotations

import torch

import overtone as ot
from support import accuracy, shapes

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def random_call(shape, dtype=torch.float32, layout="contiguous"):
    """x with the layout, and two gains of channels; all need gradients."""
    generator = torch.Generator().manual_seed(0)
    x = shapes.with_layout(torch.randn(shape, generator=generator).to(dtype), layout).detach().requires_grad_()
    gain_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    gains = [torch.randn(shape[-1], generator=generator).to(gain_dtype).requires_grad_() for _ in range(2)]
    return x, *gains


def random_mask(shape):
    return shapes.random_mask(shape[:-1], torch.Generator().manual_seed(1))


def check_norms(x, mask=None):
    accuracy.check_against_truth(
        lambda x: tuple(ot.frequency_norms(x, mask=mask, backend="triton")),
        lambda x: tuple(ot.reference.frequency_norms(x, mask=mask)),
        (x,),
    )


def check_filter(args, **options):
    accuracy.check_against_truth(
        lambda *args: ot.frequency_filter(*args, backend="triton", **options),
        lambda *args: ot.reference.frequency_filter(*args, **options),
        args,
    )
