"""The README's code runs, and the README's build table is setup.py's."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    for code in blocks:
        exec(compile(code, "README.md", "exec"), names)
    assert len(blocks) >= 2 and names["analysis"].samples == 8


def test_the_build_table_names_every_switch_of_setup_py():
    switches = set(re.findall(r"`(OVERTONE_\w+|MAX_JOBS|CXX)`", (ROOT / "setup.py").read_text()))
    assert switches
    assert switches <= set(re.findall(r"`(OVERTONE_\w+|MAX_JOBS|CXX)`", README))


def test_the_two_commands_are_named():
    assert "make study" in README and "make test" in README
