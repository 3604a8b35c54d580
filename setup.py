"""Builds overtone._C. The switches are environment variables, listed in README.md under "Build switches"."""

import os
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
SANITIZER_FLAGS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"],
    "thread": ["-fsanitize=thread", "-fno-omit-frame-pointer"],
}


def fail(message):
    sys.exit(f"overtone: {message}")


def limit_jobs_by_memory():
    """A C++ compiler needs about 1 GiB for one of our files; more jobs than that would swap."""
    if "MAX_JOBS" in os.environ:
        return
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    os.environ["MAX_JOBS"] = str(max(1, min(os.cpu_count() or 1, pages // 2**30)))


def sanitizer_flags():
    choice = os.environ.get("OVERTONE_SANITIZE", "")
    if choice and choice not in SANITIZER_FLAGS:
        fail(f"OVERTONE_SANITIZE={choice!r} is unknown; wanted one of {', '.join(SANITIZER_FLAGS)}")
    return SANITIZER_FLAGS.get(choice, []), choice or "none"


def extension():
    try:
        import pybind11
        import torch
        from torch.utils.cpp_extension import CppExtension
    except ImportError as error:
        fail(f"building needs {error.name}: install it, then use pip's --no-build-isolation")
    sanitize, sanitizer_name = sanitizer_flags()
    return CppExtension(
        "overtone._C",
        sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.cpp")),
        include_dirs=[str(ROOT / "csrc"), pybind11.get_include()],
        define_macros=[
            # LibTorch's stable ABI as of torch 2.10: one build serves every later torch.
            ("TORCH_TARGET_VERSION", "0x020a000000000000"),
            ("OVERTONE_BUILT_WITH_TORCH", torch.__version__.split("+")[0]),
            ("OVERTONE_SANITIZERS", sanitizer_name),
        ],
        extra_compile_args=["-std=c++20", "-O3", "-Wall", "-Wextra", "-Wno-psabi", "-fvisibility=hidden", *sanitize],
        extra_link_args=sanitize,
    )


def arguments():
    if os.environ.get("OVERTONE_SKIP_EXTENSION") == "1":
        return {}
    limit_jobs_by_memory()
    from torch.utils.cpp_extension import BuildExtension

    return {"ext_modules": [extension()], "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=True)}}


setup(
    packages=[
        "overtone",
        "overtone.cli",
        "overtone.ops",
        "overtone.reference",
        "overtone.benchmarks",
        "overtone.triton_kernels",
    ],
    package_dir={
        "overtone": "python/overtone",
        "overtone.benchmarks": "benchmarks",
        "overtone.triton_kernels": "triton_kernels",
    },
    **arguments(),
)
