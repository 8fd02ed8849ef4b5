"""The error of a file that is not whole."""

from __future__ import annotations


class Damaged(Exception):
    """The file is damaged, cut short, or of a kind that is not supported; the message says why."""
