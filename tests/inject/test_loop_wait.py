"""``penstock analyze`` reports a missing training loop after 10 seconds, and ends the command."""

from __future__ import annotations

import os
import signal

from penstock.inject import launch
from penstock.inject.loop_wait import KILL_AFTER, LoopWait


class Script:
    """A script, its clock, and what was said about it."""

    def __init__(self, seconds: float) -> None:
        self.now, self.looping = 100.0, False
        self.said: list[str] = []
        self.reached = False
        self.wait = LoopWait(
            lambda: self.reached,
            lambda: self.looping,
            self.said.append,
            seconds,
            lambda: self.now,
        )

    def after(self, seconds: float) -> signal.Signals | None:
        self.now = 100.0 + seconds
        return self.wait()


def test_a_missing_loop_is_told_once_after_ten_seconds_and_ended_with_the_time() -> None:
    script = Script(60.0)
    assert script.after(9.0) is None
    assert script.said == []
    assert script.after(10.0) is None
    assert script.after(30.0) is None
    (said,) = script.said
    assert "after 10 s; waiting until 60 s" in said
    assert script.after(60.0) is signal.SIGTERM
    assert "in 60 s; the command is ended" in script.said[-1]
    assert script.after(61.0) is None
    assert script.after(60.0 + KILL_AFTER) is signal.SIGKILL


def test_a_short_analysis_waits_for_slow_imports_and_a_long_one_for_its_seconds() -> None:
    for seconds, limit in ((25.0, 60.0), (90.0, 90.0)):
        script = Script(seconds)
        script.after(10.0)
        assert f"waiting until {limit:.0f} s" in script.said[-1]
        assert script.after(limit - 1) is None
        assert script.after(limit) is signal.SIGTERM


def test_a_loop_that_began_is_never_ended() -> None:
    script = Script(60.0)
    script.after(11.0)
    script.looping = True
    assert script.after(12.0) is None
    assert script.after(500.0) is None
    assert len(script.said) == 1


def test_the_time_begins_when_torch_is_imported() -> None:
    script = Script(90.0)
    script.after(50.0)
    script.reached = True
    assert script.after(51.0) is None
    assert script.after(140.0) is None
    assert script.after(141.0) is signal.SIGTERM


def test_a_loop_that_begins_too_late_does_not_keep_the_command() -> None:
    script = Script(60.0)
    script.after(60.0)
    script.looping = True
    assert script.after(60.0 + KILL_AFTER) is signal.SIGKILL


def test_the_command_gets_the_signal() -> None:
    code = launch(["sleep", "600"], os.environ, lambda: signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
