"""How much a device that prepares a share of each batch would bring: a closed form. Pure.

The device works only while the training loop waits (temporal sharing, see ``cooperation.py``), so
that it never makes a step slower. A batch that takes ``T`` seconds from step to step, of which the
step takes ``s``, leaves ``T - s`` to the device. The more the device prepares, the less is ``T``.
"""

from __future__ import annotations

from collections.abc import Callable

BISECTIONS = 12
"""Times the interval of the share is halved: to a 4000th."""

ERROR, LEAST_SPEED = 0.03, 0.5
"""How far the closed form is at most from ``benchmarks/simulate/fusionflow.py``, which runs the
policy itself, for devices of at least this speed: ``tests/device/test_forecast.py``."""


def device_share(
    seconds: Callable[[float], float], step: float, prep: float, speed: float, most: float
) -> float:
    """The share of the preparation that the device takes.

    ``seconds``: time of a batch if the workers are spared a share of its preparation. ``step``:
    time of a training step. ``prep``: time of one worker for a whole batch. ``speed``: that of the
    device, relative to one worker. ``most``: the share that the device can take at most.

    Four workers need 4 s for a batch whose step takes 1 s. A device as fast as four of them takes
    3/8 of the work: 2.5 s of work for the workers and 1.5 s for itself, both in 2.5 s.

    >>> share = device_share(lambda share: max(1.0, 16 * (1 - share) / 4), 1.0, 16.0, 4.0, 1.0)
    >>> round(share, 3), 16 * (1 - round(share, 3)) / 4
    (0.375, 2.5)
    """
    if speed <= 0 or prep <= 0 or most <= 0:
        return 0.0

    def possible(share: float) -> bool:
        return share * prep / speed <= max(0.0, seconds(share) - step)

    if possible(most):
        return most
    low, high = 0.0, most
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low
