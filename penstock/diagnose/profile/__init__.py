"""The profiler: what each stage and operation costs on the user's data, and what fusing saves."""

from __future__ import annotations

from penstock.diagnose.profile.result import Profile, StageCost

__all__ = ["Profile", "StageCost"]
