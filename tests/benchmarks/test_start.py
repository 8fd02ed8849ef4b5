"""The benchmark ``start``: the part that runs a plain script."""

from __future__ import annotations

import pytest

from benchmarks import start

PRINTS = """
import json, sys
samples = int(sys.argv[2])
total = samples * (samples - 1) // 2 - {lost}
print("a line of the script")
print(json.dumps(dict(script=2.0, first=0.5, epoch=1.5, cpu=1.0, total=total)))
"""


def test_the_script_is_valid() -> None:
    compile(start.SCRIPT, "train.py", "exec")


def test_each_command_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "SCRIPT", PRINTS.format(lost=0))
    monkeypatch.setattr(start, "SCRIPT_COMMANDS", {"one": (), "other": ("-S",)})
    result = start.run_scripts(1, 100, 8, 2)
    assert result.wrong == ()
    figures = ("2,000", "500", "1,500", "1,000")
    assert result.tables[0].rows == (("one", *figures), ("other", *figures))


def test_lost_samples_and_failures_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "SCRIPT", PRINTS.format(lost=1))
    monkeypatch.setattr(start, "SCRIPT_COMMANDS", {"one": (), "other": ("-c", "1 / 0")})
    result = start.run_scripts(1, 100, 8, 2)
    assert [line.split(":")[1].strip() for line in result.wrong] == [
        "one lost or repeated samples",
        "other failed",
    ]
    assert result.tables[0].rows[1] == ("other", "failed", "", "", "")
