"""The ledger loses no record, whichever processes write to it, and locks what processes need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import StoreError
from penstock.store.ledger import Ledger, Provenance
from penstock.store.retention import Policy


def _made(place: Path, identity: str = "aaaa", **more: object) -> Provenance:
    return Provenance("index", identity, str(place), ("one.npz",), **more)  # type: ignore[arg-type]


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def ledger(tmp_path: Path, now: list[float]) -> Ledger:
    return Ledger(tmp_path / "ledger", clock=lambda: now[0])


def test_a_record_says_what_made_a_thing_and_who_used_it_when(
    ledger: Ledger, tmp_path: Path, now: list[float]
) -> None:
    made = _made(tmp_path, origin="/data", made_by=("A", ".map(b)"), line="x")
    ledger.note(made, 5.0)
    now[0] = 1100.0
    ledger.note(made, 1.5)
    record = ledger.records()[made.key]
    assert record.made == Provenance(
        **{
            **{name: getattr(made, name) for name in made.__slots__},
            "versions": record.made.versions,
        }
    )
    assert set(record.made.versions) == {"python", "penstock", "numpy"}
    assert (record.created, record.last_use, record.opened) == (1000.0, 1100.0, 2)
    assert (record.cost, record.hits, record.saved) == (5.0, 1, 3.5)
    assert [use.pid for use in record.uses] == [os.getpid()] * 2
    assert [(use.began, use.hits, use.saved) for use in record.uses] == [
        (1000.0, 0, 0.0),
        (1100.0, 1, 3.5),
    ]


def test_a_later_user_that_knows_less_removes_no_knowledge(ledger: Ledger, tmp_path: Path) -> None:
    ledger.note(_made(tmp_path, origin="/data", data="identity"), 1.0)
    ledger.use(_made(tmp_path))
    (record,) = ledger.records().values()
    assert (record.made.origin, record.made.data) == ("/data", "identity")


def test_uses_are_counted_and_the_last_ones_listed(ledger: Ledger, tmp_path: Path) -> None:
    for _ in range(15):
        ledger.note(_made(tmp_path), 1.0)
    (record,) = ledger.records().values()
    assert (record.opened, len(record.uses)) == (15, 10)


NOTE = """
import sys
from pathlib import Path
from penstock.store.ledger import Ledger, Provenance
ledger = Ledger(Path(sys.argv[1]))
print("ready", flush=True)
for number in range(int(sys.argv[2])):
    ledger.note(Provenance("index", "aaaa", "/place", ("x",)), 1.0)
    ledger.note(Provenance("index", f"{sys.argv[3]}-{number}", "/place", ("x",)), 1.0)
"""


def _start(code: str, *arguments: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
        stdin=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_processes_lose_no_use_of_each_other(ledger: Ledger) -> None:
    both = [_start(NOTE, ledger.root, 40, name) for name in "ab"]
    for process in both:
        process.communicate()
        assert process.returncode == 0
    records = ledger.records().values()
    assert sorted(record.made.identity for record in records) == sorted(
        ["aaaa", *(f"{name}-{number}" for name in "ab" for number in range(40))]
    )
    assert next(one.opened for one in records if one.made.identity == "aaaa") == 80


def test_a_process_killed_while_it_writes_leaves_whole_records(ledger: Ledger) -> None:
    process = _start(NOTE, ledger.root, 1_000_000, "a")
    while len(ledger.records()) < 20:
        assert process.poll() is None
    process.kill()
    process.communicate()
    before = ledger.records()
    assert all(record.opened >= 1 for record in before.values())
    ledger.note(Provenance("index", "new", "/place", ("x",)), 1.0)
    assert len(ledger.records()) == len(before) + 1


HOLD = """
import os
import sys
from pathlib import Path
from penstock.store.ledger import Ledger
for name in sys.argv[2:]:
    Ledger(Path(sys.argv[1])).hold(name)
if len(sys.argv) > 3:
    assert len(os.listdir("/proc/self/fd")) < 100
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_thing_that_a_process_holds_is_locked_until_it_ends_or_is_killed(ledger: Ledger) -> None:
    process = _start(HOLD, ledger.root, "thing")
    with ledger.alone("thing") as (alone, users):
        assert (alone, users) == (False, (process.pid,))
    process.kill()
    process.communicate()
    with ledger.alone("thing") as (alone, users):
        assert (alone, users) == (True, ())
        ledger.drop_lock("thing")


def test_a_process_holds_many_things_with_few_open_files(ledger: Ledger) -> None:
    names = [f"shard-{number}" for number in range(200)]
    process = _start(HOLD, ledger.root, *names)
    for name in names:
        with ledger.alone(name) as (alone, users):
            assert (alone, users) == (False, (process.pid,))
    process.kill()
    process.communicate()
    for name in names:
        with ledger.alone(name) as (alone, users):
            assert (alone, users) == (True, ())


def test_holding_again_after_a_removal_locks_the_new_lock_file(ledger: Ledger) -> None:
    ledger.hold("again")
    ledger.drop_lock("again")
    ledger.hold("again")
    with ledger.alone("again") as (alone, _):
        assert not alone


def test_damaged_and_foreign_records_are_left_out(ledger: Ledger, tmp_path: Path) -> None:
    ledger.note(_made(tmp_path), 1.0)
    for name, text in (("x", "{"), ("y", '{"version": 99}'), ("z", "[1]")):
        (ledger.root / f"{name}.json").write_text(text)
    assert [record.made.identity for record in ledger.records().values()] == ["aaaa"]


def test_a_ledger_that_cannot_be_written_to_is_reported_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    broken = Ledger(tmp_path / "file" / "ledger")
    broken.note(_made(tmp_path), 1.0)
    broken.note(_made(tmp_path), 1.0)
    broken.hold("x")
    assert broken.records() == {}
    (message,) = [one.message for one in caplog.records]
    assert "cannot be written to" in message


def test_the_policy_is_remembered(ledger: Ledger) -> None:
    assert ledger.policy() == Policy()
    policy = Policy(budget=5, unused=None, age=3.0, obsolete=None)
    ledger.set_policy(policy)
    assert ledger.policy() == policy
    (ledger.root / "policy").write_text('{"budgte": 1}')
    with pytest.raises(StoreError, match="penstock store policy"):
        ledger.policy()
