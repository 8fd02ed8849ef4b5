"""Operations that crop and pad clips, to a fixed length or to a minimum length."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from penstock.audio.program import FIXED_PLACE, PAD_ONLY, RANDOM_PLACE, SoundWork, one_step
from penstock.audio.sound import (
    FLOAT32,
    WAVEFORM,
    AudioOperation,
    Sound,
    check_rate,
    check_sound,
    need_sound,
)
from penstock.errors import PipelineError
from penstock.image import arguments
from penstock.operation import ArraySpec, Spec, at_most, counted

_MODES = ("constant", "repeat")
_PLACES = ("start", "middle", "end")

_MOST_FRAMES = 2**31 - 1
"""That the compiled kernel can count."""


def _length(name: str, frames: Any, seconds: Any, rate: Any) -> int:
    """The length in frames, from ``frames`` or from ``seconds`` and ``rate``."""
    if (frames is None) == (seconds is None):
        given = "neither frames nor seconds" if frames is None else "both frames and seconds"
        raise PipelineError(f"{name} got {given}; give one of the two.")
    if frames is not None:
        if rate is not None:
            raise PipelineError(
                f"{name}: rate is {rate!r} together with frames; give rate only with seconds."
            )
        return arguments.integer(name, "frames", frames, least=1)
    if rate is None:
        raise PipelineError(
            f"{name}: seconds is {seconds!r}, but rate is missing; give rate too, or give frames."
        )
    duration = arguments.number(name, "seconds", seconds, 0.0, math.inf)
    length = round(duration * check_rate(name, "rate", rate))
    if length < 1:
        raise PipelineError(f"{name}: seconds is {seconds!r}, less than one frame; give more.")
    return length


def _check_common(operation: Any) -> None:
    """Check the arguments that the operations here share, and store the length in frames."""
    name = operation.name
    frames = _length(name, operation.frames, operation.seconds, operation.rate)
    arguments.choice(name, "mode", operation.mode, _MODES)
    for argument, value in (
        ("frames", frames),
        ("seconds", None),
        ("rate", None),
        ("_frames", frames),
    ):
        object.__setattr__(operation, argument, value)


def _clip_start(place: str, room: int) -> int:
    """The frame of the result at which the clip begins; ``room``: frames of the result to spare."""
    return {"start": 0, "middle": room // 2, "end": room}[place]


def _placing_work(kind: int, key: bytes, operation: Any, padding: int = 0) -> SoundWork | None:
    place = (*_PLACES, "random").index(operation.place)
    if max(operation._frames, padding) > _MOST_FRAMES:
        return None
    numbers = (operation._frames, padding, operation.mode == "repeat", place)
    return one_step(kind, key, numbers)


def _place_clip(sound: Sound, at: int, frames: int, mode: str) -> Sound:
    """``frames`` frames with the clip at frame ``at``. A clip that begins before 0 is cut."""
    channels, length = sound.shape
    if at <= 0 and at + length >= frames:
        return sound[:, -at : frames - at]
    if mode == "repeat":
        first = -at % length
        repeats = -(-(first + frames) // length)
        return np.tile(sound, (1, repeats))[:, first : first + frames]
    out = np.zeros((channels, frames), np.float32)
    first, last = max(0, at), min(frames, at + length)
    if first < last:
        out[:, first:last] = sound[:, first - at : last - at]
    return out


@dataclass(frozen=True, slots=True)
class RandomCropAudio(AudioOperation):
    """Crop a part of fixed length at a random position; pad clips that are too short.

    The length is ``frames``, or ``seconds`` at ``rate``. ``padding`` frames are first added before
    and after the clip, so that clips of exactly this length are shifted by up to that much. A clip
    that is still too short is put at a random position, or at the ``"start"``, ``"middle"`` or
    ``"end"`` if ``place`` says so. The rest is silence, or with ``mode="repeat"`` the clip again.

    >>> import numpy as np
    >>> crop = RandomCropAudio(seconds=0.5, rate=16_000)
    >>> sound = np.zeros((1, 20_000), np.float32)
    >>> crop.apply(sound, crop.draw(np.random.default_rng(0), sound.shape)).shape
    (1, 8000)
    """

    random: ClassVar[bool] = True

    frames: int | None = None
    seconds: float | None = None
    rate: int | None = None
    padding: int = 0
    mode: str = "constant"
    place: str = "random"
    _frames: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_common(self)
        padding = arguments.integer("random_crop", "padding", self.padding, least=0)
        object.__setattr__(self, "padding", padding)
        arguments.choice("random_crop", "place", self.place, ("random", *_PLACES))

    def output(self, spec: Spec) -> Spec:
        array = need_sound("random_crop", spec, WAVEFORM)
        return None if array is None else ArraySpec((array.shape[0], self.frames), FLOAT32)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> int:
        """The frame of the result at which the clip begins; if negative, the clip is cut."""
        drawn = rng.random()
        room = self._frames - shape[-1]
        if room <= 2 * self.padding:
            return self.padding - int(drawn * (2 * self.padding - room + 1))
        if self.place == "random":
            return int(drawn * (room + 1))
        return _clip_start(self.place, room)

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """The number of positions; with ``mode="repeat"`` at most the length of the clip."""
        if shape is None:
            return None
        room = self._frames - shape[-1]
        if room <= 2 * self.padding:
            places = 2 * self.padding - room + 1
        else:
            places = room + 1 if self.place == "random" else 1
        return counted(min(places, shape[-1]) if self.mode == "repeat" else places)

    def visible_outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """``STEPS`` places, if there are as many."""
        return at_most(self.outcomes(shape), ranges=1)

    def apply(self, value: Any, params: int) -> Sound:
        return _place_clip(
            check_sound("random_crop", value, WAVEFORM), params, self._frames, self.mode
        )

    def kernel_work(self, key: bytes) -> SoundWork | None:
        return _placing_work(RANDOM_PLACE, key, self, self.padding)


@dataclass(frozen=True, slots=True)
class CropOrPad(AudioOperation):
    """Bring every clip to one length: crop long clips, pad short ones.

    The length is ``frames``, or ``seconds`` at ``rate``. ``place`` (``"start"``, ``"middle"`` or
    ``"end"``) is the part of a long clip to keep, and the position of a short one. The rest is
    silence, or with ``mode="repeat"`` the clip again.

    >>> import numpy as np
    >>> CropOrPad(4).apply(np.array([[1, 2]], np.float32), None)
    array([[0., 1., 2., 0.]], dtype=float32)
    """

    frames: int | None = None
    seconds: float | None = None
    rate: int | None = None
    mode: str = "constant"
    place: str = "middle"
    _frames: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_common(self)
        arguments.choice("crop_or_pad", "place", self.place, _PLACES)

    def output(self, spec: Spec) -> Spec:
        array = need_sound("crop_or_pad", spec, WAVEFORM)
        return None if array is None else ArraySpec((array.shape[0], self.frames), FLOAT32)

    def apply(self, value: Any, params: Any) -> Sound:
        sound = check_sound("crop_or_pad", value, WAVEFORM)
        at = _clip_start(self.place, self._frames - sound.shape[1])
        return _place_clip(sound, at, self._frames, self.mode)

    def kernel_work(self, key: bytes) -> SoundWork | None:
        return _placing_work(FIXED_PLACE, key, self)


@dataclass(frozen=True, slots=True)
class PadAudio(AudioOperation):
    """Pad clips to a minimum length; longer clips stay as they are.

    The arguments are those of ``crop_or_pad``. Clips are put at the ``"start"`` by default. To pad
    clips to the longest of their batch, give ``pad=0`` to ``batch``.

    >>> import numpy as np
    >>> PadAudio(4, mode="repeat").apply(np.array([[1, 2, 3]], np.float32), None)
    array([[1., 2., 3., 1.]], dtype=float32)
    """

    frames: int | None = None
    seconds: float | None = None
    rate: int | None = None
    mode: str = "constant"
    place: str = "start"
    _frames: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_common(self)
        arguments.choice("pad", "place", self.place, _PLACES)

    def output(self, spec: Spec) -> Spec:
        array = need_sound("pad", spec, WAVEFORM)
        if array is None:
            return None
        channels, frames = array.shape
        return ArraySpec((channels, None if frames is None else max(frames, self._frames)), FLOAT32)

    def apply(self, value: Any, params: Any) -> Sound:
        sound = check_sound("pad", value, WAVEFORM)
        room = self._frames - sound.shape[1]
        if room <= 0:
            return sound
        return _place_clip(sound, _clip_start(self.place, room), self._frames, self.mode)

    def kernel_work(self, key: bytes) -> SoundWork | None:
        return _placing_work(PAD_ONLY, key, self)
