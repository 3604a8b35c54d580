"""The README's figures from runs kept as JSON: a small summary, the tables between two marks, and a plot.

A run on another machine or with another torch is refused: a table has one machine. Where two runs have the same case,
the undisturbed one counts, then the one with all its baselines, then the later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from overtone.benchmarks.harness.report import FORMAT
from overtone.benchmarks.harness.tables import TABLES, standard_names

BEGIN = "<!-- figures: `overtone bench --readme` writes what is between here and the other mark -->"
END = "<!-- end of figures -->"
# A path of the machine, or its kernel's name, has no place in a repository.
MACHINE = ("cpu", "cpus", "isa", "threads", "onednn_max_cpu_isa", "versions")


class RunsDoNotFit(ValueError):
    """Runs that cannot be put into one table."""


def read_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Runs that `overtone bench --json` wrote."""
    runs = [json.loads(path.read_text()) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if not isinstance(run, dict) or run.get("format") != FORMAT or "results" not in run:
            raise RunsDoNotFit(f"{path}: not a run of this version, which `overtone bench --json` writes")
        if run["quick"]:
            raise RunsDoNotFit(f"{path}: a quick run, whose figures mean little")
    return runs


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the repository keeps of the runs: medians, ratios, checks and memory of the standard cases."""
    machines = [{key: run["machine"][key] for key in MACHINE} for run in runs]
    for machine in machines[1:]:
        if machine != machines[0]:
            different = [key for key in MACHINE if machine[key] != machines[0][key]]
            raise RunsDoNotFit(f"the runs differ in {', '.join(different)}: one table is of one machine")
    wanted, results = standard_names(), {}
    for run in runs:
        for result in run["results"]:
            summary, known = _summary(result), results.get(result["name"])
            if result["name"] in wanted and (known is None or _worth(summary) >= _worth(known)):
                results[result["name"]] = summary
    commits = list(dict.fromkeys(run["machine"]["commit"] for run in runs))
    return {"format": FORMAT, "machine": machines[0], "commits": commits, "results": results}


def _worth(summary: Mapping[str, Any]) -> tuple[bool, bool]:
    return summary["trusted"], summary["complete"]


def _summary(result: Mapping[str, Any]) -> dict[str, Any]:
    right = [name for name, check in result["checks"].items() if check["passed"]]
    failed = {name: check["message"] for name, check in result["checks"].items() if not check["passed"]}
    return {
        "trusted": result["trusted"],
        # whether every baseline took part: without some of them the fastest is not known
        "complete": set(result["baselines"]) <= set(result["checks"]),
        "undisturbed_rounds": result["undisturbed_rounds"],
        "median_ms": {name: _digits(1e3 * result["seconds"][name]["median"]) for name in right if result["seconds"]},
        "ratios": {name: _digits(ratio) for name, ratio in result["ratios"].items()},
        "memory": result["memory"],
        "checks": {"passed": right, "failed": failed},
    }


def _digits(value: float) -> float:
    """Four of them: more are noise."""
    return float(f"{value:.4g}")


def as_text(summary: Mapping[str, Any]) -> str:
    """The summary as JSON, one case a line, so that a change of one is a change of one line."""
    results = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in summary["results"].items())
    head = {key: value for key, value in summary.items() if key != "results"}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    return "{\n" + ",\n".join([*lines, ' "results": {\n' + results + "\n }"]) + "\n}\n"


def region(summary: Mapping[str, Any]) -> str:
    """What stands between the marks."""
    machine, versions = summary["machine"], summary["machine"]["versions"]
    commits = ", ".join(map(_short, summary["commits"]))
    disturbed = sum(not result["trusted"] for result in summary["results"].values())
    words = (
        f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['threads']} threads, kernels at {machine['isa']}, "
        f"torch {versions['torch']}, float32, commit {commits}. Medians, ours and the baselines in turns; "
        "above 1 we are faster, **losses are bold**. A dash: not measured on an undisturbed machine"
        + (f" ({disturbed} cases)." if disturbed else ".")
    )
    tables = [table.markdown(summary["results"]) for table in TABLES]
    return "\n\n".join([_wrapped(words), *tables])


def _short(commit: str | None) -> str:
    """Ten letters, and whether the checkout was edited."""
    name, plus, edited = (commit or "unknown").partition("+")
    return name[:10] + plus + edited


def _wrapped(text: str, width: int = 120) -> str:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def replaced(text: str, summary: Mapping[str, Any]) -> str:
    """The README with its figures made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise RunsDoNotFit(f"README.md: wanted the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{region(summary)}\n\n{END}{after}"


def plotted(summary: Mapping[str, Any]) -> Mapping[str, float]:
    """Our ratio to the fastest plain PyTorch, of every standard case that was not disturbed, in the tables' order."""
    names: Iterable[str] = dict.fromkeys(name for table in TABLES for name in table.cases())
    known = ((name, summary["results"].get(name)) for name in names)
    return {
        name.replace(" float32", ""): min(result["ratios"].values())
        for name, result in known
        if result and result["trusted"] and result["complete"] and result["ratios"]
    }


def write(runs: Sequence[Path], root: Path) -> list[Path]:
    """Make README.md, docs/benchmarks.json and docs/benchmarks.png of these runs; the files written."""
    from overtone.report import figures

    summary = summarize(read_runs(runs))
    readme, data, plot = (root / name for name in ("README.md", "docs/benchmarks.json", "docs/benchmarks.png"))
    text = replaced(readme.read_text(), summary)
    figure = figures.ratio_bars(
        "benchmarks",
        "How many times faster than the fastest plain PyTorch",
        plotted(summary),
        x="× the fastest plain PyTorch",
        alt="A bar per case: our speed as a multiple of the fastest plain PyTorch's.",
    )
    readme.write_text(text)
    data.write_text(as_text(summary))
    plot.write_bytes(figure.png)
    return [readme, data, plot]
