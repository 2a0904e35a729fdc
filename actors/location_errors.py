"""Errors about locations; free of torch and vLLM, so that a driver without either can raise and catch them."""

from __future__ import annotations


class LocationError(ValueError):
    """A location cannot be harvested; the message says which, why, and what to ask for instead."""


class UnknownLocation(LocationError):
    """The model has no such location."""


class UnreadableLocation(LocationError):
    """The location exists but holds no rows: not a tensor, no token axis, or not once per pass."""
