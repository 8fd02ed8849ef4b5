"""The contract of the transport between machines, for both of its bodies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.cluster.protocol import (
    LARGEST_VALUE,
    Acknowledged,
    BatchHead,
    GetMachineStatus,
    HeartbeatSent,
    MachineStatus,
    Offered,
    RemoteTask,
    Spilled,
    WantedBatch,
    WantedValues,
)
from penstock.cluster.transport import (
    KeyAnswer,
    Limits,
    Link,
    PeerFault,
    PeerLost,
    PeerNonsense,
    PeerRefused,
    PeerSlow,
    RemoteRows,
)
from tests.cluster.conftest import TIMEOUT, Body, OverFlight
from tests.support.fabric import Fabric
from tests.support.keeper import ME, REPLY, Keeper, Values, hello


class Wrong(Keeper):
    """A handler whose answers break the contract."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__()
        self._answers = answers

    def get(self, peer: str, wanted: WantedValues) -> Iterator[list[KeyAnswer]]:
        yield self._answers

    def run(self, peer: str, task: RemoteTask) -> Iterator[RemoteRows]:
        yield from self._answers

    def control(self, peer: str, message: Any) -> Any:
        raise KeyError("a bug")

    def put(self, peer: str, offered: Offered, values: Iterator[memoryview]) -> list[bool]:
        return [True]


def linked(body: Body, handler: Any) -> Link:
    return body.connect(body.serve(handler, hello("server")), hello("client"))


def wanted(*indices: int, **other: Any) -> WantedValues:
    return WantedValues.of("ab" * 16, np.array(indices, np.int64), **other)


def task(*indices: int, most_bytes: int = 1 << 20) -> RemoteTask:
    packed = np.array(indices, "<i8").tobytes()
    return RemoteTask("recipe", 3, packed, None, most_bytes, [], b"")


def held(**values: bytes) -> Values:
    return {("ab" * 16, int(name[1:]), 0): value for name, value in values.items()}


def gotten(link: Link, request: WantedValues) -> dict[int, tuple[str, Any, str]]:
    found: dict[int, tuple[str, Any, str]] = {}
    for place, state, value, moved_to in link.get(request, timeout=TIMEOUT):
        found[place] = (state, None if value is None else bytes(value), moved_to)
    return found


def test_a_link_knows_the_machine_at_its_other_end(body: Body) -> None:
    address = body.serve(Keeper(), hello("server", 41))
    link = body.connect(address, hello("client"))
    assert (link.machine, link.incarnation) == ("server", 41)


def test_control_messages_are_answered_and_carry_the_name_of_the_sender(body: Body) -> None:
    keeper = Keeper()
    link = linked(body, keeper)
    heartbeat = HeartbeatSent(ME, [-1, 0, 0], "", 0, [1 << 35, 2.5], [["c", 9]], False)
    spilled = Spilled("ab", np.array([4], "<i8").tobytes(), None, [""])
    assert link.control(heartbeat, timeout=TIMEOUT) == REPLY
    assert link.control(spilled, timeout=TIMEOUT) == Acknowledged()
    status = {"values": 0, "names": ["x", "ü"]}
    assert link.control(GetMachineStatus(), timeout=TIMEOUT) == MachineStatus(status)
    assert keeper.seen == [
        ("client", heartbeat),
        ("client", spilled),
        ("client", GetMachineStatus()),
    ]


def test_values_absences_and_redirects_come_back_with_their_places(body: Body) -> None:
    keeper = Keeper(held(_4=b"four" * 40_000, _9=b"", _5=b"short"))
    keeper.moved[6] = "another"
    link = linked(body, keeper)
    assert gotten(link, wanted(9, 6, 4, 7, 5)) == {
        0: ("present", b"", ""),
        1: ("moved", None, "another"),
        2: ("present", b"four" * 40_000, ""),
        3: ("absent", None, ""),
        4: ("present", b"short", ""),
    }


def test_a_value_is_known_by_its_generation_and_fingerprint_too(body: Body) -> None:
    keeper = Keeper({("ab" * 16, 1, 3): b"third", ("cd" * 16, 1, 0): b"other"})
    link = linked(body, keeper)
    assert gotten(link, wanted(1))[0][0] == "absent"
    generations = np.array([3], np.int64)
    assert gotten(link, wanted(1, generations=generations))[0][1] == b"third"


