"""Recordings to training batches: read, decode, resample, random crop, log-mel, SpecAugment."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.audio.recordings import Recordings, as_folder, sound_files
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.courses import Throughput
from benchmarks.harness.measure import Contestant, peer_names, race, select
from benchmarks.harness.race_table import COLUMNS, against_peers, race_result
from benchmarks.harness.report import Result
from benchmarks.peers import (
    dali_audio,
    librosa_audio,
    penstock_audio,
    spdl_audio,
    tfdata_audio,
    torch_soundfile_audio,
    torchaudio_audio,
)
from benchmarks.peers.by_hand_audio import ONE_THREAD

CHECKED = 1024
"""Recordings inspected per contestant. Short ones are mostly silence, so means need more of them
to agree than those of photographs."""

TORCHAUDIO = Contestant(
    "torch DataLoader, torchaudio",
    torchaudio_audio.recordings,
    ("torch", "torchaudio", "soundfile"),
    env="torchaudio",
)
TORCHAUDIO_IN_BATCHES = Contestant(
    "torch DataLoader, torchaudio on batches",
    torchaudio_audio.recordings_in_batches,
    ("torch", "torchaudio", "soundfile"),
    env="torchaudio",
)
SOUNDFILE = Contestant(
    "torch DataLoader, soundfile + SciPy",
    torch_soundfile_audio.recordings,
    ("torch", "soundfile", "scipy"),
    env="torchaudio",
    environment=ONE_THREAD,
)
LIBROSA = Contestant(
    "torch DataLoader, librosa",
    librosa_audio.recordings,
    ("torch", "librosa"),
    env="librosa",
    environment=ONE_THREAD,
)
DALI = Contestant("DALI, CPU", dali_audio.recordings, ("nvidia.dali",), env="dali")
TF_DATA = Contestant("tf.data", tfdata_audio.recordings, ("tensorflow",), env="tfdata")
SPDL, SPDL_THREADS = (
    Contestant(
        f"SPDL, SciPy, {kind}",
        prepare,
        ("spdl.io", "scipy"),
        env="spdl-audio",
        environment=ONE_THREAD,
    )
    for kind, prepare in (
        ("processes", spdl_audio.recordings_in_processes),
        ("threads", spdl_audio.recordings),
    )
)
# The first is what most scripts do. The batches of the others are compared with its batches.
PEERS = (TORCHAUDIO, TORCHAUDIO_IN_BATCHES, SOUNDFILE, LIBROSA, DALI, TF_DATA, SPDL, SPDL_THREADS)

PIPELINE = Contestant(
    "Penstock pipeline", penstock_audio.recordings, ("scipy", "soundfile"), ours=True
)
PROCESSES = Contestant(
    "Penstock pipeline, processes",
    penstock_audio.recordings_in_processes,
    ("scipy", "soundfile"),
    ours=True,
)


def run(options: Namespace) -> Result:
    with as_folder(options.data) as folder:
        paths = sound_files(folder)[0]
        if len(paths) < options.batch:
            raise SystemExit(
                f"{options.data} has {len(paths)} WAV or FLAC files in class folders, but a batch "
                f"needs {options.batch}: give more recordings, or a smaller --batch."
            )
        return _race(Recordings(folder, options.batch, options.workers), paths, options)


def _race(work: Recordings, paths: Sequence[str], options: Namespace) -> Result:
    contestants, notes = [*PEERS, PIPELINE, PROCESSES], []
    if any(Path(path).suffix.lower() != ".wav" for path in paths):
        contestants.remove(TF_DATA)
        notes.append("audio: tf.data is left out: it reads only WAV files")
    lanes = race(
        "audio",
        select(contestants, options.peers),
        work,
        Throughput(options.seconds, CHECKED, options.samples, options.warm_up),
        rounds=options.rounds,
        timeout=240 + options.warm_up + 10 * options.seconds,
    )
    title = (
        f"audio: {len(paths)} recordings to {work.seconds:g} s at {work.rate / 1000:g} kHz, "
        f"{work.mels} log-mels, SpecAugment, batches of {work.batch}, {work.workers} workers"
    )
    result = race_result("audio", title, lanes, COLUMNS, against_peers(1.0))
    return replace(result, notes=(*result.notes, *notes))


BENCHMARK = Benchmark(
    "audio",
    "WAV or FLAC folders, or Parquet, to log-mel batches: resample, crop, SpecAugment",
    run,
    needs_data=True,
    peers=peer_names(PEERS),
    data="folder of classes, each a folder of WAV or FLAC files; or a Parquet file with columns "
    "audio (bytes) and label, which is unpacked first",
    files=(".parquet",),
)
