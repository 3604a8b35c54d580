"""pytest's option for the cases beyond the standard set."""

from __future__ import annotations


def pytest_addoption(parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="benchmarks: every case, not only the standard set")
