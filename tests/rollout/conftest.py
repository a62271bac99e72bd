"""An open ledger for the tests of this room."""

import pytest

from headrace.rollout.record.ledger import Ledger


class Clock:
    """Seconds that pass one by one."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def ledger(tmp_path):
    with Ledger.create(tmp_path, clock=Clock()) as opened:
        opened.stage_started("rl")
        yield opened
