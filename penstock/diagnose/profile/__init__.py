"""The profiling aid: what each stop and operation costs on the user's own data, and what the fused
plan saves."""

from __future__ import annotations

from penstock.diagnose.profile.result import Profile, Row

__all__ = ["Profile", "Row"]
