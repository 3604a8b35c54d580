"""Loads the compiled CPU kernels. Importing overtone works without them; `load_error` then says why."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

SKIP = "OVERTONE_SKIP_EXTENSION"


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get(SKIP) == "1":
        return None, f"{SKIP}=1 is set"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None, "TRITON_INTERPRET=1 is set: CPU tensors go to Triton's interpreter in this process"
    try:
        _C = importlib.import_module("overtone._C")
    except ModuleNotFoundError as error:
        if error.name != "overtone._C":
            raise
        return None, "the C++ extension was not built: reinstall overtone where a C++20 compiler is available"
    except ImportError as error:
        return None, f"the C++ extension does not load: {error}"
    _C.isa()  # an OVERTONE_CPU_ISA that means nothing is an error now, not at the first op
    return _C, ""


module, load_error = _load()
