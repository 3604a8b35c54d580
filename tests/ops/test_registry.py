"""What ops.library does for every op: here, that compiled graphs on disk are those of this overtone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from overtone.ops.registry import schema_digest

COMPILE_THREE_TIMES = """
import torch
import overtone as ot
from torch._dynamo.utils import counters

def compile_anew():
    torch._dynamo.reset()
    counters.clear()
    torch.compile(lambda x: ot.frequency_filter(x, 0.5, 2.0) + 1, fullgraph=True)(torch.ones(2, 3, 4))
    return "hit" if counters["inductor"]["fxgraph_cache_hit"] else "miss"

tag = torch.compiler.config.cache_key_tag
assert "overtone" in tag
print(compile_anew(), compile_anew(), end=" ")
torch.compiler.config.cache_key_tag = tag.replace("overtone", "another overtone")
print(compile_anew())
"""


def test_the_digest_names_what_the_sources_say(tmp_path):
    (tmp_path / "op.py").write_text("strides = 1\n")
    digest = schema_digest(tmp_path)
    assert digest == schema_digest(tmp_path)
    (tmp_path / "op.py").write_text("strides = 2\n")
    assert digest != schema_digest(tmp_path)


@pytest.mark.slow
def test_graphs_of_another_overtone_are_not_taken(tmp_path):
    # In a process of its own: conftest.py switches these caches off, and torch lets nobody switch them on again.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    command = [sys.executable, "-c", COMPILE_THREE_TIMES]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == "miss hit miss\n", result.stdout + result.stderr
