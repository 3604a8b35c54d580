"""Runs the cases of a test file in Triton's interpreter, in a process of its own.

TRITON_INTERPRET=1 must be set before Triton is imported and changes what CPU tensors run on, so it never is in pytest's
own process. There the cases of a file (functions case_*) are not collected; here nothing else is.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed (it exists for Linux only)"
)


def run_cases(file: str) -> None:
    """Fail with the other process's report unless every case passes."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-o", "python_functions=case_*", file]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run([*command, "-p", "no:cacheprovider"], capture_output=True, text=True, env=environment)
    if result.returncode:
        pytest.fail(f"in Triton's interpreter:\n{result.stdout[-20000:]}{result.stderr[-4000:]}", pytrace=False)


def note_launches(monkeypatch, module) -> list[str]:
    """The names of the kernels that `module` of overtone.triton_kernels launches from now on, in order."""
    names: list[str] = []
    launch = module.launch

    def launch_and_note(kernel, *args, **meta):
        names.append(kernel.fn.__name__.removesuffix("_kernel"))
        launch(kernel, *args, **meta)

    monkeypatch.setattr(module, "launch", launch_and_note)
    return names
