"""The benchmark ``faults``: verdicts, logs, tables, and real processes."""

from __future__ import annotations

import json
import mmap
import os
import signal
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import main, parse
from benchmarks.faults import faults
from benchmarks.faults.damage import DAMAGES
from benchmarks.faults.faults import FAULTS, FaultOutcome, make_result
from benchmarks.faults.member import Checkpoint, MemberPlan, count_batches, read_log
from benchmarks.faults.node_faults import malformed_packets
from benchmarks.faults.process_table import Footprint, nodes_of, processes_of, request_stacks
from benchmarks.faults.run import FaultRun, FaultRunError, HangError
from benchmarks.faults.verdict import BatchRecord, Verdict, Wait, judge, longest_wait
from benchmarks.faults.work import NumberedSamples, References, epochs, record_batch
from penstock.engine.pools.wire import ProtocolError, Wire
from penstock.node.protocol import VOCABULARY, EndNode, GetStatus

LENGTH, SIZE = 5, 3


def batch(epoch: int, number: int, at: float = 0.0) -> BatchRecord:
    indices = tuple(range(number * SIZE, (number + 1) * SIZE))
    return BatchRecord(at, epoch, indices, f"{epoch}-{number}")


REFERENCE = {epoch: [batch(epoch, number) for number in range(LENGTH)] for epoch in range(3)}
WHOLE = [one for epoch in REFERENCE.values() for one in epoch]
PLAN = MemberPlan(NumberedSamples(samples=96, batch=8), epochs=2, step=0.002)


# Verdicts.


def test_batches_of_an_unshared_loader_are_good() -> None:
    assert judge(WHOLE, REFERENCE, ended=True) == Verdict(3 * LENGTH * SIZE, 0, 0, 0)


@given(first=st.integers(0, LENGTH - 1))
def test_an_epoch_that_begins_in_the_middle_is_good(first: int) -> None:
    received = [*REFERENCE[0][first:], *REFERENCE[0][:first]]
    assert judge(received, {0: REFERENCE[0]}, ended=True).good


@given(first=st.integers(0, LENGTH - 1), received=st.integers(1, LENGTH))
def test_a_member_that_is_cut_off_has_lost_nothing_before(first: int, received: int) -> None:
    turned = [*REFERENCE[1][first:], *REFERENCE[1][:first]]
    assert judge([*REFERENCE[0], *turned[:received]], REFERENCE, ended=False).good


@given(missing=st.integers(0, 3 * LENGTH - 1))
def test_a_batch_that_never_came_is_lost(missing: int) -> None:
    received = [one for number, one in enumerate(WHOLE) if number != missing]
    assert judge(received, REFERENCE, ended=True).lost == SIZE


@given(missing=st.integers(1, LENGTH - 2))
def test_a_batch_left_out_before_a_member_was_cut_off_is_lost(missing: int) -> None:
    received = [one for number, one in enumerate(REFERENCE[0]) if number != missing]
    verdict = judge(received, REFERENCE, ended=False)
    assert (verdict.lost, verdict.repeated) == (SIZE, 0)


@given(again=st.integers(0, 3 * LENGTH - 1), place=st.integers(0, 3 * LENGTH))
def test_a_batch_that_came_twice_is_repeated(again: int, place: int) -> None:
    received = [*WHOLE[:place], WHOLE[again], *WHOLE[place:]]
    verdict = judge(received, REFERENCE, ended=True)
    assert (verdict.lost, verdict.repeated, verdict.different) == (0, SIZE, 1)


def test_an_epoch_that_was_left_out_is_lost() -> None:
    verdict = judge([*REFERENCE[0], *REFERENCE[2]], REFERENCE, ended=True)
    assert verdict.lost == LENGTH * SIZE


def test_epochs_that_never_came_are_lost() -> None:
    verdict = judge(REFERENCE[0], REFERENCE, ended=True)
    assert (verdict.lost, verdict.different) == (2 * LENGTH * SIZE, 0)
    assert judge([], REFERENCE, ended=True).lost == 3 * LENGTH * SIZE
    assert judge([], REFERENCE, ended=False).good


def test_an_epoch_too_many_is_repeated_and_different() -> None:
    verdict = judge(WHOLE, {0: REFERENCE[0]}, ended=True)
    assert (verdict.lost, verdict.different) == (0, 2 * LENGTH)


def test_the_right_samples_with_other_bytes_are_different() -> None:
    received = [WHOLE[0]._replace(digest="other"), *WHOLE[1:]]
    assert judge(received, REFERENCE, ended=True) == Verdict(3 * LENGTH * SIZE, 0, 0, 1)


def test_a_batch_of_another_epoch_is_different() -> None:
    received = [REFERENCE[1][0]._replace(epoch=0), *WHOLE[1:]]
    assert judge(received, REFERENCE, ended=True).different == 1


