"""The machines of a cluster as rows: rates between two looks, who is slow, and text."""

from __future__ import annotations

import pytest

from penstock.watch.machines import ClusterRows, lines_of, rows_of
from tests.support.clusters import CONTENT, cluster, machine, times


def slow(rows: ClusterRows) -> list[str]:
    return [row.name for row in rows.machines if row.slow]


def test_rates_are_differences_between_two_looks() -> None:
    before = cluster(machine("b", sent=1_000, received=5_000))
    after = cluster(machine("b", sent=3_000, received=5_500))
    row = rows_of(after, before, seconds=2.0).machines[1]
    assert (row.sent_per_second, row.received_per_second) == (1_000.0, 250.0)
    assert (row.sent, row.received) == (3_000, 5_500)
    first = rows_of(after).machines[1]
    assert (first.sent_per_second, first.received_per_second) == (0.0, 0.0)


def test_counters_of_a_restarted_node_give_no_negative_rate() -> None:
    before = cluster(machine("b", sent=9_000, times=times(ms5=90)))
    after = cluster(machine("b", sent=1_000, times=times(ms2=1)))
    row = rows_of(after, before, seconds=1.0).machines[1]
    assert row.sent_per_second == 0.0
    assert row.typical == 0.0015


def test_answer_times_are_those_since_the_earlier_look() -> None:
    before = cluster(machine("b", times=times(ms1=1_000)))
    after = cluster(machine("b", times=times(ms1=1_000, ms100=4)))
    row = rows_of(after, before, seconds=1.0).machines[1]
    assert row.typical == pytest.approx(0.075)
    # Without a request since then, those since the start are shown.
    assert rows_of(before, before, seconds=1.0).machines[1].typical == 0.0005
    assert rows_of(cluster(machine("b"))).machines[1].typical is None


def test_a_machine_that_answers_much_later_than_the_others_is_slow() -> None:
    quick = [machine(name, times=times(ms2=50)) for name in "bc"]
    found = rows_of(cluster(*quick, machine("d", times=times(ms100=50))))
    assert slow(found) == ["d"]
    assert "slow" in "\n".join(lines_of(found))
    # Differences that nobody notices, and a few requests, do not count.
    assert slow(rows_of(cluster(*quick, machine("d", times=times(ms20=50))))) == []
    assert slow(rows_of(cluster(*quick, machine("d", times=times(ms100=4))))) == []


def test_a_machine_whose_requests_are_often_hedged_is_slow() -> None:
    often = machine("b", times=times(ms2=90), hedged_requests=10)
    assert slow(rows_of(cluster(often))) == ["b"]
    assert slow(rows_of(cluster(machine("b", times=times(ms2=90), hedged_requests=8)))) == []
    # It has recovered: none of the last 50 requests was hedged.
    recovered = cluster(machine("b", times=times(ms2=140), hedged_requests=10))
    assert slow(rows_of(recovered, cluster(often), seconds=1.0)) == []


def test_a_machine_that_never_answers_is_slow() -> None:
    found = rows_of(cluster(machine("b", failed=0, hedged_requests=6)))
    assert slow(found) == ["b"]
    assert found.machines[1].requests == 6


def test_caches_are_added_up_over_the_machines() -> None:
    found = rows_of(cluster(machine("b"), machine("c", report=None)))
    (cache,) = found.caches
    assert (cache.content, cache.machines, cache.samples) == (CONTENT, 2, 200)
    assert (cache.here, cache.elsewhere, cache.storage, cache.hedged) == (20, 40, 10, 2)
    assert (found.machines[1].used_bytes, found.machines[1].local) == (4_000_000, 10)
    assert (found.machines[2].used_bytes, found.machines[2].cores) == (None, None)


def test_the_text_says_that_samples_need_a_pickle() -> None:
    said = "samples that need a pickle are not sent"
    assert said in "\n".join(lines_of(rows_of(cluster(machine("b", unsent=3)))))
    assert said not in "\n".join(lines_of(rows_of(cluster(machine("b")))))


def test_the_text_names_the_head_the_suspected_and_those_that_are_gone() -> None:
    lines = lines_of(
        rows_of(
            cluster(
                machine("b", state="suspected", sent=2_000_000, report=None),
                machine("c", state="gone", gone_for=5.0, report=None),
            )
        )
    )
    text = "\n".join(lines)
    assert "2 machines, view 0.1.2" in text
    assert "alive, head, this machine" in text
    assert "2.5 of 8" in text
    assert "found here 10, on other machines 20, read from storage 5, of these 1 hedged" in text
    (suspected,) = [line for line in lines if "suspected" in line]
    assert "?" in suspected
    assert any("gone" in line for line in lines)
    assert any(line.startswith("b ") and "2.0 MB" in line for line in lines)
