"""A fake device in place of the GPU, which the loader under test finds."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from penstock.device import delivery
from penstock.device.fake import FakeDevice


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    device = FakeDevice()
    monkeypatch.setattr(delivery, "make_device", lambda wanted, index: device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield device
    device.close()
    assert device.faults == []
    assert device.registered == {}, "memory was unmapped while it was registered"
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-ahead")]
