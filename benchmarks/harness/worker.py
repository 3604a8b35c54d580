"""One side of a comparison of two builds: a process that times our ops when told to.

    python -m overtone.benchmarks.harness.worker

It reads a line of JSON and answers with one. {"case": name} sets a case up and checks it: {"passed", "message"};
{"seconds": s} runs it for that long: {"median", "cpu"}, the seconds of one call and this process's CPU time so far.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import overtone as ot
from overtone.benchmarks.harness import runner
from overtone.benchmarks.harness.backends import placed
from overtone.benchmarks.harness.case import Call, Case
from overtone.benchmarks.harness.check import Check
from overtone.benchmarks.harness.timing import time_slice


class Worker:
    """What answers."""

    def __init__(self) -> None:
        self.call: Call | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if "case" in order:
            check = self._prepare(order["case"])
            return {"passed": check.passed, "message": check.message}
        if self.call is None:
            raise ValueError("a case comes before seconds")
        return {"median": median(time_slice(self.call, order["seconds"])), "cpu": time.process_time()}

    def _prepare(self, name: str) -> Check:
        self.call = None
        found = find_case(name)
        if not isinstance(found, Case):
            return Check.failed(found)
        ot.use_backend(found.backend).__enter__()  # it stays: this process does nothing else
        try:
            prepared = runner.PreparedCase(found)
        except Exception as error:  # whatever the other version of overtone cannot do
            return Check.failed(f"{type(error).__name__}: {error}")
        self.call = prepared.call(found.workload.ours)
        return prepared.check(runner.OURS, self.call)


def find_case(name: str) -> Case | str:
    """The case, or why there is none: the kit is the newer one, and may ask an older overtone for what it has not."""
    reason = "there is no such case"
    for module in runner.MODULES:
        try:
            cases = importlib.import_module(f"overtone.benchmarks.{module}").cases()
        except (ImportError, AttributeError) as error:
            reason = f"this version cannot run benchmarks/{module}.py: {error}"
            continue
        for case in (copy for written in cases for copy in placed(written)):
            if case.name == name:
                return case
    return reason


def serve(lines: Iterable[str], write: Callable[[str], object]) -> None:
    worker = Worker()
    for line in lines:
        write(json.dumps(worker.answer(json.loads(line))) + "\n")


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer

    def write(text: str) -> None:
        answers.write(text)
        answers.flush()

    serve(sys.stdin, write)


if __name__ == "__main__":
    main()
