"""Opens a device by its name."""

from __future__ import annotations

from penstock.device.contract import Device
from penstock.device.cuda import current_index
from penstock.device.delivery import check_device, make_device
from penstock.device.fake import FakeDevice


def open_device(name: str) -> Device:
    """The device of a name of torch, or ``fake``. Raises PipelineError if there is none."""
    if name in ("fake", FakeDevice.name):
        return FakeDevice(shared=True)
    found = check_device(name)
    return make_device(found, current_index(found) if found.type == "cuda" else 0)
