"""What every test of an op uses: float64 truth, derived tolerances, poisoned memory, ugly shapes, ISA levels.

    from kit import accuracy, compiling, repeat, shapes
    pytest_plugins / fixtures: poisoned_empty, isa_level (kit.fixtures)
"""
