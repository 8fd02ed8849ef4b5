"""Operations on sound, under the names users write.

They work on float32 arrays (channels, frames) and follow torchaudio's definitions. The compiled
kernel runs them, or NumPy and SciPy with the same bits.

>>> from penstock import audio
>>> audio.mel_spectrogram(16_000).name
'mel_spectrogram'
"""

from __future__ import annotations

from penstock.audio.codec import DecodeAudio
from penstock.audio.length import CropOrPad, PadAudio, RandomCropAudio
from penstock.audio.level import Mono, NormalizeAudio, RandomGain
from penstock.audio.masking import SpecAugment
from penstock.audio.mel import MelSpectrogram
from penstock.audio.resample import Resample

crop_or_pad = CropOrPad
decode = DecodeAudio
mel_spectrogram = MelSpectrogram
mono = Mono
normalize = NormalizeAudio
pad = PadAudio
random_crop = RandomCropAudio
random_gain = RandomGain
resample = Resample
spec_augment = SpecAugment

__all__ = [
    "crop_or_pad",
    "decode",
    "mel_spectrogram",
    "mono",
    "normalize",
    "pad",
    "random_crop",
    "random_gain",
    "resample",
    "spec_augment",
]
