"""Audio operations on a device: whole tiny-batches of clips, in torch, with drawn parameters.

Crops and padding, gain, mixing, normalizing with a given mean and masking with a given value have
the bits of the CPU. What sums many numbers does not, because a device adds them in another order:
spectrograms, and the mean or deviation of a clip. ``SoundsProgram.tolerance`` says how far they
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.audio.length import CropOrPad, RandomCropAudio, _clip_start
from penstock.audio.level import _LEAST_VARIANCE, Mono, NormalizeAudio, RandomGain
from penstock.audio.masking import SpecAugment
from penstock.audio.mel import MelSpectrogram, _window, triangles
from penstock.errors import PenstockError
from penstock.image.on_device.parameters import DeviceParameters, pack
from penstock.image.on_device.program import NotOnDevice
from penstock.keyed import Keyed, Keys
from penstock.operation import Operation

Clips = Sequence[torch.Tensor]
"""Clips (channels, frames) of different lengths."""


class _Stage(NamedTuple):
    """One operation: how to pack what was drawn, and how to run it on a stack of clips.

    ``pack`` gets the drawn parameters and the shapes of the clips, and returns one array.
    """

    operation: Operation
    keyed: Keyed
    pack: Callable[[list[Any], list[tuple[int, ...]]], NDArray[Any]]
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class SoundsProgram:
    """The operations of a road below ``audio.decode()`` that a device runs on whole tiny-batches.

    The first crops or pads every clip to one length; without it, all clips must have one length.
    ``exact``: rows have the bits of the CPU. If not, ``tolerance`` says what differs.

    >>> import numpy as np, torch
    >>> from penstock import audio
    >>> from penstock.keyed import Keys
    >>> program = sounds_program([(audio.crop_or_pad(4), Keyed(0, "map/0"))])
    >>> rows = torch.zeros(2, 1, 4)
    >>> clips = [torch.ones(1, 2), torch.ones(1, 9)]
    >>> program.run(clips, program.draw(Keys(0, [0, 1]), [(1, 2), (1, 9)]), rows)
    >>> rows[:, 0].tolist()
    [[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    """

    stages: tuple[_Stage, ...]
    exact: bool
    tolerance: str

    def draw(self, keys: Keys, shapes: Sequence[tuple[int, ...]]) -> DeviceParameters:
        """Draw the parameters of a tiny-batch. ``shapes``: (channels, frames) of each clip.

        Clips that fail here are left to the CPU, which reports them.
        """
        places: list[int] = []
        left: dict[int, str] = {}
        drawn: list[list[Any]] = []
        for place, (key, shape) in enumerate(zip(keys, shapes, strict=True)):
            one = []
            try:
                for stage in self.stages:
                    operation = stage.operation
                    params = None
                    if operation.random:
                        params = operation.draw(stage.keyed.at(key), shape)
                    one.append((params, shape))
                    shape = _shape_after(operation, shape)
            except PenstockError as error:
                left[place] = str(error)
                continue
            places.append(place)
            drawn.append(one)
        arrays = []
        for number, stage in enumerate(self.stages if places else ()):
            mine = [row[number] for row in drawn]
            made = stage.pack([params for params, _ in mine], [shape for _, shape in mine])
            arrays.append({"numbers": made})
        nothing = np.zeros((0, 4), np.int32)
        return pack(np.array(places, np.int64), left, nothing, nothing, arrays)

    def run(
        self,
        clips: Clips,
        parameters: DeviceParameters,
        rows: torch.Tensor,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """Prepare the clips and write them to ``rows[parameters.places]``.

        ``clips``: one for each place of the parameters, on the device of the rows. ``buffer``: a
        copy of ``parameters.buffer`` on this device, if the caller has one.
        """
        if len(clips) != len(parameters):
            raise ValueError(
                f"{len(clips)} clips and parameters for {len(parameters)}: give one clip for each "
                "place of the parameters"
            )
        if not len(parameters):
            return
        if buffer is None:
            buffer = torch.from_numpy(parameters.buffer).to(rows.device)
        stages = list(zip(self.stages, parameters.on(buffer), parameters.stages, strict=True))
        if stages and isinstance(stages[0][0].operation, (CropOrPad, RandomCropAudio)):
            (first, _, host), *stages = stages
            sounds = _placed(clips, host["numbers"].tolist(), first.operation)
        else:
            sounds = torch.stack(list(clips))
        for stage, arrays, _ in stages:
            sounds = stage.run(sounds, arrays["numbers"])
        rows[torch.from_numpy(parameters.places).to(rows.device)] = sounds


def sounds_program(parts: Sequence[tuple[Any, Keyed]]) -> SoundsProgram:
    """The program of these operations, each with the generators of its stage.

    Raises ``NotOnDevice`` with the reason if a device cannot run them.
    """
    stages, tolerances = [], []
    for number, (operation, keyed) in enumerate(parts):
        if isinstance(operation, (CropOrPad, RandomCropAudio)) and number:
            raise NotOnDevice(f"{operation.name} stands below {parts[0][0].name}")
        stage, tolerance = _stage(operation, keyed)
        stages.append(stage)
        tolerances += [tolerance] if tolerance else []
    return SoundsProgram(tuple(stages), not tolerances, "; ".join(tolerances))


def _stage(operation: Any, keyed: Keyed) -> tuple[_Stage, str]:
    """The stage of an operation, and its tolerance in words."""
    if isinstance(operation, (CropOrPad, RandomCropAudio)):
        return _Stage(operation, keyed, _starts(operation), lambda sounds, numbers: sounds), ""
    if isinstance(operation, RandomGain):
        return _Stage(operation, keyed, _factors, _amplify), ""
    if isinstance(operation, Mono):
        return _Stage(operation, keyed, _nothing, lambda sounds, numbers: _mixed(sounds)), ""
    if isinstance(operation, NormalizeAudio):
        by_clip = operation.mean is None
        tolerance = "normalize by the clip: within 1e-4" if by_clip else ""
        return _Stage(operation, keyed, _nothing, _normalizing(operation)), tolerance
    if isinstance(operation, MelSpectrogram):
        tolerance = "mel_spectrogram: within 0.002 after the logarithm, for sums above the floor"
        return _Stage(operation, keyed, _nothing, _Mel(operation).run), tolerance
    if isinstance(operation, SpecAugment):
        by_clip = isinstance(operation.fill, str)
        tolerance = "spec_augment(fill='mean'): within 1e-4" if by_clip else ""
        return _Stage(operation, keyed, _spans, _masking(operation)), tolerance
    name = getattr(operation, "name", None) or getattr(operation, "__name__", "a function")
    raise NotOnDevice(f"{name} is no operation of penstock.audio that a device can run")


def _shape_after(operation: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(operation, (CropOrPad, RandomCropAudio)):
        return shape[0], operation._frames
    if isinstance(operation, Mono):
        return 1, shape[1]
    if isinstance(operation, MelSpectrogram):
        return shape[0], operation.mels, operation._steps(shape[1])
    return shape


def _nothing(drawn: list[Any], shapes: list[tuple[int, ...]]) -> NDArray[Any]:
    return np.zeros((len(drawn), 1), np.float32)


def _factors(drawn: list[Any], shapes: list[tuple[int, ...]]) -> NDArray[Any]:
    return np.array(drawn).astype(np.float32)


def _starts(operation: Any) -> Callable[[list[Any], list[tuple[int, ...]]], NDArray[Any]]:
    """The frame of the result at which each clip begins."""

    def starts(drawn: list[Any], shapes: list[tuple[int, ...]]) -> NDArray[Any]:
        if isinstance(operation, CropOrPad):
            rooms = [operation._frames - shape[1] for shape in shapes]
            drawn = [_clip_start(operation.place, room) for room in rooms]
        return np.array(drawn, np.int64)

    return starts


def _placed(clips: Clips, starts: list[int], operation: Any) -> torch.Tensor:
    """All clips in one stack, each from its place on."""
    frames, channels = operation._frames, clips[0].shape[0]
    out = torch.zeros((len(clips), channels, frames), device=clips[0].device)
    for row, clip, at in zip(out, clips, starts, strict=True):
        length = clip.shape[1]
        if operation.mode == "repeat":
            places = torch.arange(frames, device=clip.device) - at
            row.copy_(clip[:, places.remainder(length)])
            continue
        first, last = max(0, at), min(frames, at + length)
        if first < last:
            row[:, first:last] = clip[:, first - at : last - at]
    return out


def _amplify(sounds: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return sounds * factors[:, None, None]


def _mixed(sounds: torch.Tensor) -> torch.Tensor:
    channels = sounds.shape[1]
    if channels == 1:
        return sounds
    # One channel after the other, as on the CPU.
    total = sounds[:, 0]
    for channel in range(1, channels):
        total = total + sounds[:, channel]
    return (total / channels)[:, None]


def _whole(sounds: torch.Tensor) -> list[int]:
    return list(range(1, sounds.ndim))


def _normalizing(
    operation: NormalizeAudio,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def run(sounds: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        if operation.mean is not None and operation.std is not None:
            moved = sounds - float(np.float32(operation.mean))
            return moved * float(np.float32(1.0 / operation.std))
        moved = sounds - sounds.mean(dim=_whole(sounds), keepdim=True)
        variance = moved.square().mean(dim=_whole(sounds), keepdim=True)
        return moved / (variance + _LEAST_VARIANCE).sqrt()

    return run


class _Mel:
    """A mel spectrogram by torch's Fourier transform, and a product with the filters."""

    def __init__(self, operation: MelSpectrogram) -> None:
        self._operation = operation
        window = _window(operation.n_fft, operation.win or operation.n_fft)
        self._window = torch.from_numpy(np.array(window))
        filters = triangles(*operation._triangles()).astype(np.float32)
        self._filters = torch.from_numpy(np.array(filters))

    def run(self, sounds: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        by = self._operation
        self._window = self._window.to(sounds.device)
        self._filters = self._filters.to(sounds.device)
        if by.center:
            half = by.n_fft // 2
            sounds = torch.nn.functional.pad(sounds, (half, half), mode="reflect")
        cut = sounds.unfold(2, by.n_fft, by.hop) * self._window
        strength = torch.fft.rfft(cut).abs()
        strength = strength if by.power == 1.0 else strength.pow(by.power)
        mels = torch.einsum("mf,nctf->ncmt", self._filters, strength)
        if by.log is False:
            return mels
        mels = mels.clamp(min=float(np.float32(by.floor))).log()
        if by.log is True:
            return mels
        mels = mels * by._to_decibels
        if by.top_db is not None:
            mels = mels.maximum(mels.amax(dim=_whole(mels), keepdim=True) - by.top_db)
        return mels


def _spans(drawn: list[Any], shapes: list[tuple[int, ...]]) -> NDArray[Any]:
    """The bands of each clip: (kind, first, after the last), with 0 for time and 1 for mels."""
    most = max(len(masks.time) + len(masks.freq) for masks in drawn)
    out = np.zeros((len(drawn), most, 3), np.int64)
    for row, masks in zip(out, drawn, strict=True):
        bands = [(0, *span) for span in masks.time] + [(1, *span) for span in masks.freq]
        row[: len(bands)] = np.array(bands, np.int64).reshape(len(bands), 3)
    return out


def _masking(operation: SpecAugment) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def run(sounds: torch.Tensor, bands: torch.Tensor) -> torch.Tensor:
        mels = torch.arange(sounds.shape[2], device=sounds.device)[None, :, None]
        steps = torch.arange(sounds.shape[3], device=sounds.device)[None, None, :]
        masked = torch.zeros(
            (len(sounds), *sounds.shape[2:]), dtype=torch.bool, device=sounds.device
        )
        for band in range(bands.shape[1]):
            kind, first, last = (part[:, None, None] for part in bands[:, band].unbind(1))
            at = torch.where(kind == 0, steps, mels)
            masked |= (at >= first) & (at < last)
        if isinstance(operation.fill, str):
            fill = sounds.mean(dim=_whole(sounds), keepdim=True)
        else:
            fill = sounds.new_full((), float(np.float32(operation.fill)))
        return torch.where(masked[:, None], fill, sounds)

    return run
