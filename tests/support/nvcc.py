"""What ptxas says about the CUDA kernels, compiled once per content of their sources and kept in build/."""

from __future__ import annotations

import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from overtone.tools import cuda_aot as aot

ROOT = Path(__file__).resolve().parents[2]


def cache_folder(*what: str) -> Path:
    """The place of what was compiled from the sources as they are, with this nvcc."""
    if aot.obstacle() is not None:
        pytest.skip(f"the CUDA kernels cannot be compiled: {aot.obstacle()}")
    version = subprocess.run([aot.find_nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(repr((version, aot.FLAGS[:-1], what)).encode())
    for file in sorted(path for path in (aot.CSRC / "cuda").rglob("*") if path.is_file()):
        digest.update(file.read_bytes())
    folder = ROOT / "build" / "cuda" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def ptxas_reports() -> dict[str, str]:
    """By architecture, two of them at a time."""
    folder = cache_folder()

    def report(architecture: str) -> str:
        file = folder / f"{architecture}.txt"
        if not file.exists():
            file.write_text(aot.ptxas_report(architecture))
        return file.read_text()

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(aot.ARCHITECTURES, pool.map(report, aot.ARCHITECTURES), strict=True))
