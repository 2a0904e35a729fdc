"""Locations: every place of a model whose value is one row per token, under names that mean the same in every family.

Names are resolved against vLLM's own module tree and against what flows through it in one weightless pass, so a
location's tensor, its width and its layout over tensor-parallel ranks are observed, not assumed.
"""

from actors.location_errors import LocationError, UnknownLocation, UnreadableLocation
from actors.worker.locations.describe import DescribedModule, Side, describe_locations, describe_view
from actors.worker.locations.layout import Layout, Part, gather_full, join_shards
from actors.worker.locations.location import Location, read
from actors.worker.locations.resolve import last_layer_needed, resolve_in_view, resolve_locations
from actors.worker.locations.view import ModelView, view_model

__all__ = [
    "Location",
    "Layout",
    "Part",
    "ModelView",
    "LocationError",
    "UnknownLocation",
    "UnreadableLocation",
    "resolve_locations",
    "resolve_in_view",
    "view_model",
    "read",
    "gather_full",
    "join_shards",
    "last_layer_needed",
    "describe_locations",
    "describe_view",
    "DescribedModule",
    "Side",
]
