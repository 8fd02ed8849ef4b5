"""Delivers batches to a device, one or two ahead of the training loop.

The memory of batches (slots) is registered with the device once. A background thread copies each
batch on a side stream of the device; the loop gets tensors for which its own stream waits. The slot
goes back when the copy is done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.device.contract import Device, Event, Unregister
from penstock.device.cuda import CudaDevice, current_index
from penstock.device.division import Rest
from penstock.device.plain import PlainDevice
from penstock.device.rows import PartlyOnDevice
from penstock.device.shared_copy import CopyDesk, SharedCopy
from penstock.errors import PipelineError
from penstock.order.plan import BatchKeys
from penstock.stops.field import Field
from penstock.tree import each_leaf

_log = logging.getLogger("penstock.device")


class DeviceFinder:
    """Makes the device when it is first needed, for the thread that called ``find`` first.

    A device is made late: making it initialises CUDA, after which workers cannot be forked.
    """

    def __init__(self, device: torch.device) -> None:
        self._wanted = device
        self._index: int | None = None
        self._device: Device | None = None
        self._lock = threading.Lock()
        self._warned = False

    @property
    def name(self) -> str:
        """The device as the user gave it."""
        return str(self._wanted)

    def find(self) -> None:
        """Find out which GPU is the current one. Called in the thread of the training loop."""
        if self._wanted.type == "cuda" and self._index is None:
            self._index = current_index(self._wanted)

    def device(self) -> Device:
        """The device. Called from any thread, after ``find``."""
        with self._lock:
            if self._device is None:
                self._device = make_device(self._wanted, self._index or 0)
            return self._device

    def register(self, address: int, nbytes: int) -> Unregister | None:
        """Register memory of batches; ``None`` if that fails, which makes copies slower."""
        try:
            return self.device().register(address, nbytes)
        except (OSError, RuntimeError) as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "memory of batches cannot be registered with %s: %s. Copies to it are slower. "
                    "Check the limit of locked memory (ulimit -l).",
                    self._wanted,
                    error,
                )
            return None


def make_device(device: torch.device, index: int) -> Device:
    """The device of a kind. ``index``: the number of the GPU."""
    return CudaDevice(index) if device.type == "cuda" else PlainDevice(device)


def check_device(device: str | torch.device) -> torch.device:
    """A device as torch knows it. Refuses one that torch does not know or does not see."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PipelineError(
            f"device={device!r} is not a device of torch: {error}. Give a name such as "
            '"cuda" or "cuda:1".'
        ) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise PipelineError(
            f"device={device!r}, but torch sees no CUDA device. Give "
            'device="cuda" if torch.cuda.is_available() else "cpu", or leave device out.'
        )
    if found.type == "cuda" and found.index is not None:
        count = torch.cuda.device_count()
        if found.index >= count:
            raise PipelineError(
                f"device={device!r}, but torch sees {count} CUDA devices, numbered from 0."
            )
    return found


class Delivered(NamedTuple):
    """A batch on the device: its tensors can be used after ``event``; ``None``: it is not there."""

    value: Any
    tensors: list[torch.Tensor]
    event: Event | None


