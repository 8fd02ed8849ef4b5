"""Claims: one worker at a time per number, and different numbers do not wait for each other."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pytest

from penstock.store import Claims, FileClaims, ThreadClaims, claims_of


@pytest.mark.parametrize("kind", ["threads", "file"])
def test_one_worker_at_a_time_holds_a_number(kind: str, tmp_path: Path) -> None:
    shared = ThreadClaims()
    inside: dict[int, int] = {0: 0, 1: 0}
    most: dict[int, int] = {0: 0, 1: 0}
    both = threading.Barrier(2, timeout=60)

    def own_claims() -> Claims:
        return claims_of(shared if kind == "threads" else tmp_path / "claims")

    def work(number: int) -> None:
        claims = own_claims()
        for _ in range(200):
            with claims.claim(number):
                inside[number] += 1
                most[number] = max(most[number], inside[number])
                inside[number] -= 1

    def meet(number: int) -> None:
        with own_claims().claim(number):
            both.wait()

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(6)]
    threads += [threading.Thread(target=meet, args=(n,)) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == {0: 1, 1: 1}
    assert shared._held == {}


def test_thread_claims_cannot_be_sent_to_another_process() -> None:
    with pytest.raises(TypeError, match="need FileClaims"):
        pickle.dumps(ThreadClaims())


def test_without_a_file_every_claim_is_granted() -> None:
    claims = claims_of(None)
    assert isinstance(claims, FileClaims)
    with claims.claim(1), claims.claim(1):
        pass
