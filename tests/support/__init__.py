"""What every test of an op uses: float64 truth, derived tolerances, poisoned memory, ugly shapes, ISA levels.

accuracy, compiling, repeat and shapes are modules to import from; fixtures are there everywhere.
"""