def test_the_longest_wait_after_an_event_is_found() -> None:
    times = (0.0, 1.0, 2.0, 9.0, 10.0, 14.0, 15.0)
    received = [batch(0, 0, at) for at in times]
    assert longest_wait(received, since=9.0) == Wait(usual=1.0, longest=4.0)
    # A wait that had begun before the event counts too.
    assert longest_wait(received, since=8.9) == Wait(usual=1.0, longest=7.0)
    assert longest_wait(received, since=20.0) is None


# Logs.


def test_a_log_is_read_up_to_where_its_member_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [json.dumps(batch(0, 0, 1.5)), json.dumps(batch(0, 1, 2.5))]
    path.write_text("\n".join([*lines, json.dumps(batch(0, 2))[:10]]))
    assert read_log(path) == (batch(0, 0, 1.5), batch(0, 1, 2.5))
    assert count_batches(path) == 2


def test_a_member_without_a_log_has_received_nothing(tmp_path: Path) -> None:
    assert read_log(tmp_path / "none") == ()
    assert count_batches(tmp_path / "none") == 0


def test_no_two_epochs_have_an_equal_batch() -> None:
    made = dict(epochs(NumberedSamples(samples=20, batch=8), 2))
    assert [len(made[epoch]) for epoch in made] == [3, 3]
    assert sorted(index for one in made[0] for index in one.indices) == list(range(20))
    assert len({one.digest for batches in made.values() for one in batches}) == 6


# Tables and errors.


def options(*more: str) -> Namespace:
    return parse(["faults", *more])[1]


def outcome(**verdict: int) -> FaultOutcome:
    return FaultOutcome(Verdict(samples=300, **verdict), 0.012, None, 256, 256)


def said(outcomes: Sequence[FaultOutcome], skipped: dict[str, str] | None = None) -> Any:
    kill = next(fault for fault in FAULTS if fault.name == "kill")
    return make_result([kill], {"kill": outcomes}, skipped or {}, PLAN, options("--rounds", "2"))


def test_a_run_without_losses_is_valid() -> None:
    verdict = said([outcome(), outcome()])
    assert verdict.wrong == ()
    (row,) = verdict.tables[0].rows
    assert row[1:] == ("600", "0", "0", "all", "0", "12\nat most 12", "", "256 of 256")


@pytest.mark.parametrize("what", ["lost", "repeated", "different"])
def test_one_loss_in_one_round_makes_the_result_invalid(what: str) -> None:
    (wrong,) = said([outcome(), outcome(**{what: 1})]).wrong
    assert "1 " in wrong


def test_a_defect_makes_the_result_invalid_and_keeps_the_counts() -> None:
    verdict = said([outcome(), replace(outcome(), hung=1, defects=("c hung", "2 left"))])
    assert verdict.wrong == ("faults: kill: c hung", "faults: kill: 2 left")
    (row,) = verdict.tables[0].rows
    assert row[1:6] == ("600", "0", "0", "all", "1")


def test_a_fault_that_this_machine_cannot_provoke_is_skipped_with_its_reason() -> None:
    verdict = said([], {"kill": "needs root"})
    assert verdict.wrong == ()
    (row,) = verdict.tables[0].rows
    assert row[0].endswith("skipped: needs root")
    assert verdict.data["faults"]["kill"]["skipped"] == "needs root"


def test_every_fault_has_a_name_of_its_own() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)


def test_an_unknown_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--only", "kill,flood")
    assert "there is no fault 'flood'" in capsys.readouterr().err


def test_too_few_batches_for_a_fault_are_refused() -> None:
    with pytest.raises(SystemExit, match="give at least 9 batches per epoch and 2 epochs"):
        main(["faults", "--items", "64", "--batch", "32"])


# Real processes.

SHORT = ["--rounds", "1", "--items", "96", "--batch", "8", "--epochs", "2", "--step", "0.002"]


def test_no_sample_is_lost_when_the_node_dies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "verdict.json"
    ended = main(["faults", *SHORT, "--only", "node", "--json", str(kept)])
    assert ended == 0, capsys.readouterr().out
    (seen,) = json.loads(kept.read_text())["data"]["faults"]["node"]["rounds"]
    assert seen["verdict"] == {"samples": 3 * 2 * 96, "lost": 0, "repeated": 0, "different": 0}
    assert seen["distinct"] == 24


def test_batches_of_both_processes_of_a_resumed_member_are_counted() -> None:
    resume = next(fault for fault in FAULTS if fault.name == "resume")
    verdict = faults.provoke_fault(resume, PLAN, References(), options())
    assert verdict.defects == ()
    assert verdict.verdict == Verdict(3 * 2 * 96, 0, 0, 0)
    assert verdict.it is not None


