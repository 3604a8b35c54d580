"""A run as a table to read and as JSON to keep. A ratio above 1 means that we are faster; losses are shown as well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby

from overtone.benchmarks.harness.runner import OURS, Result, Run

FAILED = "FAILED"
SKIPPED = "skipped"
UNRELIABLE = "~"
FORMAT = 2  # of the JSON; docs/benchmarks.md describes it


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _ratio(result: Result, baseline: str) -> str:
    check = result.checks.get(baseline)
    if check is not None and check.skipped:
        return SKIPPED
    if not result.checks[OURS].passed or (check is not None and not check.passed):
        return FAILED
    ratio = result.ratio(baseline)
    return "-" if ratio is None else f"{ratio:.2f}x"


def _rate(result: Result) -> str:
    unit = "GFLOP/s" if result.case.workload.bound_by == "matmul" else "GB/s"
    return "-" if result.rate is None else f"{result.rate / 1e9:.1f} {unit}"


def _megabytes(result: Result, name: str | None) -> str:
    size = result.memory.get(name) if name else None
    return "-" if size is None else f"{size / 1e6:.1f} MB"


def _round_trip(result: Result) -> str:
    known = [seconds * 1e9 for seconds in (result.measurement.round_trips if result.measurement else ()) if seconds]
    if not known:
        return "-"
    low, high = min(known), max(known)
    return f"{low:.0f} to {high:.0f} ns" if high > 2 * low else f"{low:.0f} ns"


def _targets(result: Result) -> str:
    def verdict(baseline: str, wanted: float) -> str:
        ratio = result.ratio(baseline)
        word = "not measured" if ratio is None else "reached" if ratio >= wanted else "missed"
        return f"{wanted:g}x {baseline}: {word}"

    return "; ".join(verdict(*target) for target in result.case.targets.items())


def _row(result: Result, baselines: Sequence[str]) -> list[str]:
    case, best = result.case, result.fastest_baseline
    if result.ours is None:
        ours = minimum = FAILED
    else:
        ours, minimum = _milliseconds(result.ours.median), _milliseconds(result.ours.minimum)
    return [
        ("" if result.reliable else UNRELIABLE) + case.shape,
        case.dtype_name,
        case.mode,
        ours,
        minimum,
        *(_ratio(result, name) if name in case.workload.baselines else "" for name in baselines),
        f"{best[1]:.2f}x" if best else FAILED,
        _megabytes(result, OURS),
        _megabytes(result, best[0] if best else None),
        _rate(result),
        f"{result.share:.0%}" if result.share is not None else "-",
        _round_trip(result),
        _targets(result),
    ]


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of equal columns; a column with nothing under its header is left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns, strict=True)]


def _title(result: Result) -> str:
    backend = "" if result.case.backend == "cpu" else f"[{result.case.backend}]"
    return " ".join(filter(None, (result.case.op, result.case.variant, backend)))


def _table_of(title: str, results: list[Result]) -> list[str]:
    baselines = list(dict.fromkeys(name for result in results for name in result.case.workload.baselines))
    measured = [name for name in baselines if any(name in result.checks for result in results)]
    header = ["shape", "dtype", "mode", "ours", "ours min", *measured, "best plain"]
    header += ["memory", "its memory", "rate", "of peak", "round trip", "targets"]
    return [title, *("  " + line for line in _aligned([header, *(_row(result, measured) for result in results)])), ""]


def _failures(run: Run) -> list[str]:
    return [
        f"{FAILED} {result.case.name}: {name}: {check.message}"
        for result in run.results
        for name, check in result.checks.items()
        if not (check.passed or check.skipped)
    ]


def _skips(run: Run) -> list[str]:
    """One line per baseline that was skipped, however many cases it has."""
    checks = [item for result in run.results for item in result.checks.items()]
    return list(dict.fromkeys(f"{SKIPPED} {name}: {check.message}" for name, check in checks if check.skipped))


def _noise(run: Run) -> str:
    marked = sum(not result.reliable for result in run.results)
    before = "unknown" if run.other_cpu_load is None else f"{run.other_cpu_load:.2f}"
    return f"CPUs in use before the run: {before}; cases with too few clean rounds, marked {UNRELIABLE}: {marked}"


def _warnings(run: Run) -> list[str]:
    lines = []
    if run.left_out:
        why = "INTERRUPTED" if run.interrupted else "THE TIME IS UP"
        lines.append(f"WARNING: {why}; {run.left_out} cases that were to follow were not run.")
    if not run.idle:
        lines.append("WARNING: OTHER PROCESSES USED THE MACHINE; these figures are not to be quoted.")
        lines.append(f"         {_noise(run)}")
    if run.other_cpu_load is None:
        lines.append("NOTE: this system does not say whether others use the machine.")
    if run.quick:
        lines.append("NOTE: a quick run shows that everything works; its figures mean little.")
    return lines


def _summary(run: Run) -> list[str]:
    best = [(result, result.fastest_baseline[1]) for result in run.results if result.fastest_baseline]
    if not best:
        return []
    losses = [f"  {ratio:.2f}x {result.case.name}" for result, ratio in best if ratio < 1]
    wins = f"At least as fast as the best plain PyTorch in {len(best) - len(losses)} of {len(best)} cases"
    return [f"{wins}; slower in:" if losses else f"{wins}.", *losses]


def _peaks(run: Run) -> str:
    return ", ".join(f"{peak / 1e9:.0f} GFLOP/s on {device}" for device, peak in run.matmul_peaks.items())


def _machine(run: Run) -> list[str]:
    facts = run.machine
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return [
        f"{facts['cpu']}, {facts['cpus']} CPUs, {facts['threads']} threads, kernels at {facts['isa']}",
        f"{versions}, commit {facts['commit']}; float32 matmul {_peaks(run)}",
        "ratios: the baseline's median time / ours; above 1 we are faster",
        "of peak: our rate as a share of what torch's plain passes over as many bytes (sum or max; copy or triad)",
        "reached between our calls, or of its matrix product",
        "memory: the most that one call holds beyond its inputs, results included; its memory: that of the best plain",
        "round trip: of a cache line between two threads; several times longer where their CPUs share no cache, which",
        "slows down what waits for other threads: torch's SDPA and QR above all",
    ]


def table(run: Run) -> str:
    """The run for a reader."""
    warnings = _warnings(run)
    lines = [*_machine(run), *warnings, ""]
    for title, results in groupby(run.results, key=_title):
        lines += _table_of(title, list(results))
    # Said again at the end, where a terminal shows it.
    return "\n".join([*lines, *_summary(run), *_skips(run), *warnings, *_failures(run)])


def _result_as_json(result: Result) -> dict[str, object]:
    case, best, measurement = result.case, result.fastest_baseline, result.measurement
    return {
        "name": case.name,
        "op": case.op,
        "variant": case.variant,
        "shape": case.shape,
        "dtype": case.dtype_name,
        "mode": case.mode,
        "backend": case.backend,
        "flops": case.workload.flops,
        "bytes": case.workload.bytes,
        "limit": case.workload.bound_by,
        "passed": result.passed,
        "baselines": list(case.workload.baselines),
        "checks": {name: _finite(asdict(check)) for name, check in result.checks.items()},
        "trusted": result.reliable,
        "rounds": measurement.rounds if measurement else 0,
        "undisturbed_rounds": measurement.clean_rounds if measurement else 0,
        "round_trips": list(measurement.round_trips) if measurement else [],
        "seconds": {name: asdict(timing) for name, timing in measurement.timings.items()} if measurement else {},
        "memory": dict(result.memory),
        "ratios": result.ratios,
        "best_plain": best[0] if best else None,
        "targets": {
            baseline: {"wanted": wanted, "ratio": result.ratio(baseline)} for baseline, wanted in case.targets.items()
        },
        "rate": result.rate,
        "peak": result.peak,
        "share": result.share,
    }


def _finite(fields: dict[str, object]) -> dict[str, object]:
    """JSON has no NaN."""
    return {key: None if value != value else value for key, value in fields.items()}


def as_json(run: Run) -> dict[str, object]:
    """The run for a program: times in seconds, rates per second."""
    return {
        "format": FORMAT,
        "passed": run.passed,
        "left_out": run.left_out,
        "quick": run.quick,
        "idle": run.idle,
        "foreign_cpus": run.other_cpu_load,
        "machine": run.machine,
        "plan": asdict(run.plan),
        "matmul_peaks": run.matmul_peaks,
        "results": [_result_as_json(result) for result in run.results],
    }
