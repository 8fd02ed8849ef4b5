"""Marks the examples in docstrings as code, for the API reference of the documentation site."""

from __future__ import annotations

from typing import Any

import griffe


def fence_examples(text: str) -> str:
    """Put every doctest of a docstring into a code block; a blank line ends a doctest.

    >>> print(fence_examples("Add one.\\n\\n>>> 1 + 1\\n2"))
    Add one.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        begins = line.lstrip().startswith(">>>")
        if begins and not inside:
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)


class Docstrings(griffe.Extension):  # type: ignore[misc]
    """Fences the examples of every object that has a docstring."""

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)
