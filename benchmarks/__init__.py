"""The benchmark kit and its cases; `overtone bench` is the command line, `pytest benchmarks/` runs the same cases.

To add an op:
1. Write benchmarks/<op>.py with `cases() -> list[Case]`; frequency.py is the pattern.
2. Add its name to MODULES in kit.py.
"""
