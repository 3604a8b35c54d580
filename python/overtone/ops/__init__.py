"""Public functions and their contracts, a file per op; validation (checks) and registration (library) for all."""
