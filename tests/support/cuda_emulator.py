"""The CUDA kernels run on the host (tests/cuda/emulator): built once per content, called on CPU tensors."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
KERNELS, STAND_IN = ROOT / "csrc" / "cuda", ROOT / "tests" / "cuda" / "emulator"
COMPILER = shlex.split(os.environ.get("CXX") or "c++")
FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-U_FORTIFY_SOURCE", f"-I{ROOT / 'csrc'}", f"-I{STAND_IN}"]


def build(name: str, sources: list[str], *flags: str) -> Path:
    """The program or library made of `sources` in tests/cuda/emulator; compiled where no source of it has changed."""
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"no C++ compiler: {COMPILER[0]!r} was not found")
    command = [*COMPILER, *FLAGS, *flags, *(str(STAND_IN / source) for source in sources)]
    digest = hashlib.sha256(repr(command).encode())
    for file in sorted([*KERNELS.rglob("*.h"), *STAND_IN.iterdir()]):
        digest.update(file.read_bytes())
    target = ROOT / "build" / "host_cuda" / digest.hexdigest()[:16] / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        result = subprocess.run([*command, "-o", unfinished], capture_output=True, text=True, check=False)
        assert result.returncode == 0 and not result.stderr, result.stderr
        unfinished.rename(target)
    return target


def load_module() -> ModuleType:
    import pybind11

    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    library = build(
        "host_cuda_kernels.so",
        ["module.cpp", "emulator.cpp"],
        "-O1",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        *includes,
    )
    spec = importlib.util.spec_from_file_location("host_cuda_kernels", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class HostResult(NamedTuple):
    results: tuple[Tensor, ...]
    info: Tensor


class HostCuda:
    """The kernels on CPU tensors [count, n, n]. `path` is "warp", "block" or "block_global"; None is the launch's
    own choice.

    `order` is "forward", "reverse" or a seed. Results are NaN before the kernel writes them.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def eigh(self, a: Tensor, path: str | None = None, order: str | int = "forward", upper=False, vectors=True):
        count, n, _ = a.shape
        values, rows = _poisoned(a, count, n), _poisoned(a, count, n, n)
        info = torch.full((count,), -1, dtype=torch.int32)
        self._solver(a).eigh(
            *_matrices(a), upper, values.data_ptr(), rows.data_ptr() if vectors else 0, info.data_ptr(),
            self._path("eigh", a, path), *self._order(order),
        )  # fmt: skip
        return HostResult((values, rows.mT), info)

    def eigvals(self, a: Tensor, path: str | None = None, order: str | int = "forward", row_stochastic=False):
        count, n, _ = a.shape
        values, workspace = _poisoned(a, count, n, 2), _poisoned(a, count, n, n)
        info = torch.full((count,), -1, dtype=torch.int32)
        self._solver(a).eig(
            *_matrices(a), row_stochastic, values.data_ptr(), workspace.data_ptr(), info.data_ptr(),
            self._path("eig", a, path), *self._order(order),
        )  # fmt: skip
        return HostResult((torch.view_as_complex(values),), info)

    def qr(self, a: Tensor, order: str | int = "forward", complete=False, need_q=True):
        count, rows, columns = a.shape
        inner = rows if complete else min(rows, columns)
        q = _poisoned(a, count, rows, inner if need_q else 0)
        r = _poisoned(a, count, inner, columns)
        info = torch.full((count,), -1, dtype=torch.int32)
        self._solver(a).qr(
            *_matrices(a), q.shape[-1], inner, q.data_ptr(), r.data_ptr(), info.data_ptr(), *self._order(order)
        )
        return HostResult((q, r), info)

    def mistake(self, name: str, order: str | int) -> Tensor:
        """What the kernel of that name wrote; raises what the stand-in finds."""
        return torch.frombuffer(bytearray(self.module.mistake(name, *self._order(order))), dtype=torch.float32)

    def _solver(self, a: Tensor):
        return getattr(self.module, str(a.dtype).removeprefix("torch."))

    def _path(self, op: str, a: Tensor, path: str | None):
        if path is not None:
            return getattr(self.module.Path, path)
        return getattr(self._solver(a), f"{op}_path")(a.shape[-1], self.module.SHARED_EVERYWHERE)

    def _order(self, order: str | int):
        return (self.module.Order.random, order) if isinstance(order, int) else (getattr(self.module.Order, order), 0)


def _matrices(a: Tensor) -> tuple:
    return a.data_ptr(), tuple(a.shape), a.stride()


def _poisoned(like: Tensor, *shape: int) -> Tensor:
    return like.new_full(shape, math.nan)
