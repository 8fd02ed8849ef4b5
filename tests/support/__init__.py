"""What tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SCRIPTS = Path(__file__).resolve().parent / "scripts"
