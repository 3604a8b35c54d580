"""The cases under pytest-benchmark: `pytest benchmarks/`; with --benchmark-disable only the checks.

One group per case, ours and the baselines side by side. An implementation whose check fails is not timed. Runs the
standard set, which docs/benchmarks.md shows; with --all-cases every case.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

import overtone as ot
from overtone.benchmarks.harness.case import Case, is_compiled
from overtone.benchmarks.harness.runner import PreparedCase, all_cases, implementations
from overtone.benchmarks.harness.tables import standard_names


def pytest_generate_tests(metafunc) -> None:
    wanted = None if metafunc.config.getoption("--all-cases") else standard_names()
    metafunc.parametrize(
        ("case", "name"),
        [
            pytest.param(case, name, id=f"{case.name}-{name}".replace(" ", "_"))
            for case in all_cases()
            if wanted is None or case.name in wanted
            for name in implementations(case)
        ],
    )


@lru_cache(maxsize=1)  # the implementations of a case follow each other
def _prepared(case: Case) -> PreparedCase:
    return PreparedCase(case)


def test_implementation(benchmark, case: Case, name: str) -> None:
    status = ot.backends()[case.backend]
    if not status.available:
        pytest.skip(status.detail)
    function = implementations(case)[name]
    if is_compiled(function):
        if benchmark.disabled:
            pytest.skip("torch.compile takes minutes for all cases: run without --benchmark-disable")
        torch.compiler.reset()
    with ot.use_backend(case.backend):
        prepared = _prepared(case)
        call = prepared.call(function)
        check = prepared.check(name, call)
        if check.skipped:
            pytest.skip(check.message)
        assert check.passed, check.message
        benchmark.group = case.name
        benchmark.pedantic(call.run, setup=lambda: ((call.prepare(),), {}), rounds=30, warmup_rounds=3)
