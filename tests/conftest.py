"""What holds for every test: the environment before torch is imported, the seed, and the summary by group."""

from __future__ import annotations

import os
from collections import Counter, defaultdict

# oneDNN's AMX path dies with SIGILL on some virtual machines; torch reads this when it is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# torch.compile's caches of whole graphs outlive a process and know nothing of our fakes: a changed one would meet code
# that was compiled for the former.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

pytest_plugins = ("support.fixtures",)

# The same examples in every run: what failed once fails again. `--hypothesis-profile=default` draws new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter) -> None:
    """Which groups (test files) ran, which were skipped and why; pytest's own closing line follows."""
    counts, skips = _by_group(terminalreporter.stats)
    if not counts:
        return
    terminalreporter.section("slowest files")
    for seconds, group in sorted(_seconds(terminalreporter.stats), reverse=True)[:10]:
        terminalreporter.line(f"{seconds:7.1f} s  {group}")
    terminalreporter.section("groups")
    for group, outcomes in sorted(counts.items()):
        text = ", ".join(f"{outcomes[name]} {name}" for name in OUTCOMES if outcomes[name])
        terminalreporter.line(f"{group:<40} {text}")
        for reason, count in sorted(skips[group].items()):
            terminalreporter.line(f"    skipped {count}: {reason}")


def _seconds(stats: dict[str, list]) -> list[tuple[float, str]]:
    """Per file, fixtures included."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in stats.values():
        for report in reports:
            seconds[getattr(report, "nodeid", "").partition("::")[0]] += getattr(report, "duration", 0.0)
    return [(total, group) for group, total in seconds.items()]


def _by_group(stats: dict[str, list]) -> tuple[dict[str, Counter], dict[str, Counter]]:
    counts: dict[str, Counter] = defaultdict(Counter)
    skips: dict[str, Counter] = defaultdict(Counter)
    for outcome in OUTCOMES:
        for report in stats.get(outcome, []):
            group = report.nodeid.partition("::")[0]
            counts[group][outcome] += 1
            if outcome == "skipped":
                skips[group][_skip_reason(report)] += 1
    return counts, skips


def _skip_reason(report) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
