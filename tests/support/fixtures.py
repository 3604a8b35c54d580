"""Fixtures, loaded by tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from overtone import _extension, hardware
from overtone.benchmarks.harness import machine, timing
from overtone.benchmarks.harness.case import Call
from overtone.ops.basis import BasisCache
from support import cuda_emulator as host_cuda_kernels

ISA_LEVELS = ("baseline", "avx2", "avx512")
# With instructions for products of bfloat16: the machine's own where it has them, and everywhere the same in C++.
BF16_LEVELS = ("avx512_bf16", "amx", "avx512_bf16_emulated", "amx_emulated")


@pytest.fixture
def poisoned_empty():
    """Every torch.empty, of C++ too, comes back full of NaN: memory that a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # with it torch fills uninitialised memory (its default for that mode)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session", autouse=True)
def vector_kernels() -> None:
    """Tests that choose no level run the kernels of vectors, whose bfloat16 the reference judges; those that multiply
    bfloat16 round more, and have tests of their own (`bf16_level`), judged by PyTorch at the same precision."""
    if _extension.module is not None and _extension.module.isa() in BF16_LEVELS:
        _extension.module.set_isa("avx512")


def _at_level(level: str) -> Iterator[str]:
    native = _extension.module
    if native is None:
        pytest.skip(f"no CPU kernels: {_extension.load_error}")
    if not level.endswith("emulated") and level not in native.available_isas():
        pytest.skip(f"this machine has no {level}")
    before = native.isa()
    native.set_isa(level)
    yield level
    native.set_isa(before)


@pytest.fixture(params=ISA_LEVELS)
def isa_level(request) -> Iterator[str]:
    """Runs the test once per instruction set; `last_kernel()` of the extension then tells which one really ran."""
    yield from _at_level(request.param)


@pytest.fixture(params=BF16_LEVELS)
def bf16_level(request) -> Iterator[str]:
    """The same for those that multiply bfloat16."""
    yield from _at_level(request.param)


@pytest.fixture
def cpu_kernels():
    """The extension module; skips where it was not built."""
    if _extension.module is None:
        pytest.skip(f"no CPU kernels: {_extension.load_error}")
    return _extension.module


@pytest.fixture
def one_thread():
    """Small models are slower with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def factorisations(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the bases that were factorised."""
    shapes: list[tuple[int, ...]] = []
    store = BasisCache.store

    def noting(name, kind, matrix, *args):
        shapes.append(tuple(matrix.shape))
        store(name, kind, matrix, *args)

    monkeypatch.setattr(BasisCache, "store", staticmethod(noting))
    return shapes


@pytest.fixture(scope="session")
def host_cuda() -> host_cuda_kernels.HostCuda:
    """The CUDA kernels, run on the host."""
    return host_cuda_kernels.HostCuda(host_cuda_kernels.load_module())


@pytest.fixture
def quiet_machine(monkeypatch):
    """These tests share the machine with whatever else runs on it; what they assert must not depend on that."""
    monkeypatch.setattr(machine, "OtherLoad", lambda *own: SimpleNamespace(cpus=lambda: 0.0))
    monkeypatch.setattr(machine, "matmul_peak", lambda seconds, device: 1e11)
    monkeypatch.setattr(hardware, "thread_latency", lambda: 5e-8)


@pytest.fixture
def clock(monkeypatch):
    """Time that only `clock.sleep` advances; plain passes over memory take half a second of it or four."""
    fake = SimpleNamespace(now=0.0)
    fake.perf_counter = lambda: fake.now

    def sleep(seconds: float) -> None:
        fake.now += seconds

    fake.sleep = sleep
    monkeypatch.setattr(timing, "time", fake)
    probes = {"slow": Call(lambda _: sleep(4.0)), "fast": Call(lambda _: sleep(0.5))}
    monkeypatch.setattr(machine, "memory_probes", lambda limit, size, device: probes)
    return fake
