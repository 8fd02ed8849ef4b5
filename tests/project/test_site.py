"""The documentation site has every page in its navigation, and documents names that exist."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

from tests.support import ROOT

DOCS = ROOT / "docs"


def _hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts" / "docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_has_the_sections_of_the_index() -> None:
    index = "# Top\n| [Lost](lost.md) | x |\n## Use\nprose\n| [Cache](cache.md) | fast |\n"
    assert _hooks().navigation(index) == [{"Use": [{"Cache": "cache.md"}]}]


def test_every_page_is_in_the_navigation_once() -> None:
    sections = _hooks().navigation((DOCS / "index.md").read_text())
    pages = [
        path
        for section in sections
        for entries in section.values()
        for entry in entries
        for path in entry.values()
    ]
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert sorted(pages) == sorted(written - {"index.md"})


def test_the_api_reference_names_modules_that_exist() -> None:
    for page in (DOCS / "api").glob("*.md"):
        names = re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
        assert names, page.name
        assert all(importlib.util.find_spec(name) for name in names), page.name
