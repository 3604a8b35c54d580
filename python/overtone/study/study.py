"""study: a plan and a folder in, the report out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch

from overtone import hardware
from overtone.backends import backend_for
from overtone.study.at_init import untrained
from overtone.study.plan import Plan
from overtone.study.results import Claim, Results
from overtone.study.runs import run_all
from overtone.training import ConfigError, load_data


class StudyResult(NamedTuple):
    """What a study leaves."""

    report: Path
    results: Results
    claims: list[Claim]

    @property
    def all_claims_hold(self) -> bool:
        return all(claim.holds for claim in self.claims)

    def summary(self) -> str:
        """The papers' tables as text, what had to come out, and where the report is."""
        from overtone.study.tables import all_tables

        tables = all_tables(self.results)
        names = (
            "table1-dominance", "table2-less-data", "table3-corruptions", "depth-accuracy", "kinds", "text", "methods",
            "findings", "claims",
        )  # fmt: skip
        return "\n\n".join([*(tables[name].text() for name in names if name in tables), f"Report: {self.report}"])


def study(plan: Plan, folder: str | Path, *, jobs: int | None = None, progress: bool = True) -> StudyResult:
    """Train what is not trained yet, measure it, and write report.html, a CSV per table and a PNG per figure.

    Args:
        plan: what to train; see `Plan.of`.
        folder: of the report. Its `runs` are kept: a study that was stopped goes on, a finished one only writes again.
        jobs: runs at a time; default: one per core, one alone where there is a GPU.
        progress: say on stderr how far it is.
    """
    _check_packages()
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs: got {jobs}, wanted at least 1")
    folder = Path(folder)
    where = backend_name()
    load_data(plan.config)  # missing or damaged data is told before anything is trained
    runs = run_all(plan.runs(), folder / "runs", images=plan.images, jobs=jobs, progress=progress)
    _say("random models: ViT-B/16, token similarity, LayerNorm's sign", progress)
    results = Results(plan, runs, untrained(plan.quick, seeds=plan.seeds))
    _say("tables and figures", progress)
    return StudyResult(_write(results, folder, where), results, results.claims())


def _check_packages() -> None:
    try:
        import matplotlib
        import tqdm
    except ImportError as error:
        raise ConfigError(f"a study needs {error.name}: pip install 'overtone[study]'") from None
    del matplotlib, tqdm


def backend_name() -> str:
    """The backend of the study's ops; raises where the one that was asked for cannot run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = backend_for("spectral_attention", device)
    return f"the cpu backend ({hardware.isa()} kernels)" if backend == "cpu" else f"the {backend} backend"


def _write(results: Results, folder: Path, where: str) -> Path:
    # Imported here: matplotlib is no package of overtone itself.
    from overtone.study.figures import all_figures
    from overtone.study.page import page
    from overtone.study.tables import all_tables

    folder.mkdir(parents=True, exist_ok=True)
    tables, figures = all_tables(results), all_figures(results)
    for name, table in tables.items():
        (folder / f"{name}.csv").write_text(table.csv(), encoding="utf-8")
    for name, figure in figures.items():
        (folder / f"{name}.png").write_bytes(figure.png)
    report = folder / "report.html"
    page(results, tables, figures, where).write(report)
    return report


def _say(text: str, shown: bool) -> None:
    if shown:
        print(text, file=sys.stderr, flush=True)
