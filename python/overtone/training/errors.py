"""What can go wrong in a training run, each with the exit status that the command line gives it."""

from __future__ import annotations

import contextlib
import re
import reprlib
import traceback
from collections.abc import Iterator


class TrainingError(Exception):
    """The base of the errors that a user can do something about."""

    exit_status = 2  # a mistake in what was asked


class ConfigError(TrainingError):
    """A field of the configuration has a value that cannot be."""


class DataError(TrainingError):
    """A file of the data is missing or damaged."""


class CheckpointError(TrainingError):
    """A run's folder cannot be continued or read."""


class ResourceError(TrainingError):
    """The machine has no room, no right or no compiler for what was asked."""


class DivergedError(TrainingError):
    """The loss or a gradient is no longer finite."""

    exit_status = 1  # the run failed


class LostProcessError(TrainingError):
    """Another process of a distributed run has failed."""

    exit_status = 1


MAX_LENGTH = 300  # characters of what another library says


def one_line(error: BaseException | str) -> str:
    """What an error says, without line breaks and of bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]} …"


def shown(value: object) -> str:
    """A value as an error names it: never all of an array."""
    if hasattr(value, "shape"):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    return one_line(reprlib.repr(value))


def reason(error: OSError) -> str:
    return error.strerror or one_line(error) or type(error).__name__


@contextlib.contextmanager
def machine_errors() -> Iterator[None]:
    """What the machine refuses inside (disk, memory, compiler) becomes a ResourceError of one line."""
    try:
        yield
    except BrokenPipeError:  # nobody reads the output: the command line ends quietly
        raise
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        raise ResourceError(f"{file}{reason(error)}") from error
    except MemoryError as error:
        raise ResourceError(_out_of_memory(error)) from error
    except RuntimeError as error:
        if _lacks_memory(error):
            raise ResourceError(_out_of_memory(error)) from error
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise ResourceError(f"compile: torch.compile fails here: {one_line(error)}; use --no-compile") from error
        raise


def _lacks_memory(error: RuntimeError) -> bool:
    return "DefaultCPUAllocator: " in str(error) or "out of memory" in str(error).lower()


def _out_of_memory(error: BaseException) -> str:
    """The line that asked for memory and how much: torch's message has the bytes, and the traceback has the op."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name}: `{one_line(frames[-1].line or '')}`" if frames else ""
    found = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
    wanted = f" that wanted {found[1]}" if found else ""
    return (
        f"out of memory{place}{wanted}; a smaller batch_size, more grad_accumulation, or grad_checkpointing needs less"
    )
