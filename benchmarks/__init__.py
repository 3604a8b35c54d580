"""The benchmark kit and its cases; `overtone bench` is the command line, `pytest benchmarks/` runs the same cases.

To add an op:
1. Write benchmarks/<op>.py with `cases() -> list[Case]`; frequency.py is the pattern.
2. Add its name to MODULES in kit.py; if it runs on another op's kernels, a line to placement.py.
3. If the README is to show it, a row to tables.py: it is then in the standard set.
"""
