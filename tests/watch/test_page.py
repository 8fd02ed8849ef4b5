"""The page of ``penstock watch`` in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.watch.live_directory import LiveDirectory
from penstock.watch.machines import rows_of
from penstock.watch.serving import Page, PageServer
from penstock.watch.site import pages
from penstock.watch.view import ChartPoint, LoaderHistory, TrafficPoint, View
from tests.support.clusters import cluster, machine, times
from tests.support.snapshots import FULL, STANDING, snapshot

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

Browse = Callable[..., str]

NODE = {
    "release": "0.1.0",
    "pid": 77,
    "up": 3_700.0,
    "cpu": 12.5,
    "workers": 2,
    "groups": [
        {
            "name": "search-1",
            "broken": None,
            "staged": 5_000_000,
            "staged_batches": 6,
            "budget": 10_000_000,
            "prepared": 120,
            "given": 480,
            "members": [
                {"pid": 81, "part": "0/1 x 64", "epoch": 2, "batch": 7, "batches": 9, "ready": 3}
            ],
        }
    ],
}


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Open a page in the browser for three seconds of virtual time, and return its output."""

    def run(server: PageServer, *more: str) -> str:
        done = subprocess.run(
            [
                str(CHROMIUM),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={tmp_path / 'profile'}",
                "--window-size=1000,1400",
                "--virtual-time-budget=3000",
                *more,
                f"http://127.0.0.1:{server.port}/",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def full_view() -> View:
    """A view of two loaders, one of which waits, with bad samples and a node."""
    view = View(time=1_000.0, node=NODE)
    one = LoaderHistory(snapshot(FULL, written=999.5), seen=1_000.0)
    one.points.extend(
        ChartPoint(700.0 + 2 * i, 0.5 + 0.4 * np.sin(i / 9), 900 + i)
        for i in range(150)
        if i // 20 != 3
    )
    script = "python <img src=x onerror=document.title='hit'> --lr 0.1"
    standing = replace(STANDING, rank=1, world=2, share="search-1", batches=None)
    other = LoaderHistory(
        snapshot(number=1, command=script, waiting=990.0, written=990.0, standing=standing),
        seen=1_000.0,
    )
    view.loaders = [one, other]
    status = cluster(
        machine("b", sent=2_000_000, times=times(ms2=90), hedged_requests=10),
        machine("c", state="gone", report=None),
    )
    view.cluster = rows_of(status)
    view.traffic.append(TrafficPoint(999.0, 1_000.0, 2_000.0))
    return view


@pytest.fixture
def server(live: LiveDirectory) -> Iterator[PageServer]:
    page_server = PageServer(0, pages(full_view()), "penstock-watch")
    yield page_server
    page_server.close()


def test_the_page_shows_all_statistics(server: PageServer, browse: Browse) -> None:
    dom = browse(server, "--dump-dom")
    shown = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", dom))
    assert dom.count('<article class="card">') == 4
    for text in (
        "2 loaders",
        "process 4711, loader 0: python train.py",
        "epoch 3, batch 12 of 50",
        "25 % stalled now, 25 % since the first batch",
        "100 samples/s",
        "3 + 1 batches ready + in preparation",
        "60 % busy: 2 threads",
        "decode 100 9.000",
        "cache 40 % hits 30.0 MB of 40.0 MB",
        "refurbish 70 % reused",
        "echo factor 2",
        "device cuda:0 25 % of samples 3.0 MB copied, t = -2, spatial",
        "web 750 1.50 75 % code 250 0.50 25 %",
        "Bad samples: 2",
        "cat/7.jpg 7 decode not a JPEG",
        "rank 1 of 2, shares search-1, waiting for a batch for 10 s",
        "Group search-1",
        "6 batches staged, 5.0 MB of 10.0 MB; prepared 120, given 480",
        "81 0/1 x 64 2 7 of 9 3",
        "Cluster seen from a at 10.0.0.1:7411",
        "2 machines 5.0 of 16 cores idle",
        "alive head this machine trains 2.5 of 8 4.0 MB of 8.0 MB",
        "29 % here, 57 % elsewhere, 14 % storage",
        "b slow 2.0 MB 0 B/s 0 B 0 B/s 1.5 ms",
        "ms 10 of 90",
        "gone trains ? ? of 8.0 MB ?",
    ):
        assert text in shown, text
    # Two charts each of two loaders and the cluster. The line of the first loader is in two pieces:
    # there is a gap in its data.
    assert dom.count('class="chart ') == 6
    assert dom.count("<polyline") == 6
    # Text from a process is shown as text, even if it looks like HTML.
    assert "<img" not in dom
    assert "<title>penstock watch</title>" in dom


def test_the_page_refreshes_itself(live: LiveDirectory, browse: Browse) -> None:
    asked: list[int] = []
    known = dict(pages(full_view()))
    empty = b'{"time": 5, "loaders": [], "node": null}'

    def answer() -> bytes:
        asked.append(1)
        return empty if len(asked) > 1 else known["/snapshot.json"].make()

    served = {**known, "/snapshot.json": Page("application/json", answer)}
    server = PageServer(0, served, "penstock-watch")
    try:
        dom = browse(server, "--dump-dom")
    finally:
        server.close()
    assert len(asked) >= 2
    assert "No loader is running" in dom
    assert "<article" not in dom


def test_a_page_whose_server_has_ended_says_so(live: LiveDirectory, browse: Browse) -> None:
    def gone() -> bytes:
        raise ConnectionResetError

    served = {**pages(full_view()), "/snapshot.json": Page("application/json", gone)}
    server = PageServer(0, served, "penstock-watch")
    try:
        dom = browse(server, "--dump-dom")
    finally:
        server.close()
    assert 'class="lost"' in dom
    assert "has penstock watch ended?" in dom


@pytest.mark.parametrize(("scheme", "dark"), [(1, False), (0, True)], ids=["light", "dark"])
def test_the_page_is_readable_in_light_and_dark_mode(
    scheme: int, dark: bool, server: PageServer, browse: Browse, tmp_path: Path
) -> None:
    place = tmp_path / "page.png"
    browse(server, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={place}")
    picture: NDArray[np.uint8] = np.asarray(cv2.imread(str(place)))
    brightness = picture.mean(axis=2)
    assert bool(brightness[2, 2] < 60) is dark  # the background
    # Most of the page is background, and the text has enough contrast to it.
    background = np.median(brightness)
    assert bool(background < 60) is dark
    assert (np.abs(brightness - background) > 130).mean() > 0.01
