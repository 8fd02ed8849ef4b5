"""What a device that prepares a share would bring: the closed form against the simulated policy."""

from __future__ import annotations

import pytest

from benchmarks.simulate.fusionflow import WORKERS, Case, period
from penstock.device.forecast import ERROR, LEAST_SPEED, device_share


@pytest.mark.parametrize("prep", [4.5, 11.2, 17.3, 30.0])
def test_the_closed_form_is_close_to_the_simulated_policy(prep: float) -> None:
    def seconds(share: float) -> float:
        return max(1.0, prep * (1 - share) / WORKERS)

    for speed in (LEAST_SPEED, 1.0, 4.0, 20.0):
        predicted = seconds(device_share(seconds, 1.0, prep, speed, 1.0))
        simulated = period(Case(prep, 1.0, speed))
        assert predicted == pytest.approx(simulated, rel=ERROR), speed


def test_the_share_is_within_what_the_device_can_do_and_has_time_for() -> None:
    def seconds(share: float) -> float:
        return max(1.0, 2.0 * (1 - share))

    # The workers need 2 s for a batch, and the step takes 1 s.
    assert device_share(seconds, 1.0, 8.0, 1e6, 0.25) == 0.25
    assert seconds(device_share(seconds, 1.0, 8.0, 1e6, 1.0)) == pytest.approx(1.0, abs=1e-3)
    # Training does not wait: nothing is left for the device.
    assert device_share(lambda share: 1.0, 1.0, 8.0, 10.0, 1.0) == pytest.approx(0.0, abs=1e-3)
    assert device_share(seconds, 1.0, 8.0, 0.0, 1.0) == 0.0
