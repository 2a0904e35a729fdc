"""The store against a model, in any order of events that hypothesis thinks of."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from storage.testing_machine import StoreMachine

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


class TestStore(StoreMachine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=QUIET)


@pytest.mark.slow
class TestStoreLong(StoreMachine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=400, stateful_step_count=60, deadline=None, suppress_health_check=QUIET)
