"""What can go wrong in a training run, each with the exit status that the command line gives it."""

from __future__ import annotations


class TrainingError(Exception):
    """The base of the errors that a user can do something about."""

    exit_status = 2  # a mistake in what was asked


class ConfigError(TrainingError):
    """A field of the configuration has a value that cannot be."""


class DataError(TrainingError):
    """A file of the data is missing or damaged."""


class CheckpointError(TrainingError):
    """A run's folder cannot be continued or read."""


class DivergedError(TrainingError):
    """The loss or a gradient is no longer finite."""

    exit_status = 1  # the run failed


class LostProcessError(TrainingError):
    """Another process of a distributed run has failed."""

    exit_status = 1
