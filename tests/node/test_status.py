"""The status of a node as text and data, and the commands that show it and end the node."""

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
from penstock.node import client
from penstock.node.client import request_status, wait_for_exit
from penstock.node.directory import NodeDirectory
from penstock.node.state import BatchName, GroupState
from penstock.node.status import (
    behind,
    cpu_seconds,
    lines_of,
    part_text,
    position,
    saved,
    span_facts,
)

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
        "stalls": 0,
        "trouble": None,
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
        "stays": False,
        "place": "/run/user/1000/penstock",
        "log": "/run/user/1000/penstock/node.log",
        "up": 725.0,
        "cpu": 312.25,
        "cores": 2,
        "workers": 2,
        "staging": 3_000_000_000,
        "lingering": 0,
        "descriptors": {"open": 40, "limit": 1 << 20},
        "groups": list(groups),
        **more,
    }


# As text.


def spanned(**more: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("prepared", "received", "sent", "hedged", "again", "late", "local"), 0)
    return {
        "machines": ["a", "b"],
        "separate": [],
        "sendable": True,
        **counts,
        "preparing_seconds": 0.05,
        "links": {},
        **more,
    }


def test_a_group_on_several_machines_says_who_prepares_and_what_was_measured() -> None:
    link = {"trouble": "link", "rate": 12.5e6, "seconds": 3.04}
    span = spanned(prepared=60, received=58, sent=59, again=2, hedged=1, links={"b": link})
    assert span_facts(span) == [
        (
            "batches",
            "with 1 other machine: prepared here 60, received 58, sent 59; 2 prepared here "
            "although another machine was asked; 1 of them because it was late",
        ),
        (
            "link",
            "b: receiving takes longer than preparing: its batches are prepared here (a batch "
            "takes 3,040.0 ms to receive, 50.0 ms to prepare)",
        ),
    ]
    shown = lines_of(snapshot(group(span=span)), NOW)
    assert any("with 1 other machine: prepared here 60" in line for line in shown)


def test_a_group_of_the_same_name_with_another_pipeline_is_named() -> None:
    assert span_facts(spanned(machines=["a"], separate=["c"])) == [
        ("separate", "c: the group there has this name, and another pipeline")
    ]
    assert span_facts(spanned(machines=["a"])) == span_facts(None) == []


def test_the_status_of_a_node_with_one_group() -> None:
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


def test_what_is_wrong_is_shown() -> None:
    troubled = group(stalls=2, trouble="no batch was prepared; the node woke the workers")
    few = snapshot(troubled, lingering=5_000_000, descriptors={"open": 60, "limit": 256})
    lines = lines_of(few, NOW)
    assert "staged  6 batches, 57.8 MB of 3.0 GB; 5.0 MB in use by jobs that have left" in lines
    assert (
        "files   60 of 256 open, so fewer batches are staged: raise the hard limit (ulimit -Hn)"
        in lines
    )
    assert lines[-1] == (
        "  trouble  2 times, the last: no batch was prepared; the node woke the workers"
    )


def test_a_node_without_groups_will_end_unless_a_command_keeps_it_in_a_cluster() -> None:
    assert "ends by itself" in lines_of(snapshot(), NOW)[-1]
    assert "until `penstock cluster leave`" in lines_of(snapshot(stays=True), NOW)[-1]


def test_rates_since_the_earlier_status_are_shown() -> None:
    before = snapshot(group(given=440), up=723.0, cpu=309.25)
    shown = lines_of(snapshot(group()), NOW, before)
    assert "CPU     312.2 s, on average 0.43 of 2 cores, now 1.50" in shown
    assert any(line.endswith("preparations saved; 20.0 batches/s") for line in shown)


@pytest.mark.parametrize("before", [{"pid": 1}, {"up": 725.0}])
def test_no_rates_without_an_earlier_status_of_the_same_node(
    before: dict[str, Any],
) -> None:
    earlier = {**snapshot(group(given=440), up=723.0, cpu=309.25), **before}
    assert lines_of(snapshot(group()), NOW, earlier) == lines_of(snapshot(group()), NOW)


def test_a_new_group_has_no_rate() -> None:
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
def test_a_group_that_does_not_run_shows_the_reason(more: dict[str, Any], words: str) -> None:
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


