"""Builds overtone: the Python packages and the C++ extension overtone._C.

Build switches, all environment variables:

| variable | values | what it does |
|---|---|---|
| `OVERTONE_SKIP_EXTENSION` | `1` | no extension: pure Python, which runs on the reference and says so once |
| `OVERTONE_CUDA` | `auto` (default), `1`, `0` | CUDA kernels: where possible, required, never |
| `OVERTONE_CUDA_ARCHS` | such as `8.0;9.0;12.0+PTX` | architectures of the CUDA kernels; default: torch's choice |
| `OVERTONE_SANITIZE` | `address`, `thread` | with AddressSanitizer and UndefinedBehaviorSanitizer, or ThreadSanitizer |
| `OVERTONE_DEBUG` | `1` | no optimisation, debug symbols, the standard library's assertions |
| `MAX_JOBS` | a number | files compiled at once; default: all cores, at most one per GiB of free memory |
| `CXX` | a command | the C++20 compiler; default: `c++` |

The build must see the torch it will run with, so pip needs --no-build-isolation.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
# Folders of the repository that are installed below overtone.
MAPPED = {"overtone.benchmarks": "benchmarks", "overtone.triton_kernels": "triton_kernels"}
# What is compiled once per instruction set: headers below csrc/cpu, and names from csrc/cpu/isa/isa.h.
VECTOR_ISAS = ("baseline", "avx2", "avx512")
BF16_ISAS = ("avx512_bf16", "amx", "avx512_bf16_emulated", "amx_emulated")
KERNELS = {
    "attention/kernels.h": VECTOR_ISAS,
    "attention/bf16_kernels.h": BF16_ISAS,
    "frequency/kernels.h": VECTOR_ISAS,
    "layer_norm/kernels.h": VECTOR_ISAS,
    "linear/kernels.h": VECTOR_ISAS,
    "linear/bf16_kernels.h": BF16_ISAS,
    "linalg/eig/kernels.h": VECTOR_ISAS,
    "linalg/eigh/kernels.h": VECTOR_ISAS,
    "linalg/inverse/kernels.h": VECTOR_ISAS,
    "linalg/qr/kernels.h": VECTOR_ISAS,
}
# `#if`: an instruction set of another kind of machine compiles to nothing.
KERNEL_SOURCE = """\
// Written by setup.py.
#define OVERTONE_ISA {isa}
#include "cpu/isa/begin.h"
#if OVERTONE_COMPILES_ISA
#include "cpu/{header}"
#endif
#include "cpu/isa/end.h"
"""
RELEASE_FLAGS = ["-O3", "-g0"]
DEBUG_FLAGS = ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
SANITIZER_FLAGS = {
    # Python's own flags may hold -fwrapv, which would make an overflowing offset legal.
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-wrapv"],
    "thread": ["-fsanitize=thread"],
}


def fail(message: str) -> None:
    sys.exit(f"overtone: {message}")


def switch(name: str, values: tuple[str, ...], default: str = "") -> str:
    value = os.environ.get(name) or default
    if value not in (*values, default):
        fail(f"{name}={value!r}: wanted one of {', '.join(values)}")
    return value


def skips_extension() -> bool:
    return switch("OVERTONE_SKIP_EXTENSION", ("0", "1"), "0") == "1"


def package_names() -> list[str]:
    names = find_packages(str(ROOT / "python"))
    for name, folder in MAPPED.items():
        names += [name, *(f"{name}.{inner}" for inner in find_packages(str(ROOT / folder)))]
    return names


def limit_jobs_by_memory() -> None:
    """A C++ compiler takes up to 1 GiB for one of our files; more jobs than that would swap."""
    if "MAX_JOBS" in os.environ or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    os.environ["MAX_JOBS"] = str(max(1, min(os.cpu_count() or 1, free_bytes // 2**30)))


def check_compiler() -> None:
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    way_out = "install g++ 10 or newer (or set CXX), or set OVERTONE_SKIP_EXTENSION=1 to run on the PyTorch reference"
    if shutil.which(compiler[0]) is None:
        fail(f"no C++ compiler: {compiler[0]!r} was not found; {way_out}")
    probe = [*compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", os.devnull]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        fail(f"the compiler {compiler[0]!r} does not compile C++20; {way_out}")


def cuda_obstacle(torch) -> str | None:
    """Why CUDA kernels cannot be built here, or None if they can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build; install one that is"
    if shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        return "nvcc was not found; install the CUDA toolkit, or set CUDA_HOME"
    return None


