"""Decides whether a device prepares its share of the batches of a loader, and says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from penstock.device.delivery import DeviceFinder
from penstock.device.preparation import Preparation
from penstock.device.work import DeviceWork
from penstock.engine.build import Assembly, DevicePlan, Together, layout_of
from penstock.errors import PipelineError
from penstock.pipeline import batching_of
from penstock.stops.road import Road

if TYPE_CHECKING:
    import torch

DevicePrep = Literal["auto"] | bool
"""``False``: the CPU prepares all samples. ``"auto"``: the device prepares a share where it can.
``True``: it is an error if it cannot."""


Decoding = Literal["exact", "device"]
"""``"exact"``: samples have the bits of the CPU, whoever decodes them. ``"device"``: a library of
the device decodes JPEGs, with other bits."""


def check_device_prep(
    device_prep: object, device: torch.device | None, decode: object = "exact"
) -> None:
    """Raise PipelineError for values that ``device_prep`` and ``decode`` cannot have."""
    if decode not in ("exact", "device"):
        raise PipelineError(f'decode is {decode!r}; give "exact" or "device".')
    if decode == "device":
        if device is None or device.type == "cpu":
            raise PipelineError(
                f'decode="device" with device={"None" if device is None else str(device)!r}: there '
                'is no accelerator to decode on. Give device="cuda", or leave decode= out.'
            )
        from penstock.image.on_device.whole_jpeg import check_installed

        check_installed()
    if device_prep is not False and device_prep is not True and device_prep != "auto":
        raise PipelineError(f'device_prep is {device_prep!r}; give "auto", True or False.')
    if device_prep is True and (device is None or device.type == "cpu"):
        raise PipelineError(
            f"device_prep=True with device={'None' if device is None else str(device)!r}: there is "
            'no accelerator to prepare samples on. Give device="cuda", or device_prep="auto".'
        )


def planner(
    finder: DeviceFinder, device_prep: DevicePrep, decode: Decoding = "exact"
) -> Callable[[Assembly], DevicePlan]:
    """Returns the function that decides for a loader with this device."""
    decodes = decode == "device"

    def plan(assembly: Assembly) -> DevicePlan:
        found = _obstacle(assembly, decodes=decodes) or (
            find_work(assembly.work.road, decodes=decodes)
        )
        if isinstance(found, str):
            if decodes:
                raise PipelineError(
                    f'decode="device", but {found}. Change that, or leave decode= out: samples '
                    "then have the bits of the CPU."
                )
            if device_prep is True:
                raise PipelineError(
                    f'device_prep=True, but {found}. Change that, or give device_prep="auto": '
                    "the CPU then prepares all samples."
                )
            return DevicePlan(None, f"the CPU alone prepares samples: {found}")
        work, options = found, assembly.recipe.options

        def begin(state: Mapping[str, Any] | None) -> Together:
            return Preparation(
                work,
                finder.device,
                finder.register,
                workers=assembly.choice.workers,
                rows=batching_of(assembly.recipe.pipeline).size,
                tiny_batch=None if options.tiny_batch == "auto" else options.tiny_batch,
                state=state,
            )

        share = "a share of each batch" if work.exact else "all samples"
        return DevicePlan(begin, f"{finder.name} prepares {share} ({work.name})")

    return plan


def _obstacle(assembly: Assembly, *, decodes: bool) -> str:
    """Why no device can take part in this loader, whatever its operations; empty if it can."""
    choice, pipeline = assembly.choice, assembly.recipe.pipeline
    if choice.kind == "node":
        return f"the node of this machine prepares the batches ({choice.why})"
    if choice.kind != "threads":
        return f'the workers are not threads of this process (kind="threads"), but: {choice}'
    if batching_of(pipeline).collate is not None:
        return "batches are padded, or made by a collate function"
    if pipeline.echoed is not None:
        return "echo() repeats whole batches"
    if decodes and layout_of(pipeline.fields, 1) is None:
        # The CPU would prepare the first sample after each start, to learn the shape.
        return "the shape or type of a field of samples is not known beforehand"
    return ""


def find_work(road: Road, *, decodes: bool = False) -> DeviceWork | str:
    """The part of a road that a device can run, or why there is none."""
    from penstock.device.image_work import image_work

    return image_work(road, decodes=decodes)
