"""A driver for Triton that compiles for a GPU that is not there and records launches instead of making them.

Everything before the hardware is Triton's own: binding of arguments, specialisation, compilation, limits, grid, stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

STREAM = 0x5EED


class Recorded(NamedTuple):
    """A launch as the driver was asked for it."""

    name: str
    grid: tuple[int, int, int]
    stream: int
    args: tuple
    source: Any
    metadata: Any


class RecordingDriver:
    """Stands in for triton.runtime.driver.active."""

    def __init__(self, target, max_shared: int) -> None:
        self.target = target
        self.max_shared = max_shared
        self.launches: list[Recorded] = []
        self.utils = self

    def get_current_target(self):
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.max_shared}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple:
        assert kernel, "nothing was compiled"
        return object(), name, 0, 0, 1024  # module, function, registers, spills, threads of a block at most

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, function, packed_metadata, launch_metadata, enter, leave, *args):
            self.launches.append(Recorded(function, (x, y, z), stream, args, source, metadata))

        return launch


@contextmanager
def recording(target, max_shared: int) -> Iterator[list[Recorded]]:
    """Inside, every kernel[grid](...) is compiled for `target` and recorded."""
    from triton.compiler.compiler import max_shared_mem
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    before = driver._active
    recorder = RecordingDriver(target, max_shared)
    driver.set_active(recorder)
    max_shared_mem.cache_clear()  # Triton keeps a device's limit, by its number, for ever
    try:
        yield recorder.launches
    finally:
        driver._active = before
        max_shared_mem.cache_clear()
        _forget_compiled(JITFunction)


def _forget_compiled(kind) -> None:
    """Kernels remember what they compiled by device number; another target's must not be found there."""
    import gc

    for function in [x for x in gc.get_objects() if type(x) is kind]:
        function.device_caches.clear()