class Delivery:
    """Copies batches to a device; the ``Background`` of a loader (see ``engine/ahead.py``).

    If the device has no memory left for a batch ahead of its time, that batch and all later ones
    are copied when the loop asks for them: a batch ahead must not take the memory of the next one.

    ``rest``: the operation that the device does after the copy. ``desk``: where jobs that get the
    same batches agree on who copies them.
    """

    def __init__(
        self, device: Device, rest: Rest | None = None, desk: CopyDesk | None = None
    ) -> None:
        self._device = device
        self._shared = None if desk is None else SharedCopy(device, desk)
        self._rest = None if rest is None else NormalizeOnDevice(device, rest)
        self._source: Any = None
        self._event: Event | None = None
        self._ahead = True

    def convert(self, value: Any, keys: BatchKeys | None = None) -> Delivered:
        if not self._ahead:
            return Delivered(value, [], None)
        shared = self._shared
        try:
            views = None
            if shared is not None and keys is not None:
                views = shared.views(keys, _tensors_of(value))
            delivered = Delivered(*self._copy(value, views))
        except torch.OutOfMemoryError as error:
            self._ahead = False
            self.close()
            _log.warning(
                "%s has no memory for batches ahead of the loop: %s. From now on each batch is "
                "copied when the loop asks for it, and the loop waits for the copy.",
                self._device.name,
                error,
            )
            return Delivered(value, [], None)
        except BaseException:
            if shared is not None:
                shared.fail()
            raise
        # The slot must not go back before its copy is done.
        self._source, self._event = value, delivered.event
        return delivered

    def settle(self) -> None:
        event, shared = self._event, self._shared
        try:
            if event is not None:
                event.wait()
                if shared is not None:
                    shared.finish()
        except BaseException:
            if shared is not None:
                shared.fail()
            raise
        finally:
            self._source = self._event = None

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def hand_out(self, converted: Delivered) -> Any:
        value, tensors, event = converted
        if event is None:
            value, tensors, event = self._copy(converted.value)
            event.wait()  # the slot goes back when this returns
        self._device.arrive(tensors, event)
        return value

    def _copy(
        self, value: Any, views: list[torch.Tensor] | None = None
    ) -> tuple[Any, list[torch.Tensor], Event]:
        """Begin to copy. ``views``: shared tensors of the device that have the values already."""
        tensors: list[torch.Tensor] = []
        shared = iter(views or ())

        def moved(leaf: Any) -> Any:
            if isinstance(leaf, PartlyOnDevice):
                tensors.append(leaf.deliver(self._device))
            elif isinstance(leaf, np.ndarray):  # of a type that torch does not have
                return leaf.copy()  # the slot goes back
            elif isinstance(leaf, torch.Tensor):
                tensors.append(self._device.copy(leaf) if views is None else next(shared))
            else:
                return leaf
            return tensors[-1]

        made = each_leaf(value, moved)
        if self._rest is not None:
            made = self._rest(made, tensors)
        if views:
            made = self._own(made, tensors, views)
        return made, tensors, self._device.record()

    def _own(self, made: Any, tensors: list[torch.Tensor], views: list[torch.Tensor]) -> Any:
        """The batch with memory of its own in place of what is shared."""

        def owned(leaf: Any) -> Any:
            if not any(leaf is view for view in views):
                return leaf
            own = self._device.allocate(leaf.shape, leaf.dtype)
            self._device.run(partial(own.copy_, leaf), "copy", reads=[leaf], writes=[own])
            tensors[:] = [own if tensor is leaf else tensor for tensor in tensors]
            return own

        return each_leaf(made, owned)


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in the order in which they are copied."""
    found: list[torch.Tensor] = []

    def leaf(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            found.append(one)
        return one

    each_leaf(value, leaf)
    return found


class NormalizeOnDevice:
    """Normalizes a field of batches on the device, with the bits of ``Normalize`` on the CPU.

    Called with a batch and the list of its tensors; the new tensor replaces the uint8 one in both.
    """

    def __init__(self, device: Device, rest: Rest) -> None:
        self._device = device
        self._field = Field("normalize", rest.on, rest.normalize.field)
        self._channels = rest.channels
        self._chw = rest.normalize.layout == "chw"
        slopes, offsets = rest.normalize.line(rest.channels)
        self._host = torch.tensor(np.stack([slopes, offsets]))
        self._line: torch.Tensor | None = None

    def __call__(self, batch: Any, tensors: list[torch.Tensor]) -> Any:
        if self._line is None:
            self._line = self._device.copy(self._host)
        line = self._line

        def normalized(images: Any, _: None) -> Any:
            shape = self._shape(images)
            fill = fill_normalized if self._chw else fill_normalized_last
            made = self._device.allocate(shape, torch.float32)
            self._device.run(
                partial(fill, made, images, line), "copy", reads=[images, line], writes=[made]
            )
            tensors[:] = [made if tensor is images else tensor for tensor in tensors]
            return made

        return self._field.replace(batch, normalized, None)

    def _shape(self, images: Any) -> tuple[int, ...]:
        if (
            not isinstance(images, torch.Tensor)
            or images.dtype != torch.uint8
            or images.ndim != 4
            or images.shape[3] != self._channels
        ):
            found = (
                f"{tuple(images.shape)} of {images.dtype}"
                if isinstance(images, torch.Tensor)
                else f"a {type(images).__name__}"
            )
            raise PipelineError(
                f"normalize on the device got {found}; it needs uint8 images of {self._channels} "
                "channels, all of one size. Give the loader device_normalize=False to normalize on "
                "the CPU."
            )
        rows, height, width, channels = images.shape
        return (rows, channels, height, width) if self._chw else (rows, height, width, channels)


def fill_normalized(out: torch.Tensor, images: torch.Tensor, line: torch.Tensor) -> None:
    """Normalize images (rows, height, width, channels) into ``out``, channels first.

    ``line``: slopes and offsets of the channels. Product and sum are rounded one after the other,
    as on the CPU: both have the same bits. Nothing is allocated.
    """
    out.copy_(images.permute(0, 3, 1, 2))
    out.mul_(line[0][:, None, None]).add_(line[1][:, None, None])


def fill_normalized_last(out: torch.Tensor, images: torch.Tensor, line: torch.Tensor) -> None:
    """Like ``fill_normalized``, channels last."""
    out.copy_(images)
    out.mul_(line[0]).add_(line[1])


def deliver_to(finder: DeviceFinder) -> Callable[[Rest | None, CopyDesk | None], Delivery]:
    """Begins a delivery; see ``Ahead``."""
    return lambda rest, desk: Delivery(finder.device(), rest, desk)
