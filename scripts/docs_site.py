"""Makes the navigation of the documentation site from docs/index.md, and adds the examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECTION = re.compile(r"^## (.+)$")
ENTRY = re.compile(r"^(?:\||-) \[([^\]]+)\]\(([\w./-]+\.md)\)")

Navigation = list[dict[str, Any]]


def navigation(index: str) -> Navigation:
    """The pages that an index lists in the first columns of its tables, by section.

    >>> navigation("## Use\\n| page | for |\\n| [Cache](cache.md) | speed |\\n")
    [{'Use': [{'Cache': 'cache.md'}]}]
    """
    found: Navigation = []
    for line in index.splitlines():
        if section := SECTION.match(line):
            found.append({section[1]: []})
        elif (entry := ENTRY.match(line)) and found:
            (pages,) = found[-1].values()
            pages.append({entry[1]: entry[2]})
    return [section for section in found if all(section.values())]


def on_config(config: Any) -> Any:
    """MkDocs calls this after it has read mkdocs.yml."""
    index = Path(config["docs_dir"], "index.md").read_text()
    config["nav"] = [{"Penstock": "index.md"}, *navigation(index)]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the example programs, to which pages link."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "examples").glob("*.*")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Links to the examples are outside docs/ in the repository, and inside the site."""
    return markdown.replace("](../examples/", "](examples/")
