"""The guides to the code name files, classes and rooms that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.project.test_docs import FENCE
from tests.project.test_rooms import ROOMS, tree_of
from tests.support import ROOT

PACKAGE = ROOT / "penstock"
GUIDE = ROOT / "docs" / "follow-a-sample.md"
MOST_FILES = 15
"""Files that a newcomer reads to follow one sample."""

CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w-][\w.-]*(/[\w.-]+)*/?")
SUFFIXES = (".c", ".h", ".md", ".py", ".svg", ".toml", ".txt")
STEP = re.compile(r"^(\d+)\. \*\*`([^`]+)`\*\*(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"([A-Z][a-z]\w*(?:\.[a-z]\w*)?)(?:\([^)]*\))?")
"""A class, or a method of a class with or without its arguments: ``Engine.take(worker)``."""

LABEL = re.compile(r'<text class="file[^"]*"[^>]*>([^<]+)</text>')


class Step(NamedTuple):
    """One file of the walk, and the text about it."""

    number: int
    path: str
    text: str


def paths_in(text: str) -> set[str]:
    """The paths among some words: ``engine/engine.py``, ``order/``, ``CHANGELOG.md``."""
    words = [word.strip(",;:") for word in text.split()]
    return {
        word for word in words if PATH.fullmatch(word) and ("/" in word or word.endswith(SUFFIXES))
    }


def mentioned(page: str) -> set[str]:
    """The paths that a page mentions in backticks."""
    spans = CODE.findall(FENCE.sub("", page))
    return set().union(*(paths_in(span) for span in spans))


def exists(path: str) -> bool:
    """Whether the tree has this path, relative to ``penstock/`` or to the repository."""
    places = (PACKAGE / path, ROOT / path)
    return any(place.is_dir() if path.endswith("/") else place.exists() for place in places)


def section(title: str) -> str:
    """The text of one section of the guide."""
    pattern = rf"^## {title}\n(.*?)(?=^## |\Z)"
    match = re.search(pattern, GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert match is not None, title
    return match[1]


def walk() -> list[Step]:
    """The files that the guide tells its readers to read, in order."""
    return [Step(int(n), path, text) for n, path, text in STEP.findall(section("The walk"))]


def names_in(text: str) -> list[str]:
    """The classes and methods that a text mentions in backticks."""
    matches = (NAME.fullmatch(span) for span in CODE.findall(FENCE.sub("", text)))
    return [match[1] for match in matches if match is not None]


def definitions(file: Path) -> set[str]:
    """The classes of a file, and their methods as ``Class.method``."""
    names: set[str] = set()
    for node in tree_of(file).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            members = (part for part in node.body if isinstance(part, ast.FunctionDef))
            names |= {f"{node.name}.{member.name}" for member in members}
    return names


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/follow-a-sample.md"])
def test_every_path_that_a_guide_mentions_exists(page: str) -> None:
    paths = mentioned((ROOT / page).read_text())
    assert len(paths) >= 2
    assert {path for path in paths if not exists(path)} == set()


def test_one_sample_can_be_followed_through_few_files() -> None:
    steps = walk()
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    paths = [step.path for step in steps]
    assert len(set(paths)) == len(paths) <= MOST_FILES
    assert all((PACKAGE / path).is_file() for path in paths)
    # No other file is to be read on the way: those are named in later sections.
    others = {path for path in mentioned(section("The walk")) if path.endswith(".py")}
    assert others == set(paths)


def test_every_class_and_method_of_the_walk_is_in_its_file() -> None:
    missing = []
    for step in walk():
        defined = definitions(PACKAGE / step.path)
        missing += [f"{step.path}: {name}" for name in names_in(step.text) if name not in defined]
    assert missing == []


def test_every_class_and_method_that_the_guide_mentions_exists() -> None:
    defined = set().union(*(definitions(file) for file in PACKAGE.rglob("*.py")))
    names = names_in(GUIDE.read_text())
    assert len(names) >= 30
    assert sorted(set(names) - defined - {"None"}) == []


def test_the_drawing_shows_the_files_of_the_walk() -> None:
    labels = LABEL.findall((ROOT / "docs" / "road.svg").read_text())
    drawn = set().union(*(paths_in(label) for label in labels))
    optional = {"stops/refurbish.py", "stops/echo.py"}
    assert drawn == {step.path for step in walk()} | optional
    assert all(exists(path) for path in optional)


def test_the_guide_lists_every_room_in_the_order_of_imports() -> None:
    rows = re.findall(r"^\| `(\w+)` \| \S", section("Rooms"), re.MULTILINE)
    assert rows == ROOMS


def test_the_page_on_devices_names_every_file_that_calls_cuda() -> None:
    """Such lines have never run where Penstock is developed, and users must know which they are."""
    asks = re.compile(r"torch\.cuda\.(?!is_available\b)\w")
    calling = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if asks.search(path.read_text())
    }
    assert "penstock/device/cuda.py" in calling
    assert calling <= mentioned((ROOT / "docs" / "device.md").read_text())