def test_a_failing_member_is_an_error_but_a_killed_one_is_not(tmp_path: Path) -> None:
    with FaultRun(tmp_path, PLAN, workers=1) as run:
        run.start("a", "b", resume=str(tmp_path / "no-such-checkpoint"))
        run.send("b", signal.SIGKILL)
        run.go("a")
        with pytest.raises(FaultRunError, match=r"(?s)^a ended with 1; .*FileNotFoundError"):
            run.end()
        assert (run.is_complete("a"), run.is_complete("b")) == (True, False)


def test_batches_after_the_checkpoint_of_a_resumed_member_are_not_counted(tmp_path: Path) -> None:
    run = FaultRun(tmp_path, PLAN, workers=1)
    lines = [json.dumps(batch(0, number)) for number in range(4)]
    run.files("c").log.write_text("\n".join([*lines, ""]))
    Checkpoint(2, {}).write(run.files("c").state)
    run.files("d").log.write_text("\n".join([*lines[2:], ""]))
    assert run.received("c", "d") == REFERENCE[0][:4]
    assert list(run.received("c")) == REFERENCE[0][:4]


# Jobs that meet a bad sample, and processes.


def test_the_reference_of_a_crashing_sample_leaves_it_out() -> None:
    work = NumberedSamples(20, 4, "processes", trouble="crash", bad=9, cost=5.0)
    skip = {"on_error": "skip", "shuffle": False, "timeout": 3.0}
    reference = References().of(work, 1, skip)
    assert [len(one.indices) for one in reference[0]] == [4, 4, 3, 4, 4]
    assert work.bad_samples == {9}


def test_a_cache_and_slow_samples_do_not_change_the_reference(tmp_path: Path) -> None:
    disk = NumberedSamples(20, 4, stages="disk", place=str(tmp_path))
    with disk.loader(workers=1) as loader:
        received = [record_batch(0.0, 0, batch) for batch in loader]
    assert {0: received} == References().of(disk, 1, {})


def test_a_job_whose_first_file_has_a_bad_name_runs_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    work = NumberedSamples(12, 4, stages="files", bad=0, place=str(tmp_path / "data"))
    work.write_files()
    with FaultRun(tmp_path, replace(PLAN, work=work, group=None), workers=1) as run:
        run.start_and_go("a", options={"on_error": "skip", "workers": 1})
        run.end()
        judgement = run.judge(References())
    assert judgement.defects == []
    assert judgement.verdict == Verdict(samples=2 * 11)
    assert [one.bad for one in run.outcomes("a")] == [(0,), (0,)]


def test_a_job_that_makes_no_progress_is_reported_with_its_stacks(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    work = NumberedSamples(8, 4, trouble="hang", bad=0, mark=str(mark))
    plan = replace(PLAN, work=work, group=None, options={"workers": 1, "shuffle": False})
    with FaultRun(tmp_path, plan, workers=1, hang_limit=60.0) as run:
        run.start_and_go("a")
        run.wait("a", mark.exists, "the sample was not reached")
        # This job hangs for certain, so the limit may be short from here on.
        run.hang_limit = 0.1
        with pytest.raises(HangError, match=r"(?s)a had not ended .*make_trouble"):
            run.end()


def test_processes_of_a_run_are_found_by_their_runtime_directory(tmp_path: Path) -> None:
    with FaultRun(tmp_path, PLAN, workers=1) as run:
        run.start("a")
        assert len(processes_of(run.runtime)) == 1
        run.send("a", signal.SIGKILL)
        run.wait_for_end("a")
        assert processes_of(run.runtime) == []


def test_a_node_writes_its_stacks_to_its_log(tmp_path: Path) -> None:
    with FaultRun(tmp_path, replace(PLAN, leave_at=1), workers=1) as run:
        run.start_and_go("a")
        run.wait_for_batches("a", 1)
        node = nodes_of(run.runtime)
        assert node == [run.node()["pid"]]
        request_stacks(node)
        log = run.runtime / "node.log"
        run.wait("a", lambda: "most recent call first" in log.read_text(), "no stacks in the log")


def test_the_footprint_of_a_process_counts_each_memfd_once() -> None:
    before = Footprint.of(os.getpid())
    fd = os.memfd_create("footprint")
    try:
        os.write(fd, bytes(1 << 20))
        with mmap.mmap(fd, 1 << 20):
            after = Footprint.of(os.getpid())
    finally:
        os.close(fd)
    assert before is not None
    assert after is not None
    assert after.memfd - before.memfd == 1 << 20
    assert after.resident > 0


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_changes_the_files_of_a_store(name: str, tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(bytes(1 << 16))
    (tmp_path / "state.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    DAMAGES[name](tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} != before


def test_no_malformed_packet_is_a_message() -> None:
    for packet in malformed_packets():
        ours, theirs = Wire.pair()
        with ours, theirs:
            ours.send(packet)
            try:
                received = Wire(theirs, VOCABULARY).receive()
            except ProtocolError:
                continue
            # Well-formed, but not what a stranger may say.
            assert received is not None
            assert not isinstance(received[0], GetStatus | EndNode)