@pytest.mark.parametrize("sizes", [[0, 1, 11, 12, 13, 14], [1 << 20] * 9 + [5], [9 << 20, 1]])
def test_values_of_all_sizes_arrive_unchanged(body: Body, sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    keeper = Keeper({("ab" * 16, i, 0): value for i, value in enumerate(values)})
    found = gotten(linked(body, keeper), wanted(*range(len(sizes))))
    assert [found[i][1] for i in range(len(sizes))] == [value.tobytes() for value in values]


def test_thousands_of_small_values_arrive_in_one_request(body: Body) -> None:
    keeper = Keeper({("ab" * 16, i, 0): b"%d" % i for i in range(10_000)})
    found = gotten(linked(body, keeper), wanted(*range(10_000)))
    assert found == {i: ("present", b"%d" % i, "") for i in range(10_000)}


def test_answers_keep_within_the_bytes_that_were_asked_for(body: Body) -> None:
    keeper = Keeper(held(_0=b"a" * 600, _1=b"b" * 600, _2=b"c" * 400))
    found = gotten(linked(body, keeper), wanted(0, 1, 2, most_bytes=1000))
    assert [found[i][0] for i in range(3)] == ["present", "later", "present"]


def test_a_single_value_may_be_larger_than_what_was_asked_for(body: Body) -> None:
    keeper = Keeper(held(_0=b"a" * 600, _1=b"b" * 600))
    found = gotten(linked(body, keeper), wanted(0, 1, most_bytes=100))
    assert [found[i][0] for i in range(2)] == ["present", "later"]


class Later(Keeper):
    """A handler that has one value at once, and the other when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Event()

    def get(self, peer: str, wanted: WantedValues) -> Iterator[list[KeyAnswer]]:
        yield [KeyAnswer(1, "present", b"here")]
        self.arrived.wait()
        yield [KeyAnswer(0, "present", b"later")]


def test_answers_that_are_ready_do_not_wait_for_the_others(body: Body) -> None:
    later = Later()
    answers = linked(body, later).get(wanted(1, 2), timeout=TIMEOUT)
    assert bytes(next(answers).value) == b"here"
    later.arrived.set()
    assert [(answer.place, bytes(answer.value)) for answer in answers] == [(0, b"later")]


def test_a_value_that_is_too_large_for_a_message_counts_as_absent(body: Body) -> None:
    keeper = Keeper({("ab" * 16, 0, 0): memoryview(bytes(LARGEST_VALUE + 1))})
    assert gotten(linked(body, keeper), wanted(0))[0][0] == "absent"


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [KeyAnswer(0, "absent"), KeyAnswer(0, "absent"), KeyAnswer(1, "absent")],
        [KeyAnswer(0, "absent"), KeyAnswer(7, "absent"), KeyAnswer(1, "absent")],
        [KeyAnswer(0, "absent")],
        [KeyAnswer(0, "moved", None, "x" * 300), KeyAnswer(1, "absent")],
    ],
    ids=["none", "twice", "not-asked", "missing", "long-name"],
)
def test_wrong_answers_are_nonsense(
    body: Body, answers: list[KeyAnswer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "penstock.cluster")
    link = linked(body, Wrong(answers))
    with pytest.raises(PeerNonsense):
        gotten(link, wanted(3, 4))


def test_an_error_in_the_handler_is_told_without_its_text_and_the_node_goes_on(
    body: Body, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "penstock.cluster")
    link = linked(body, Wrong([KeyAnswer(0, "absent")]))
    with pytest.raises(PeerNonsense, match="KeyError") as found:
        link.control(GetMachineStatus(), timeout=TIMEOUT)
    assert "a bug" not in str(found.value)
    assert gotten(link, wanted(3)) == {0: ("absent", None, "")}


def test_offered_values_are_kept_or_not(body: Body) -> None:
    keeper = Keeper()
    link = linked(body, keeper)
    values = [b"zero" * 30_000, b"one", b"", b"three", b"four" * 2_000_000]
    offered = Offered.of(
        "cd" * 16, np.arange(5, dtype=np.int64), None, [len(value) for value in values]
    )
    assert link.put(offered, values, timeout=TIMEOUT) == [True, False, True, False, True]
    assert keeper.values == {("cd" * 16, i, 0): values[i] for i in (0, 2, 4)}


def test_a_handler_need_not_read_what_is_offered(body: Body) -> None:
    link = linked(body, Wrong([]))
    offered = Offered.of("cd" * 16, np.array([1], np.int64), None, [30 << 20])
    assert link.put(offered, [bytes(30 << 20)], timeout=TIMEOUT) == [True]


def test_offers_of_other_sizes_than_announced_are_refused(body: Body) -> None:
    link = linked(body, Keeper())
    indices = np.array([0, 2], np.int64)
    for sizes, values in [([5, 5], [b"12345"] * 3), ([5, 5], [b"12345"]), ([5, 4], [b"12345"] * 2)]:
        with pytest.raises(PeerFault):
            link.put(Offered.of("cd" * 16, indices, None, sizes), values, timeout=TIMEOUT)
    sent = Offered.of("cd" * 16, indices, None, [5, 5])
    assert link.put(sent, [b"12345"] * 2, timeout=TIMEOUT) == [True, True]


def test_a_wrong_number_of_flags_is_nonsense(body: Body) -> None:
    offered = Offered.of("cd" * 16, np.array([0, 2], np.int64), None, [5, 5])
    with pytest.raises(PeerNonsense):
        linked(body, Wrong([])).put(offered, [b"12345"] * 2, timeout=TIMEOUT)


def test_rows_of_a_remote_task_come_back_as_buffers_with_a_report(body: Body) -> None:
    parts = list(linked(body, Keeper()).run(task(5, 6, 7), timeout=TIMEOUT))
    assert [(part.first, part.rows) for part in parts] == [(0, 2), (2, 1)]
    assert parts[0].report == {"seconds": 0.5, "bad": []}
    first = np.frombuffer(parts[0].leaves[0], np.int64)
    assert first.tolist() == [5] * 1000 + [6] * 1000
    assert np.frombuffer(parts[1].leaves[1], np.float32).tolist() == [21.0]


def batch(number: int, *indices: int, most_bytes: int = 1 << 30) -> WantedBatch:
    keys = np.array(indices, "<i8").tobytes()
    return WantedBatch(
        "g", "0/1 x 2", 0, number, "d", keys, None, None, most_bytes, 1.0, 0, [0] * 4
    )


@pytest.mark.parametrize("number", [1, 5000], ids=["small", "many-pieces"])
def test_a_batch_comes_back_as_its_head_and_its_bytes_in_order(body: Body, number: int) -> None:
    head, pieces = linked(body, Keeper()).batch(batch(number, 5, 6), timeout=TIMEOUT)
    received = b"".join(pieces)
    assert head == BatchHead("present", 2, len(received), b"layout", None, [[3, "n", "s", "e"]])
    size = 1000 * number
    assert received == b"\5" * size + b"\6" * size + np.array([5, 6], "<i8").tobytes()


def test_a_batch_that_is_not_there_is_a_head_without_bytes(body: Body) -> None:
    head, pieces = linked(body, Keeper()).batch(batch(0, 5), timeout=TIMEOUT)
    assert (head, list(pieces)) == (BatchHead.without("later"), [])


def test_a_batch_of_more_bytes_than_asked_for_is_not_sent(body: Body) -> None:
    head, pieces = linked(body, Keeper()).batch(batch(1, 5, most_bytes=1000), timeout=TIMEOUT)
    assert (head, list(pieces)) == (BatchHead.without("unsendable"), [])


class WrongBatch(Keeper):
    """A handler whose batch has other bytes than its head says."""

    def batch(self, peer: str, wanted: WantedBatch) -> tuple[BatchHead, list[Any]]:
        return BatchHead("present", 1, 10, None, None, []), [bytes(wanted.number)]


@pytest.mark.parametrize("size", [9, 11])
def test_a_batch_of_another_size_than_its_head_says_is_nonsense(
    body: Body, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "penstock.cluster")
    with pytest.raises(PeerNonsense):
        linked(body, WrongBatch()).batch(batch(size, 5), timeout=TIMEOUT)


@pytest.mark.parametrize(
    "parts",
    [
        [RemoteRows(0, 1, [b"x"], {})],
        [RemoteRows(0, 2, [b"x"], {}), RemoteRows(1, 1, [b"x"], {})],
        [RemoteRows(0, 2, [bytes(2000)], {})],
        [RemoteRows(0, 0, [], {})],
    ],
    ids=["missing", "twice", "too-many-bytes", "empty"],
)
def test_wrong_rows_are_nonsense(
    body: Body, parts: list[RemoteRows], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "penstock.cluster")
    with pytest.raises(PeerNonsense):
        list(linked(body, Wrong(parts)).run(task(1, 2, most_bytes=1000), timeout=TIMEOUT))


def test_a_machine_that_does_not_answer_in_time_is_slow(body: Body) -> None:
    address = body.serve(Keeper(held(_1=b"x")), hello("server"))
    link = body.connect(address, hello("client"))
    body.stall(address)
    offered = Offered.of("cd" * 16, np.array([0], np.int64), None, [1])
    for call in (
        lambda: link.control(GetMachineStatus(), timeout=0.2),
        lambda: list(link.get(wanted(1), timeout=0.2)),
        lambda: list(link.run(task(1), timeout=0.2)),
        lambda: link.put(offered, [b"x"], timeout=0.2),
    ):
        with pytest.raises(PeerSlow):
            call()


def test_no_time_left_is_slow_without_a_call(body: Body) -> None:
    keeper = Keeper()
    link = linked(body, keeper)
    with pytest.raises(PeerSlow):
        link.control(GetMachineStatus(), timeout=0.0)
    assert keeper.seen == []


def test_a_machine_that_has_ended_is_lost(body: Body) -> None:
    address = body.serve(Keeper(), hello("server"))
    link = body.connect(address, hello("client"))
    body.stop(address)
    with pytest.raises(PeerLost):
        link.control(GetMachineStatus(), timeout=TIMEOUT)
    with pytest.raises(PeerLost):
        body.connect(address, hello("client"))


def test_a_closed_link_is_lost(body: Body) -> None:
    link = linked(body, Keeper(held(_1=b"x")))
    link.close()
    with pytest.raises(PeerLost):
        link.control(GetMachineStatus(), timeout=TIMEOUT)
    with pytest.raises(PeerLost):
        list(link.get(wanted(1), timeout=TIMEOUT))
    link.close()


def test_an_iterator_that_is_closed_early_ends_the_call(body: Body) -> None:
    link = linked(body, Keeper({("ab" * 16, i, 0): bytes(1 << 20) for i in range(64)}))
    answers = link.get(wanted(*range(64)), timeout=TIMEOUT)
    assert next(answers).state == "present"
    answers.close()  # type: ignore[attr-defined]
    assert gotten(link, wanted(99))[0][0] == "absent"


def test_received_values_outlive_the_call_and_the_link(body: Body) -> None:
    link = linked(body, Keeper(held(_1=b"x" * 100_000)))
    (answer,) = link.get(wanted(1), timeout=TIMEOUT)
    link.close()
    assert bytes(answer.value) == b"x" * 100_000


@pytest.mark.parametrize(
    "other",
    [{"version": 99}, {"release": "0.0.1 on Python 3.9"}],
    ids=["protocol", "release"],
)
def test_a_machine_of_another_version_is_refused_with_the_remedy(
    body: Body, other: dict[str, Any]
) -> None:
    address = body.serve(Keeper(), hello("server"))
    with pytest.raises(PeerRefused, match=r"99|0\.0\.1") as found:
        body.connect(address, hello("client", **other))
    assert "nstall the same" in str(found.value)


def test_a_wrong_token_is_refused_with_the_remedy(body: Body) -> None:
    address = body.serve(Keeper(), hello("server"))
    with pytest.raises(PeerRefused, match="opy the secrets") as found:
        body.connect(address, hello("client"), token=b"wrong" * 8)
    assert b"wrong".hex() not in str(found.value)


def test_a_restarted_machine_has_a_new_incarnation(body: Body) -> None:
    first = body.serve(Keeper(), hello("server", 1))
    assert body.connect(first, hello("client")).incarnation == 1
    body.stop(first)
    second = body.serve(Keeper(), hello("server", 2))
    assert body.connect(second, hello("client")).incarnation == 2


def test_several_threads_use_one_link(body: Body) -> None:
    link = linked(body, Keeper({("ab" * 16, i, 0): b"%d" % i * 1000 for i in range(200)}))
    found: dict[int, Any] = {}

    def ask(start: int) -> None:
        for i in range(start, 200, 4):
            found[i] = gotten(link, wanted(i))[0][1]

    threads = [threading.Thread(target=ask, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: b"%d" % i * 1000 for i in range(200)}


# ---------------------------------------------------------------- what only one of them has


class Waiting(Keeper):
    """A handler whose ``get`` waits until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.released = threading.Event()
        self.ended = threading.Semaphore(0)

    def get(self, peer: str, wanted: WantedValues) -> Iterator[list[KeyAnswer]]:
        try:
            self.entered.release()
            self.released.wait()
            yield from super().get(peer, wanted)
        finally:
            self.ended.release()


def test_calls_over_the_limit_of_a_machine_are_refused_as_busy(over_flight: OverFlight) -> None:
    waiting = Waiting()
    address = over_flight.serve(waiting, hello("server"), Limits(calls=3, calls_per_machine=2))
    one, two = (over_flight.connect(address, hello(name)) for name in ("one", "two"))
    first, second = (one.get(wanted(1), timeout=TIMEOUT) for _ in range(2))
    for _ in range(2):
        waiting.entered.acquire()
    with pytest.raises(PeerSlow, match="2 calls"):
        one.control(GetMachineStatus(), timeout=TIMEOUT)
    third = two.get(wanted(1), timeout=TIMEOUT)
    waiting.entered.acquire()
    with pytest.raises(PeerSlow, match="3 calls"):
        two.control(GetMachineStatus(), timeout=TIMEOUT)
    waiting.released.set()
    assert [len(list(answers)) for answers in (first, second, third)] == [1, 1, 1]


def test_a_call_that_ended_badly_no_longer_counts(over_flight: OverFlight) -> None:
    waiting = Waiting()
    address = over_flight.serve(waiting, hello("server"), Limits(calls=1, calls_per_machine=1))
    link = over_flight.connect(address, hello("client"))
    with pytest.raises(PeerSlow, match="in time"):
        list(link.get(wanted(1), timeout=0.2))
    waiting.released.set()
    waiting.ended.acquire()
    waiting.entered.acquire()
    while True:  # the count goes down after the handler has ended
        try:
            assert link.control(GetMachineStatus(), timeout=TIMEOUT)
            break
        except PeerSlow as busy:
            assert "1 calls" in str(busy)  # noqa: PT017


def test_closing_a_link_ends_the_calls_under_way(over_flight: OverFlight) -> None:
    waiting = Waiting()
    link = over_flight.connect(over_flight.serve(waiting, hello("server")), hello("client"))
    answers = link.get(wanted(1), timeout=TIMEOUT)
    waiting.entered.acquire()
    link.close()
    with pytest.raises(PeerLost, match="closed"):
        list(answers)
    waiting.released.set()


def test_the_in_process_body_takes_virtual_time() -> None:
    fabric = Fabric()
    address = fabric.serve(Keeper(held(_0=b"a", _1=b"b", _2=b"c")), hello("server"))
    link = fabric.connect(address, hello("client"), timeout=1.0)
    path = fabric.path("client", "server")
    path.delay, path.per_answer = 2.0, 0.5
    began = fabric.clock.now
    assert len(list(link.get(wanted(0, 1, 2), timeout=10.0))) == 3
    assert fabric.clock.now == began + 3.5
    answers = link.get(wanted(0, 1, 2), timeout=2.7)
    assert next(answers).place == 0
    with pytest.raises(PeerSlow):
        next(answers)
    assert fabric.clock.now == pytest.approx(began + 3.5 + 2.7)
    path.loses = 1
    with pytest.raises(PeerLost):
        link.control(GetMachineStatus(), timeout=9.0)
    assert link.control(GetMachineStatus(), timeout=9.0)
    path.state = "reset"
    with pytest.raises(PeerLost):
        link.control(GetMachineStatus(), timeout=9.0)
