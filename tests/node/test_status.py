"""What people see of a node: its state in words, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import cli
from penstock.errors import WorkerError
from penstock.node import look as looking
from penstock.node.look import gone, look
from penstock.node.place import Place
from penstock.node.rendering import behind, lines_of, part, saved
from penstock.node.state import Name, State
from penstock.node.status import cpu_seconds, position

NOW = 10_000.0


def member(pid: int, batch: int | None, **more: Any) -> dict[str, Any]:
    return {
        "pid": pid,
        "part": "0/1 x 64",
        "lag": "detach",
        "epoch": 2,
        "batch": batch,
        "batches": 782,
        "taken": batch,
        "ready": 3,
        "joined": NOW - 700,
        **more,
    }


def group(**more: Any) -> dict[str, Any]:
    return {
        "name": "search-1",
        "ready": True,
        "broken": None,
        "staged": 57_800_000,
        "staged_batches": 6,
        "budget": 3_000_000_000,
        "prepared": 120,
        "given": 480,
        "members": [member(4712, 120), member(4713, 96, ready=0)],
        "workers": "2 threads (every operation releases the GIL)",
        "caches": [
            {
                "hits": 3_000,
                "misses": 4_000,
                "samples": 4_000,
                "bytes": 430_000_000,
                "budget": 8_000_000_000,
                "full": False,
            }
        ],
        "refurbish": None,
        **more,
    }


def snapshot(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "release": "0.1.0",
        "pid": 4711,
        "place": "/run/user/1000/penstock",
        "log": "/run/user/1000/penstock/node.log",
        "up": 725.0,
        "cpu": 312.25,
        "cores": 2,
        "workers": 2,
        "staging": 3_000_000_000,
        "groups": list(groups),
        **more,
    }


# In words.


def test_all_there_is_to_see_is_shown() -> None:
    assert lines_of(snapshot(group()), NOW) == [
        "node    process 4711, up 12 min 5 s, 2 workers",
        "CPU     312.2 s, on average 0.43 of 2 cores",
        "staged  6 batches, 57.8 MB of 3.0 GB",
        "saved   prepared 120, given 480: 3.0 of 4 preparations saved",
        "log     /run/user/1000/penstock/node.log",
        "",
        "search-1: 2 members, 2 threads (every operation releases the GIL)",
        "  process  part        epoch       batch  ready  behind  joined",
        "     4712  all, by 64      2  120 of 782      3       0  11 min ago",
        "     4713  all, by 64      2   96 of 782      0      24  11 min ago",
        "  staged  6 batches, 57.8 MB of 3.0 GB",
        "  saved   prepared 120, given 480: 3.0 of 4 preparations saved",
        "  cache   4,000 samples, 430.0 MB of 8.0 GB; 3,000 hits, 4,000 misses",
    ]


def test_groups_are_added_up() -> None:
    shown = lines_of(snapshot(group(), group(name="b", prepared=80, given=120)), NOW)
    assert "staged  12 batches, 115.6 MB of 3.0 GB" in shown
    assert "saved   prepared 200, given 600: 2.0 of 3 preparations saved" in shown
    assert "b: 2 members, 2 threads (every operation releases the GIL)" in shown


def test_a_node_without_groups_says_that_it_will_end() -> None:
    assert "Nobody is attached" in lines_of(snapshot(), NOW)[-1]


def test_what_happens_between_two_looks_is_shown() -> None:
    before = snapshot(group(given=440), up=723.0, cpu=309.25)
    shown = lines_of(snapshot(group()), NOW, before)
    assert "CPU     312.2 s, on average 0.43 of 2 cores, now 1.50" in shown
    assert any(line.endswith("preparations saved; 20.0 batches/s") for line in shown)


@pytest.mark.parametrize("before", [{"pid": 1}, {"up": 725.0}])
def test_looks_that_do_not_follow_each_other_are_not_compared(before: dict[str, Any]) -> None:
    earlier = {**snapshot(group(given=440), up=723.0, cpu=309.25), **before}
    assert lines_of(snapshot(group()), NOW, earlier) == lines_of(snapshot(group()), NOW)


def test_a_group_that_has_just_come_has_no_rate() -> None:
    before = snapshot(up=723.0, cpu=309.25)
    assert not any("batches/s" in line for line in lines_of(snapshot(group()), NOW, before))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"ready": False}, "its pipeline is being set up"),
        ({"broken": "no such file\nmore"}, "cannot go on: no such file"),
        ({"broken": ""}, "cannot go on: ?"),
    ],
)
def test_a_group_that_does_not_run_says_why(more: dict[str, Any], words: str) -> None:
    bare = {name: value for name, value in group().items() if name not in ("workers", "caches")}
    assert f"search-1: 2 members, {words}" in lines_of(snapshot({**bare, **more}), NOW)


def test_refurbish_and_a_full_cache_are_shown() -> None:
    cache = {**group()["caches"][0], "full": True}
    kept = {"fresh": 10, "reused": 20, "kept": 500, "bytes": 1_000_000}
    shown = lines_of(snapshot(group(caches=[cache, cache], refurbish=kept)), NOW)
    assert shown[-3:] == [
        "  cache      4,000 samples, 430.0 MB of 8.0 GB, full; 3,000 hits, 4,000 misses",
        "  cache      4,000 samples, 430.0 MB of 8.0 GB, full; 3,000 hits, 4,000 misses",
        "  refurbish  keeps 500 samples, 1.0 MB; 20 reused, 10 fresh",
    ]


def test_ranks_are_told_and_what_is_not_understood_is_shown_as_it_is() -> None:
    assert part("0/1 x 64") == "all, by 64"
    assert part("3/8 x 16") == "rank 3 of 8, by 16"
    assert part("something else") == "something else"


def test_nothing_is_saved_where_no_batch_was_given_twice() -> None:
    assert saved(0, 0) == "prepared 0, given 0: nothing yet"
    assert saved(10, 10) == "prepared 10, given 10: nothing yet"
    assert saved(1_000, 3_920) == "prepared 1,000, given 3,920: 2.9 of 3.9 preparations saved"


def test_batches_of_another_size_and_other_epochs_are_compared_by_the_epoch() -> None:
    half_through = member(1, 50, batches=100, epoch=1)
    same_place = member(2, 100, batches=200, epoch=1)
    one_epoch_later = member(3, 50, batches=100, epoch=2)
    unknown = member(4, 7, batches=None)
    found = behind([half_through, same_place, one_epoch_later, unknown])
    assert found == [100, 200, 0, None]
    assert behind([unknown]) == [None]
    assert "?" in lines_of(snapshot(group(members=[unknown])), NOW)[-4]


def test_a_member_that_asks_ahead_is_where_its_loop_is() -> None:
    state = State(budget=1 << 30)
    state.join(1, "0/1 x 8", "detach", 0.0)
    names = [Name("0/1 x 8", number // 6, number % 6, "") for number in range(12)]
    places = []
    for number, name in enumerate(names[:10]):
        if number % 6 == 0:
            state.begin(1, number // 6, 6, 0, 0, 0.0)
        state.want(1, name, 0.0)
        if number >= 3:  # it asks for three more than it has taken
            taken = names[number - 3]
            state.choose(0.0)
            state.prepared(taken, 1, 0.0)
            state.took(1, taken, 0.0)
            places.append(tuple(position(state.members[1]).values()))
    assert places == [(0, 1, 6), (0, 2, 6), (0, 3, 6), (0, 4, 6), (0, 5, 6), (1, 0, 6), (1, 1, 6)]
    state.begin(1, 2, None, 0, 0, 0.0)
    assert position(state.members[1]) == {"epoch": 1, "batch": None, "batches": None}


def test_a_place_that_is_not_known_is_a_question_mark() -> None:
    unknown = member(4, None, batches=None)
    row = next(
        line for line in lines_of(snapshot(group(members=[unknown])), NOW) if "by 64" in line
    )
    assert row.split()[5:8] == ["?", "3", "?"]


@given(st.lists(st.integers(0, 782), min_size=1))
def test_somebody_is_the_furthest_and_nobody_is_behind_by_less(batches: list[int]) -> None:
    found = behind([member(1, batch) for batch in batches])
    assert found == [max(batches) - batch for batch in batches]


# With a node.


def numbers(name: str = "a", **options: Any) -> ps.Loader:
    pipeline = ps.from_dataset(np.arange(64.0)).cache("1MB").batch(8)
    return pipeline.loader(seed=3, share=name, **options)


def command(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_no_node_is_told_plainly(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    assert capsys.readouterr().out == "No node is running.\n"
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) is None
    assert cli.main(["stop"]) == 0
    assert capsys.readouterr().out == "No node is running.\n"


def test_members_are_shown_where_they_stand(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with numbers() as fast, numbers() as slow:
        ahead, after = iter(fast), iter(slow)
        for _ in range(5):
            next(ahead)
        for _ in range(2):
            next(after)
        wait_for(lambda: [one["batch"] for one in _groups()[0]["members"]] == [4, 1])
        assert cli.main(["status"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert cli.main(["status", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
    (node,) = (line for line in lines if line.startswith("node"))
    assert f"process {told['pid']}, up " in node
    assert f"log     {place.log}" in lines
    table = [line.split() for line in lines if "all, by 8" in line]
    assert [row[0] for row in table] == [str(os.getpid())] * 2
    assert [row[5:8] for row in table] == [["4", "of", "8"], ["1", "of", "8"]]
    assert [row[9] for row in table] == ["0", "3"]
    (found,) = told["groups"]
    assert (found["name"], found["ready"], found["broken"]) == ("a", True, None)
    (cache,) = found["caches"]
    assert (cache["hits"], cache["samples"]) == (0, cache["misses"])
    assert found["prepared"] <= 8
    assert told["cpu"] > 0


def _groups() -> list[dict[str, Any]]:
    status = look()
    assert status is not None
    return list(status["groups"])


def wait_for(reached: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_node_that_was_ended_shows_where_its_log_is(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "60")
    with numbers() as loader:
        assert len(list(loader)) == 8
    wait_for(lambda: _groups() == [])
    assert cli.main(["stop"]) == 0
    # With its lock free and its socket gone, it is as if it had never been.
    assert not place.socket.exists()
    claim = place.claim()
    assert claim is not None
    os.close(claim)
    assert "has ended" in capsys.readouterr().out
    assert cli.main(["status"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"No node is running. The log of the last one is {place.log}.\n"


def test_a_node_with_members_is_not_stopped_unless_that_is_meant(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with numbers("searching") as loader:
        epoch = iter(loader)
        had = [next(epoch).tolist() for _ in range(3)]
        before = look()
        assert before is not None
        assert cli.main(["stop"]) == 1
        complaint = capsys.readouterr().err
        assert f"searching: process {os.getpid()}" in complaint
        assert "penstock stop --now" in complaint
        still = look()
        assert still is not None
        assert still["pid"] == before["pid"]
        assert cli.main(["stop", "--now"]) == 0
        assert gone(before["pid"], 0.0)
        assert "start another by themselves" in capsys.readouterr().out
        had += [batch.tolist() for batch in epoch]
        after = look()
        assert after is not None
        assert after["pid"] != before["pid"]
    with numbers("alone") as other:
        assert [batch.tolist() for batch in other] == had


def slowly(value: Any) -> Any:
    time.sleep(0.4)
    return value


def test_members_get_another_node_where_the_old_one_takes_its_time_to_end(place: Place) -> None:
    slow = ps.from_dataset(np.arange(16.0)).map(slowly, random=False, version="1").batch(8)
    had: list[float] = []
    with slow.loader(seed=3, share="slow", kind="threads") as loader:
        epoch = iter(loader)
        had += next(epoch).tolist()
        # It waits for the next batch all the while, and sees at once that the node is going.
        rest = threading.Thread(target=lambda: had.extend(next(epoch).tolist()))
        rest.start()
        assert cli.main(["stop", "--now"]) == 0
        rest.join()
    assert sorted(had) == list(range(16))


def test_watching_ends_with_ctrl_c_and_without_complaint(place: Place) -> None:
    with command("status", "--watch") as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "No node is running.\n"
        with numbers() as loader:
            assert len(list(loader)) == 8
            while not watching.stdout.readline().startswith("a: 1 member"):
                pass
        watching.send_signal(signal.SIGINT)
        _, complaints = watching.communicate(timeout=60)
    assert (watching.returncode, complaints) == (0, "")


def test_a_node_that_hangs_is_named(place: Place) -> None:
    place.make()
    # It listens and never says a word.
    with place.listen(), pytest.raises(WorkerError, match=f"process {os.getpid()}.* within 0.1 s"):
        look(place, patience=0.1)


def test_a_node_of_another_release_is_named(
    monkeypatch: pytest.MonkeyPatch, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(looking, "look", lambda place: {"release": "9.9", "pid": 77})
    assert cli.main(["status"]) == 1
    assert "(process 77) is one of Penstock 9.9" in capsys.readouterr().err
    assert cli.main(["status", "--json"]) == 0


def test_a_place_that_is_too_long_for_a_socket_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", "/tmp/" + "x" * 200)
    assert cli.main(["status"]) == 1
    assert "too long for a socket" in capsys.readouterr().err


# What they rest on.

BURN = """
import sys, time
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def test_the_cpu_time_of_living_workers_counts() -> None:
    before = cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        # The system counts in hundredths.
        assert cpu_seconds() - before >= 0.28
        child.communicate()


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_process_is_waited_for_until_it_is_gone(
    pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pidfd:

        def refuse(_: int) -> int:
            raise PermissionError

        monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not gone(process.pid, 0.1)
        process.kill()
        process.wait()
    assert gone(process.pid, 0.1)
