"""The error tree users see. Every message says what happened, where, and what to do next."""

from __future__ import annotations


class HarvestError(Exception):
    """Root of the errors that Harvest raises on purpose; the command line prints them without a traceback."""


class ConfigError(HarvestError):
    """The configuration cannot be used: unknown key, bad value, or values that contradict each other."""


class DatasetError(HarvestError):
    """The dataset cannot be read: missing, damaged, of an unknown form, or without the named columns."""


class PlanError(HarvestError):
    """A plan cannot be made, or the run folder belongs to another plan."""


class LoaderError(HarvestError):
    """A loader cannot be made or go on as asked."""


class RunError(HarvestError):
    """A run stopped before it was complete; what is committed stays, and the same command resumes it."""


class ModelError(HarvestError):
    """A model cannot be had or used: unknown name, no network, bad checksum, missing or damaged weight file."""