def test_ranks_are_named_and_an_unknown_part_is_shown_unchanged() -> None:
    assert part_text("0/1 x 64") == "all, by 64"
    assert part_text("3/8 x 16") == "rank 3 of 8, by 16"
    assert part_text("something else") == "something else"


def test_nothing_is_saved_if_no_batch_was_given_twice() -> None:
    assert saved(0, 0) == "prepared 0, given 0: nothing yet"
    assert saved(10, 10) == "prepared 10, given 10: nothing yet"
    assert saved(1_000, 3_920) == "prepared 1,000, given 3,920: 2.9 of 3.9 preparations saved"


def test_members_are_compared_by_their_part_of_an_epoch() -> None:
    half_through = member(1, 50, batches=100, epoch=1)
    same_position = member(2, 100, batches=200, epoch=1)
    one_epoch_later = member(3, 50, batches=100, epoch=2)
    unknown = member(4, 7, batches=None)
    late = behind([half_through, same_position, one_epoch_later, unknown])
    assert late == [100, 200, 0, None]
    assert behind([unknown]) == [None]
    assert "?" in lines_of(snapshot(group(members=[unknown])), NOW)[-4]


def test_the_position_of_a_member_is_that_of_its_loop_not_of_its_requests() -> None:
    state = GroupState(budget=1 << 30)
    state.join(1, "0/1 x 8", "detach", 0.0)
    names = [BatchName("0/1 x 8", number // 6, number % 6, "") for number in range(12)]
    positions = []
    for number, name in enumerate(names[:10]):
        if number % 6 == 0:
            state.begin(1, number // 6, 6, 0, 0, 0.0)
        state.want(1, name, 0.0)
        if number >= 3:  # it asks for three batches more than it has taken
            taken = names[number - 3]
            state.choose(0.0)
            state.prepared(taken, 1, 0.0)
            state.took(1, taken, 0.0)
            positions.append(tuple(position(state.members[1]).values()))
    assert positions == [
        (0, 1, 6),
        (0, 2, 6),
        (0, 3, 6),
        (0, 4, 6),
        (0, 5, 6),
        (1, 0, 6),
        (1, 1, 6),
    ]
    state.begin(1, 2, None, 0, 0, 0.0)
    assert position(state.members[1]) == {"epoch": 1, "batch": None, "batches": None}


def test_an_unknown_position_is_a_question_mark() -> None:
    unknown = member(4, None, batches=None)
    row = next(
        line for line in lines_of(snapshot(group(members=[unknown])), NOW) if "by 64" in line
    )
    assert row.split()[5:8] == ["?", "3", "?"]


@given(st.lists(st.integers(0, 782), min_size=1))
def test_members_are_behind_by_their_distance_to_the_foremost(batches: list[int]) -> None:
    late = behind([member(1, batch) for batch in batches])
    assert late == [max(batches) - batch for batch in batches]


# The commands, with a node.


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


def test_commands_without_a_node(
    node_directory: NodeDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status"]) == 0
    assert capsys.readouterr().out == "No node is running.\n"
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) is None
    assert cli.main(["stop"]) == 0
    assert capsys.readouterr().out == "No node is running.\n"


def test_members_are_shown_with_their_positions(
    node_directory: NodeDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with numbers() as fast, numbers() as slow:
        ahead, after = iter(fast), iter(slow)
        for _ in range(5):
            next(ahead)
        for _ in range(2):
            next(after)
        wait_for(lambda: [member["batch"] for member in _groups()[0]["members"]] == [4, 1])
        assert cli.main(["status"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert cli.main(["status", "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
    (node,) = (line for line in lines if line.startswith("node"))
    assert f"process {status['pid']}, up " in node
    assert f"log     {node_directory.log}" in lines
    table = [line.split() for line in lines if "all, by 8" in line]
    assert [row[0] for row in table] == [str(os.getpid())] * 2
    assert [row[5:8] for row in table] == [["4", "of", "8"], ["1", "of", "8"]]
    assert [row[9] for row in table] == ["0", "3"]
    (found,) = status["groups"]
    assert (found["name"], found["ready"], found["broken"]) == ("a", True, None)
    (cache,) = found["caches"]
    assert (cache["hits"], cache["samples"]) == (0, cache["misses"])
    assert found["prepared"] <= 8
    assert status["cpu"] > 0


def _groups() -> list[dict[str, Any]]:
    status = request_status()
    assert status is not None
    return list(status["groups"])


def wait_for(reached: Any, seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_after_a_node_was_stopped_status_names_its_log(
    node_directory: NodeDirectory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "60")
    with numbers() as loader:
        assert len(list(loader)) == 8
    wait_for(lambda: _groups() == [])
    assert cli.main(["stop"]) == 0
    # Its lock is free and its socket removed, so another node can start.
    assert not node_directory.socket.exists()
    claim = node_directory.claim()
    assert claim is not None
    os.close(claim)
    assert "has ended" in capsys.readouterr().out
    assert cli.main(["status"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"No node is running. The log of the last one is {node_directory.log}.\n"


def test_a_node_with_members_is_stopped_only_with_now(
    node_directory: NodeDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with numbers("searching") as loader:
        epoch = iter(loader)
        batches = [next(epoch).tolist() for _ in range(3)]
        before = request_status()
        assert before is not None
        assert cli.main(["stop"]) == 1
        error = capsys.readouterr().err
        assert f"searching: process {os.getpid()}" in error
        assert "penstock stop --now" in error
        still = request_status()
        assert still is not None
        assert still["pid"] == before["pid"]
        assert cli.main(["stop", "--now"]) == 0
        assert wait_for_exit(before["pid"], 0.0)
        assert "start another node by themselves" in capsys.readouterr().out
        batches += [batch.tolist() for batch in epoch]
        after = request_status()
        assert after is not None
        assert after["pid"] != before["pid"]
    with numbers("alone") as other:
        assert [batch.tolist() for batch in other] == batches


def slowly(value: Any) -> Any:
    time.sleep(0.4)
    return value


def test_members_get_another_node_even_if_the_old_one_ends_slowly(
    node_directory: NodeDirectory,
) -> None:
    slow = ps.from_dataset(np.arange(16.0)).map(slowly, random=False, version="1").batch(8)
    samples: list[float] = []
    with slow.loader(seed=3, share="slow", kind="threads") as loader:
        epoch = iter(loader)
        samples += next(epoch).tolist()
        # It waits for the next batch, so it notices at once that the node is ending.
        rest = threading.Thread(target=lambda: samples.extend(next(epoch).tolist()))
        rest.start()
        assert cli.main(["stop", "--now"]) == 0
        rest.join()
    assert sorted(samples) == list(range(16))


def test_watching_ends_with_ctrl_c_and_without_an_error(node_directory: NodeDirectory) -> None:
    with command("status", "--watch") as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "No node is running.\n"
        with numbers() as loader:
            assert len(list(loader)) == 8
            while not watching.stdout.readline().startswith("a: 1 member"):
                pass
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=60)
    assert (watching.returncode, errors) == (0, "")


def test_the_error_for_a_node_that_hangs_names_its_process(node_directory: NodeDirectory) -> None:
    node_directory.create()
    # This process listens like a node and never answers.
    with (
        node_directory.listen(),
        pytest.raises(WorkerError, match=f"process {os.getpid()}.* within 0.1 s"),
    ):
        request_status(node_directory, timeout=0.1)


def test_the_status_of_a_node_of_another_release_is_shown_as_json_only(
    monkeypatch: pytest.MonkeyPatch,
    node_directory: NodeDirectory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(client, "request_status", lambda directory: {"release": "9.9", "pid": 77})
    assert cli.main(["status"]) == 1
    assert "(process 77) runs Penstock 9.9" in capsys.readouterr().err
    assert cli.main(["status", "--json"]) == 0


def test_a_directory_too_long_for_a_socket_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", "/tmp/" + "x" * 200)
    assert cli.main(["status"]) == 1
    assert "too long for a socket" in capsys.readouterr().err


# Helpers: CPU time, and waiting for a process.

BURN = """
import sys, time
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def test_the_cpu_time_of_live_children_counts() -> None:
    before = cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        # The system counts in hundredths of a second.
        assert cpu_seconds() - before >= 0.28
        child.communicate()


@pytest.mark.parametrize("pidfd", [True, False])
def test_waiting_for_a_process_to_end(pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pidfd:

        def refuse(_: int) -> int:
            raise PermissionError

        monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not wait_for_exit(process.pid, 0.1)
        process.kill()
        process.wait()
    assert wait_for_exit(process.pid, 0.1)