def cuda_sources(torch) -> list[str]:
    """The CUDA files to build: none where OVERTONE_CUDA says so, or where it leaves the choice and they cannot be."""
    choice = switch("OVERTONE_CUDA", ("auto", "1", "0"), "auto")
    if choice == "0":
        return []
    choose_cuda_architectures()
    obstacle = cuda_obstacle(torch)
    if obstacle is None:
        return files_below_csrc(".cu")
    if choice == "1":
        fail(f"OVERTONE_CUDA=1: {obstacle}")
    return []


def choose_cuda_architectures() -> None:
    architectures = os.environ.get("OVERTONE_CUDA_ARCHS")
    if not architectures:
        return
    if not re.fullmatch(r"\d+\.\d[a-z]?(\+PTX)?([; ]\d+\.\d[a-z]?(\+PTX)?)*", architectures):
        fail(f"OVERTONE_CUDA_ARCHS={architectures!r}: wanted a list such as '8.0;9.0;12.0+PTX'")
    os.environ["TORCH_CUDA_ARCH_LIST"] = architectures


def files_below_csrc(*suffixes: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes)


def kernel_sources(folder: Path) -> list[str]:
    """A source in `folder` per kernel header and instruction set; one that is there already is not touched, or ninja
    would compile it again."""
    sources = []
    for header, isas in KERNELS.items():
        for isa in isas:
            source = folder / f"{header.removesuffix('.h').replace('/', '_')}_{isa}.cpp"
            text = KERNEL_SOURCE.format(isa=isa, header=header)
            if not source.exists() or source.read_text() != text:
                source.parent.mkdir(parents=True, exist_ok=True)
                source.write_text(text)
            sources.append(str(source))
    return sources


def extension(torch, pybind11):
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    sanitizer = switch("OVERTONE_SANITIZE", tuple(SANITIZER_FLAGS))
    debug = switch("OVERTONE_DEBUG", ("0", "1"), "0") == "1"
    sanitize = SANITIZER_FLAGS.get(sanitizer, [])
    optimize = DEBUG_FLAGS if debug else RELEASE_FLAGS
    if sanitizer:
        # Line tables are all that reports need; with full debug information compiling takes twice as long.
        optimize = ["-O1", "-g1", "-fno-omit-frame-pointer"]
    # GCC 12 takes the "undefined" values inside its own AVX-512 intrinsics for uninitialised ones (its bug 105593).
    warnings = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    cpp_flags = ["-std=c++20", *warnings, "-fvisibility=hidden", *optimize, *sanitize]
    cuda = cuda_sources(torch)
    built = (CUDAExtension if cuda else CppExtension)(
        "overtone._C",
        files_below_csrc(".cpp") + cuda,
        include_dirs=[str(ROOT / "csrc"), pybind11.get_include()],
        define_macros=[
            *([("OVERTONE_WITH_CUDA", None)] if cuda else []),
            # LibTorch's stable ABI as of torch 2.10: one build serves every later torch.
            ("TORCH_TARGET_VERSION", "0x020a000000000000"),
            ("OVERTONE_BUILT_WITH_TORCH", torch.__version__.split("+")[0]),
            ("OVERTONE_SANITIZERS", sanitizer or "none"),
            ("OVERTONE_OPTIMIZATION", optimize[0].lstrip("-")),
        ],
        extra_compile_args={"cxx": cpp_flags, "nvcc": ["-std=c++20", "-O3", "-DUSE_CUDA"]},
        extra_link_args=sanitize,
    )
    # The stable ABI's C functions live in these; linking more would tie the build to one version of torch.
    stable = {"torch_cpu", "torch_cuda", "cudart"}
    built.libraries = [library for library in built.libraries if library in stable]
    return built


def extension_arguments() -> dict:
    if skips_extension():
        return {}
    try:
        import pybind11
        import torch
        from torch.utils.cpp_extension import BuildExtension
    except ImportError as error:
        fail(f"building needs {error.name}: install it, then run pip with --no-build-isolation")

    class BuildWithNinja(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # Whether a file is due is ninja's decision: it knows the headers and the flags.
            self.force = True

        def run(self) -> None:
            check_compiler()
            limit_jobs_by_memory()
            extension = self.extensions[0]
            extension.sources = sorted({*extension.sources, *kernel_sources(Path(self.build_temp) / "kernels")})
            super().run()

    return {"ext_modules": [extension(torch, pybind11)], "cmdclass": {"build_ext": BuildWithNinja}}


if __name__ == "__main__":
    setup(
        packages=package_names(),
        package_dir={"overtone": "python/overtone", **MAPPED},
        **extension_arguments(),
    )
