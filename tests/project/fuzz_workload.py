"""Calls every registered op directly, past the checks in Python, with arguments that do not fit each other.

Valid calls are recorded from the public functions, forward and backward; then one to three of a call's arguments are
changed: another dtype, size, stride, number of dimensions or value. Each changed call must return, or raise a line that
says why it is refused. A script for processes that watch memory (tests/project/test_sanitizers.py):

    python tests/project/fuzz_workload.py CALLS [SEED]
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import overtone as ot
from overtone import _C
from overtone.ops import attention, layer_norm, linear
from overtone.ops.linalg.inverse import inverse, inverse_ex

Call = tuple[Any, list[Any]]  # an op and its arguments

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool, torch.complex64,
)  # fmt: skip
NUMBERS = (0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"))
INTEGERS = (-(2**62), -1, 0, 1, 5, 63, 2**62)


class Recorder(TorchDispatchMode):
    """Keeps the arguments of every call of one of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "overtone":
            self.calls.append((func, [_own_memory(x) for x in args]))
        return func(*args, **(kwargs or {}))


def _own_memory(value: Any) -> Any:
    """A tensor of the same strides in memory of exactly its size, so that whatever is read beyond it is seen."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    memory = value.detach().as_strided((reach,), (1,), value.storage_offset()).clone()
    return memory.as_strided(value.shape, value.stride())


def valid_calls() -> list[Call]:
    """A few calls of every op that a CPU tensor can reach."""
    with Recorder() as recorder:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            _call_token_ops(dtype)
            _call_products(dtype)
        for dtype in (torch.float32, torch.float64):
            _call_solvers(dtype)
        layer_norm.rounded_layer_norm(_leaf(3, 40), _leaf(40), _leaf(40)).sum().backward()
    names = {func.name().partition(".")[0] for func, _ in recorder.calls}
    missing = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if _is_ours(name)} - names
    assert not missing, f"no call was recorded of {sorted(missing)}: add one"
    return recorder.calls


def _is_ours(name: str) -> bool:
    return name.startswith("overtone::") and (
        torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutograd")
    )


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def _call_token_ops(dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    x, gain = _leaf(3, 5, 70, dtype=dtype), _leaf(70, dtype=wide)
    mask = torch.rand(3, 5) > 0.3
    for given in (None, mask):
        norms = ot.frequency_norms(x, mask=given)
        (norms.low.sum() + norms.high.sum()).backward()
        for is_causal in (False, True):
            ot.frequency_filter(x, 0.5, gain, mask=given, is_causal=is_causal).sum().backward()
    query, key, value = (_leaf(2, 3, n, 4, dtype=dtype) for n in (7, 9, 9))
    eigenvalues, basis, residual = _leaf(12, dtype=wide), _leaf(12, 10, dtype=dtype), _leaf(2, 7, 10, dtype=dtype)
    bias = _leaf(7, 9, dtype=wide)
    for attn_mask in (None, torch.rand(7, 9) > 0.3, bias):
        y, norms = ot.spectral_attention(
            query, key, value, eigenvalues, basis, residual=residual, attn_mask=attn_mask, return_norms=True
        )
        (y.float().sum() + norms.high.sum()).backward()
    packed = _leaf(2, 7, 3, 3, 4, dtype=dtype)
    terms = {
        "gain": _leaf(3, dtype=wide), "addend": _leaf(3, 1, 4, dtype=dtype), "bias": _leaf(10, dtype=wide),
        "sample_scale": torch.rand(2, dtype=wide), "residual": residual.to(wide),
    }  # fmt: skip
    attention.spectral_attention_qkvpacked(packed, eigenvalues, basis, **terms).float().sum().backward()
    ot.spectral_attention(query, key, value, eigenvalues, basis, is_causal=True, **terms).float().sum().backward()


def _call_products(dtype: torch.dtype) -> None:
    x, w1, b1, w2, b2 = (_leaf(*shape, dtype=dtype) for shape in ((6, 5), (9, 5), (9,), (4, 9), (4,)))
    linear.linear(x, w1, b1).sum().backward()
    linear.linear(x, w1, None).sum().backward()
    linear.mlp(x, w1, b1, w2, b2).sum().backward()
    residual = _leaf(6, 4, dtype=torch.promote_types(dtype, torch.float32))
    linear.mlp(x, w1, b1, w2, b2, residual=residual).sum().backward()


def _call_solvers(dtype: torch.dtype) -> None:
    for n, batch in ((5, 6), (90, 2)):  # a matrix per lane, LAPACK
        a = _leaf(batch, n, n, dtype=dtype)
        for values, vectors in (ot.linalg.eigh(a), ot.linalg.eig(a)):
            (values.abs().sum() + vectors.abs().square().sum()).backward()
        ot.linalg.eig_ex(a), ot.linalg.qr_ex(a)
        values, vectors, info = (x.detach() for x in ot.linalg.eigh_ex(a))
        torch.ops.overtone.eigh_backward(values, vectors, values, vectors, info)
        ot.linalg.eigvals(a.detach().softmax(-1), row_stochastic=True)
        q, r = ot.linalg.qr(a)
        (q.sum() + r.sum()).backward()
    inverse_ex(_leaf(2, 6, 6, dtype=dtype)).inverse.sum().backward()
    inverse(_leaf(2, 6, 6, dtype=dtype)).sum().backward()
    ot.spectrum.SymmetricSpectrum(6, dtype=dtype)()
    ot.spectrum.GeneralSpectrum(6, dtype=dtype)()


def _resized(x: Tensor, choose: random.Random) -> Tensor:
    shape = list(x.shape)
    if not shape:
        return x.expand(choose.choice((0, 1, 3))).clone()
    dim = choose.randrange(len(shape))
    shape[dim] = choose.choice((0, 1, max(0, shape[dim] - 1), shape[dim] + 1, 2 * shape[dim] + 1))
    return torch.randn(shape).to(x.dtype)


def _restrided(x: Tensor, choose: random.Random) -> Tensor:
    if x.dim() == 0:
        return x
    a, b = choose.randrange(x.dim()), choose.randrange(x.dim())
    return choose.choice((
        lambda: x.transpose(a, b),
        lambda: x.transpose(a, b).contiguous().transpose(a, b),
        lambda: x.narrow(a, 0, min(1, x.shape[a])).expand(x.shape),  # stride 0
        lambda: torch.stack((x, x), -1)[..., 1],
    ))()  # fmt: skip


def _with_other_dims(x: Tensor, choose: random.Random) -> Tensor:
    return choose.choice((
        lambda: x.unsqueeze(choose.randrange(x.dim() + 1)),
        lambda: x.flatten(),
        lambda: x[0] if x.dim() > 0 and len(x) > 0 else x,
        lambda: x.new_zeros(()),
    ))()  # fmt: skip


def _with_other_values(x: Tensor, choose: random.Random) -> Tensor:
    if x.numel() == 0 or x.dtype == torch.bool:
        return x
    number = choose.choice(NUMBERS) if x.is_floating_point() else choose.choice((-(2**31), -1, 1, 2**31 - 1))
    chosen = torch.zeros(x.numel(), dtype=torch.bool)
    chosen[choose.randrange(x.numel())] = True
    return x.masked_fill(chosen.view(x.shape), torch.tensor(number).to(x.dtype))


MUTATIONS: tuple[Callable[[Tensor, random.Random], Tensor], ...] = (
    lambda x, choose: (x.real if x.is_complex() else x).to(choose.choice(DTYPES)),
    _resized,
    _restrided,
    _with_other_dims,
    _with_other_values,
)


def changed(value: Any, choose: random.Random) -> Any:
    if isinstance(value, Tensor):
        return _own_memory(choose.choice(MUTATIONS)(value.detach(), choose))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return choose.choice((*INTEGERS, choose.randrange(64)))
    if isinstance(value, float):
        return choose.choice(NUMBERS)
    return value


def run(call: Call) -> str | None:
    """Runs a call; returns why it was refused, or None."""
    func, arguments = call
    try:
        func(*arguments)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        return str(error)
    return None


def fuzz(calls: list[Call], count: int, seed: int) -> Counter[str]:
    choose = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        func, arguments = choose.choice(calls)
        arguments = list(arguments)
        for _ in range(choose.choice((1, 1, 1, 2, 3))):
            place = choose.randrange(len(arguments))
            arguments[place] = changed(arguments[place], choose)
        refusal = run((func, arguments))
        # What the stable ABI says of an error of torch's names neither the op nor the argument.
        assert refusal is None or "API call failed" not in refusal, f"{func}: {refusal}"
        outcomes["ran" if refusal is None else "refused"] += 1
    return outcomes


def main() -> None:
    count, seed = int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])
    torch.manual_seed(seed)
    levels = [*_C.available_isas(), "avx512_bf16_emulated", "amx_emulated"]
    outcomes: Counter[str] = Counter()
    for level in levels:
        _C.set_isa(level)
        outcomes += fuzz(valid_calls(), count // len(levels), seed)
    described = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    print(f"{described}, at {', '.join(levels)}; sanitizers: {_C.build_info()['sanitizers']}")


if __name__ == "__main__":
    main()
