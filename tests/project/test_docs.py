"""Every Python block of the documentation runs and prints what its page shows; links work."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import ROOT, torchvision, warm

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```\s*?$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)|<img[^>]*\ssrc=\"(?P<image>[^\"]+)\"")
END_OF_BLOCK = "-- end of block --"


class Block(NamedTuple):
    """A Python block, and its output according to the page: the ``text`` block directly below."""

    code: str
    shown: str | None


def blocks(page: Path) -> list[Block]:
    """The Python blocks of a page, except those marked ``python no-run``."""
    text = page.read_text()
    python = []
    fences = list(FENCE.finditer(text))
    for fence, below in zip(fences, [*fences[1:], None], strict=False):
        if fence["info"].strip() != "python":
            continue
        shown = None
        if below is not None and below["info"].strip() == "text":
            between = text[fence.end() : below.start()]
            shown = below["text"] if not between.strip() else None
        python.append(Block(fence["text"], shown))
    return python


def missing_packages(python: list[Block]) -> list[str]:
    """The packages that these blocks import and that are not installed."""
    names = set()
    for block in python:
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data that the pages read: photographs in class folders, and the same in Parquet."""
    root = tmp_path_factory.mktemp("documented")
    rng = np.random.default_rng(0)
    rows = []
    for split, count in (("train", 48), ("val", 12)):
        for number in range(count):
            label = number % 3
            folder = root / "photos" / split / ("cat", "dog", "owl")[label]
            folder.mkdir(parents=True, exist_ok=True)
            coarse = rng.integers(0, 256, (8, 10, 3), dtype=np.uint8)
            picture = cv2.resize(coarse, (200, 160), interpolation=cv2.INTER_CUBIC)
            done, jpeg = cv2.imencode(".jpg", picture)
            assert done
            (folder / f"{number:03}.jpg").write_bytes(jpeg.tobytes())
            if split == "train":
                rows.append({"image": jpeg.tobytes(), "label": label, "caption": f"no. {number}"})
    pq.write_table(pa.Table.from_pylist(rows), root / "train.parquet", row_group_size=16)
    return root


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables for running pages: caches go to a temporary directory."""
    variables = {**os.environ, "PENSTOCK_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    variables |= {"PYTHONPATH": str(ROOT), "NO_ALBUMENTATIONS_UPDATE": "1", "COLUMNS": "100"}
    if text := torchvision.customization():
        directory = tmp_path_factory.mktemp("stand-ins")
        (directory / "sitecustomize.py").write_text(text)
        variables["PYTHONPATH"] = os.pathsep.join((str(directory), str(ROOT)))
    return variables


ALONE = ("README.md", "quickstart.md")
"""Pages that run in a Python of their own, to which nothing is known but what they import."""


def run_alone(
    script: Path, text: str, directory: Path, settings: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-W", "error::RuntimeWarning", str(script)],
        capture_output=True,
        text=True,
        cwd=directory,
        env=settings,
        timeout=500,
        check=False,
    )


def run_warm(
    script: Path, text: str, directory: Path, settings: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """The same in a fork of a process that has imported torch: half of the time of many pages."""
    start = (
        f"import os, warnings; os.chdir({str(directory)!r}); "
        'warnings.simplefilter("error", UserWarning); '
        'warnings.simplefilter("error", RuntimeWarning); del os, warnings\n'
    )
    script.write_text(start + text)
    return warm.run(script, [], settings, directory.parent)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem
)
def test_a_page_runs_and_prints_what_it_shows(
    page: Path, data: Path, settings: dict[str, str], tmp_path: Path
) -> None:
    python = blocks(page)
    missing = missing_packages(python)
    if missing:
        pytest.skip(f"{page.name} uses {', '.join(missing)}, not installed here")
    directory = tmp_path / "data"
    shutil.copytree(data, directory)
    script = tmp_path / f"{page.stem.replace('-', '_')}_blocks.py"
    end = f"print({END_OF_BLOCK!r}, flush=True)\n"
    text = "\n".join(block.code + end for block in python)
    if page.name not in ALONE and importlib.util.find_spec("torch") is not None:
        done = run_warm(script, text, directory, settings)
    else:
        done = run_alone(script, text, directory, settings)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(END_OF_BLOCK + "\n")
    assert len(printed) == len(python) + 1
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for block, got in zip(python, printed, strict=False):
        if block.shown is not None:
            assert checker.check_output(block.shown, got, flags), (
                f"{page.name} shows\n{textwrap.indent(block.shown, '    ')}\nand this prints\n"
                f"{textwrap.indent(got, '    ')}\n{block.code}"
            )


def test_at_most_two_blocks_are_marked_no_run() -> None:
    fences = [fence["info"].split() for page in PAGES for fence in FENCE.finditer(page.read_text())]
    python = [words for words in fences if words[:1] == ["python"]]
    assert {tuple(words) for words in python} <= {("python",), ("python", "no-run")}
    assert sum(len(words) == 2 for words in python) <= 2


def test_links_between_pages_have_a_target() -> None:
    broken = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text())
        for link in LINK.finditer(text):
            target = link["target"] or link["image"]
            if target.startswith(("http://", "https://")):
                continue
            name, _, heading = target.partition("#")
            linked = (page.parent / name).resolve() if name else page
            if not linked.exists() or (heading and heading not in headings(linked)):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def headings(page: Path) -> set[str]:
    """The anchors of a page: its headings in lower case, with hyphens for spaces."""
    lines = FENCE.sub("", page.read_text()).splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    listed = {link["target"] for link in LINK.finditer(index)}
    assert {page.name for page in PAGES[1:]} - {"index.md"} <= listed
