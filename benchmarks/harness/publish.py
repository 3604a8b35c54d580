"""The published figures, made from runs kept as JSON: README's short table, the tables of docs/benchmarks.md, a plot.

A run on another machine or with another torch is refused: a table has one machine. Where two runs have the same case,
the quiet one counts, then the one with all its baselines, then the later.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overtone._files import replace_atomically
from overtone.benchmarks.harness.report import FORMAT
from overtone.benchmarks.harness.tables import HIGHLIGHTS, TABLES, losses, standard_names

BEGIN = "<!-- figures: `overtone bench --publish` writes what is between here and the other mark -->"
END = "<!-- end of figures -->"
# A path of the machine, or its kernel's name, has no place in a repository.
MACHINE = ("cpu", "cpus", "isa", "threads", "onednn_max_cpu_isa", "versions")
README, PAGE, DATA, PLOT = (
    Path(name) for name in ("README.md", "docs/benchmarks.md", "docs/benchmarks.json", "docs/benchmarks.png")
)

Summary = Mapping[str, Any]


class RunsDoNotFit(ValueError):
    """Runs that cannot be put into one table."""


def read_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Runs that `overtone bench --json` wrote."""
    runs = [json.loads(path.read_text()) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if not isinstance(run, dict) or run.get("format") != FORMAT or not isinstance(run.get("results"), list):
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


def _worth(summary: Summary) -> tuple[bool, bool]:
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


def as_text(summary: Summary) -> str:
    """The summary as JSON, one case a line, so that a change of one is a change of one line."""
    results = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in summary["results"].items())
    head = {key: value for key, value in summary.items() if key != "results"}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    return "{\n" + ",\n".join([*lines, ' "results": {\n' + results + "\n }"]) + "\n}\n"


def _machine(summary: Summary) -> str:
    machine, torch = summary["machine"], summary["machine"]["versions"]["torch"].partition("+")[0]
    commits = ", ".join(map(_short, summary["commits"]))
    return (
        f"{machine['cpu']} with {machine['threads']} threads, kernels at {machine['isa']}, torch {torch}, float32, "
        f"commit {commits}"
    )


def _short(commit: str | None) -> str:
    """Ten letters, and whether the checkout was edited."""
    name, plus, edited = (commit or "unknown").partition("+")
    return name[:10] + plus + edited


def highlights(summary: Summary) -> str:
    """README's region: a few ranges, and what is slower."""
    rows = [f"| {row.label} | {row.range(summary['results'])} | {row.compared} |" for row in HIGHLIGHTS]
    head = ["| | speedup | compared with |", "|---|---|---|"]
    slower = ", ".join(losses(summary["results"]))
    words = [f"Interleaved with the baselines on {_machine(summary)}:"]
    end = [f"We publish losses too: {slower}."] if slower else []
    return "\n\n".join([*map(_wrapped, words), "\n".join([*head, *rows]), *map(_wrapped, end)])


def tables(summary: Summary) -> str:
    """The region of docs/benchmarks.md: every figure."""
    noisy = sum(not result["trusted"] for result in summary["results"].values())
    words = (
        f"{_machine(summary)}. Ratios of medians, ours and the baselines measured in turns; above 1 we are faster, "
        "**losses are bold**. A dash: not measured, or not on a quiet machine"
        + (f" ({noisy} cases)." if noisy else ".")
    )
    return "\n\n".join([_wrapped(words), *(table.markdown(summary["results"]) for table in TABLES)])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def replaced(text: str, region: str, name: str) -> str:
    """The text of the file `name` with `region` between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise RunsDoNotFit(f"{name}: wanted the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{region}\n\n{END}{after}"


def pages(summary: Summary, root: Path) -> dict[Path, str]:
    """The pages with figures, made anew."""
    regions = {README: highlights(summary), PAGE: tables(summary)}
    return {name: replaced((root / name).read_text(), region, str(name)) for name, region in regions.items()}


def plotted(summary: Summary) -> Mapping[str, float]:
    """Our ratio to the fastest plain PyTorch, of every standard case with a figure, in the tables' order."""
    names = dict.fromkeys(name for table in TABLES for name in table.cases())
    known = ((name, summary["results"].get(name)) for name in names)
    return {
        name.replace(" float32", ""): min(result["ratios"].values())
        for name, result in known
        if result and result["trusted"] and result["complete"] and result["ratios"]
    }


def write(runs: Sequence[Path], root: Path) -> list[Path]:
    """Make the pages, docs/benchmarks.json and docs/benchmarks.png of these runs; the files written."""
    from overtone.report import figures

    summary = summarize(read_runs(runs))
    texts = {**pages(summary, root), DATA: as_text(summary)}
    figure = figures.ratio_bars(
        "benchmarks",
        "How many times faster than the fastest plain PyTorch",
        plotted(summary),
        x="× the fastest plain PyTorch",
        alt="A bar per case: our speed as a multiple of the fastest plain PyTorch's.",
    )
    contents = {name: text.encode() for name, text in texts.items()} | {PLOT: figure.png}
    for name, content in contents.items():
        with replace_atomically(root / name) as draft:
            draft.write_bytes(content)
    return [root / name for name in contents]
