"""The store against a model, in any order of events that hypothesis thinks of."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from storage.testing_machine import StoreMachine

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=QUIET)


@pytest.mark.slow
def test_store_at_length() -> None:
    long = settings(max_examples=400, stateful_step_count=60, deadline=None, suppress_health_check=QUIET)
    run_state_machine_as_test(StoreMachine, settings=long)
