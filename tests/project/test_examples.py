"""Every example of the documentation runs, is short, and is on a page."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
ON_TWO_PROCESSES = DOCS / "examples" / "two_processes.py"


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path != ON_TWO_PROCESSES], ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    """As a user runs them, without anything that the tests set up. They assert what they claim, and print it."""
    for library in ("timm", "transformers"):
        if re.search(rf"^(import|from) {library}\b", path.read_text(), re.MULTILINE):
            if importlib.util.find_spec(library) is None:
                pytest.skip(f"the package {library} is not installed")
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    result = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "assert " in path.read_text() and result.stdout


def test_runs_on_two_processes():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run([*launcher, str(ON_TWO_PROCESSES)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"on 2 processes: loss (\S+)", result.stdout)]
    assert len(losses) == 3 and losses[2] < losses[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_is_short_and_on_a_page(path):
    assert len(path.read_text().splitlines()) < 40
    assert f"{{literalinclude}} examples/{path.name}\n" in (DOCS / "examples.md").read_text()
