"""The contestants of ``storage``: each reads photographs and labels, undecoded, for one epoch.

Each function takes a ``Stored``, imports its modules and returns a function that makes the loader.
Batches are pairs of a list of contents and of labels.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Make

BUFFER = 256
"""Samples that WebDataset and Hugging Face datasets shuffle. Filling it delays the first batch."""

BUCKET = "bucket"


@dataclass(frozen=True)
class Stored:
    """Photographs in ``root``: as files, tar, MDS and LitData's chunks in folders of these names.

    ``endpoint``: the object server with these folders in its bucket; empty: read from the disk.
    """

    root: Path
    samples: int
    batch: int
    workers: int
    endpoint: str = ""

    def place(self, form: str) -> str:
        return f"s3://{BUCKET}/{form}" if self.endpoint else str(self.root / form)

    @property
    def storage(self) -> dict[str, str] | None:
        if not self.endpoint:
            return None
        return {
            "endpoint": self.endpoint,
            "region": REGION,
            "access_key_id": ACCESS,
            "secret_access_key": SECRET,
        }


REGION, ACCESS, SECRET = "us-east-1", "key", "secret"


def variables(endpoint: str) -> dict[str, str]:
    """Variables by which all clients of S3 find the server."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": endpoint,
        "S3_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "HF_HUB_OFFLINE": "1",
    }


# ---------------------------------------------------------------------------------------- Penstock


def penstock_files(stored: Stored) -> Make:
    import penstock as ps

    source = ps.from_folder(stored.place("files"), storage=stored.storage)
    return lambda: source.batch(stored.batch).loader(workers=stored.workers)


def penstock_tar(stored: Stored) -> Make:
    return _penstock_shards(stored, "tar")


def penstock_mds(stored: Stored) -> Make:
    return _penstock_shards(stored, "mds")


def _penstock_shards(stored: Stored, form: str) -> Make:
    import penstock as ps

    read = ps.from_tar if form == "tar" else ps.from_mds
    source = read(stored.place(form), storage=stored.storage)
    return lambda: source.batch(stored.batch).loader(
        workers=stored.workers, order=ps.Reservoir(window=4 * BUFFER)
    )


# ----------------------------------------------------------------------------- one object a sample


def _files(stored: Stored) -> list[tuple[str, int]]:
    """Paths below the folder of files, and the number of the class of each."""
    root = stored.root / "files"
    classes = sorted(path.name for path in root.iterdir())
    return [
        (f"{name}/{file.name}", label)
        for label, name in enumerate(classes)
        for file in sorted((root / name).iterdir())
    ]


class _Photographs:
    """A map-style dataset of files, from the disk or with s3fs."""

    def __init__(self, stored: Stored) -> None:
        self._files = _files(stored)
        self._place = stored.place("files")
        self._remote = bool(stored.endpoint)
        self._store: Any = None

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        path, label = self._files[index]
        if not self._remote:
            return Path(self._place, path).read_bytes(), label
        if self._store is None:  # in the worker: its threads do not survive a fork
            import s3fs

            self._store = s3fs.S3FileSystem()
        return self._store.cat_file(f"{self._place}/{path}"), label


def pairs(rows: list[tuple[bytes, int]]) -> tuple[list[bytes], list[int]]:
    contents, labels = zip(*rows, strict=True)
    return list(contents), list(labels)


def torch_files(stored: Stored) -> Make:
    """torch's DataLoader, with s3fs for objects."""
    from torch.utils.data import DataLoader

    if stored.endpoint:
        import s3fs  # noqa: F401

    data: Any = _Photographs(stored)
    return lambda: DataLoader(
        data, batch_size=stored.batch, shuffle=True, num_workers=stored.workers, collate_fn=pairs
    )


class _Connected:
    """The content and label of an object of s3torchconnector, read in the worker."""

    def __init__(self, stored: Stored) -> None:
        classes = sorted({path.partition("/")[0] for path, _ in _files(stored)})
        self._labels = {name: label for label, name in enumerate(classes)}

    def __call__(self, found: Any) -> tuple[bytes, int]:
        return found.read(), self._labels[found.key.split("/")[-2]]


def torch_connector(stored: Stored) -> Make:
    """torch's DataLoader with Amazon's connector, as its guide has it."""
    from s3torchconnector import S3ClientConfig, S3MapDataset
    from torch.utils.data import DataLoader

    def make() -> Any:
        data = S3MapDataset.from_prefix(
            stored.place("files"),
            region=REGION,
            endpoint=stored.endpoint,
            transform=_Connected(stored),
            s3client_config=S3ClientConfig(force_path_style=True),
        )
        return DataLoader(
            data,
            batch_size=stored.batch,
            shuffle=True,
            num_workers=stored.workers,
            collate_fn=pairs,
        )

    return make


# ------------------------------------------------------------------------------------------ shards


def _shards(stored: Stored) -> list[str]:
    return sorted(path.name for path in (stored.root / "tar").glob("*.tar"))


def webdataset_tar(stored: Stored) -> Make:
    """Each shard once in an epoch, through curl, as WebDataset reads URLs."""
    import webdataset

    if stored.endpoint:
        top = f"pipe:curl -s -f {stored.endpoint}/{BUCKET}/tar"
    else:
        top = str(stored.root / "tar")
    urls = [f"{top}/{name}" for name in _shards(stored)]

    def make() -> Any:
        data = (
            webdataset.WebDataset(urls, shardshuffle=len(urls))
            .shuffle(BUFFER)
            .to_tuple("jpg", "cls")
            .batched(stored.batch, collation_fn=pairs)
        )
        return webdataset.WebLoader(
            data, batch_size=None, shuffle=False, num_workers=stored.workers
        )

    return make


def mosaic_mds(stored: Stored) -> Make:
    """MosaicML Streaming, with a local directory for the shards that it downloads."""
    from benchmarks.peers.torchvision_pil import import_torchvision

    import_torchvision()
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    def make() -> Any:
        options: dict[str, Any] = {"local": stored.place("mds")}
        if stored.endpoint:
            local = tempfile.mkdtemp()
            options = {"remote": stored.place("mds"), "local": local}
        data = StreamingDataset(**options, shuffle=True, batch_size=stored.batch)
        return DataLoader(
            data, batch_size=stored.batch, num_workers=stored.workers, collate_fn=_of_dicts
        )

    return make


def _of_dicts(rows: list[dict[str, Any]]) -> tuple[list[bytes], list[int]]:
    # LitData gives views of its chunks, which cannot be sent to another process.
    return [bytes(row["image"]) for row in rows], [row["label"] for row in rows]


def write_litdata(stored: Stored) -> None:
    from benchmarks.peers import litdata_loader

    litdata_loader._import()
    from litdata import optimize

    optimize(
        fn=litdata_loader._sample,
        inputs=[(str(stored.root / "files" / path), label) for path, label in _files(stored)],
        output_dir=str(stored.root / "litdata"),
        chunk_bytes=litdata_loader.CHUNK,
        num_workers=stored.workers,
    )


def litdata_chunks(stored: Stored) -> Make:
    """LitData with chunks of its own, which hold the same files."""
    from benchmarks.peers import litdata_loader

    litdata_loader._import()
    from litdata import StreamingDataLoader, StreamingDataset

    if not (stored.root / "litdata" / "index.json").exists():
        raise NotImplementedError("the data were not converted")

    def make() -> Any:
        options: dict[str, Any] = {}
        if stored.endpoint:
            options["storage_options"] = {"endpoint_url": stored.endpoint}
            options["cache_dir"] = tempfile.mkdtemp()
        data = StreamingDataset(stored.place("litdata"), shuffle=True, **options)
        return StreamingDataLoader(
            data, batch_size=stored.batch, num_workers=stored.workers, collate_fn=_of_dicts
        )

    return make


def huggingface_tar(stored: Stored) -> Make:
    """Hugging Face datasets in streaming mode, over the same tar shards."""
    from datasets import Image, load_dataset
    from torch.utils.data import DataLoader

    options: dict[str, Any] = {}
    if stored.endpoint:
        options["storage_options"] = {"endpoint_url": stored.endpoint}
    top = stored.place("tar")
    files = {"train": [f"{top}/{name}" for name in _shards(stored)]}

    def make() -> Any:
        data = load_dataset(
            "webdataset", data_files=files, split="train", streaming=True, **options
        )
        data = data.cast_column("jpg", Image(decode=False)).shuffle(seed=0, buffer_size=BUFFER)
        return DataLoader(
            data, batch_size=stored.batch, num_workers=stored.workers, collate_fn=_of_images
        )

    return make


def _of_images(rows: list[dict[str, Any]]) -> tuple[list[bytes], list[int]]:
    return [row["jpg"]["bytes"] for row in rows], [int(row["cls"]) for row in rows]


def cold(root: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for file in root.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def batches_of(loader: Any) -> Iterator[tuple[list[bytes], Any]]:
    """Contents and labels of each batch."""
    for batch in loader:
        if isinstance(batch, dict):
            yield list(batch["image"]), batch["label"]
        else:
            contents, labels = batch
            yield list(contents), labels


def one_epoch(prepare: Any, stored: Stored, seconds: float) -> dict[str, float]:
    """Read one epoch, or as much as ``seconds`` allow. Runs in a fresh process.

    ``first``: seconds from making the loader to its first batch. ``rate``: bytes a second from
    making the loader to its last batch: what is fetched before the first batch takes time too.
    """
    make = prepare(stored)
    started = time.perf_counter()
    loader = make()
    samples = size = 0
    first = 0.0
    for contents, labels in batches_of(loader):
        if len(contents) != len(labels):
            raise AssertionError(f"{len(contents)} contents and {len(labels)} labels in a batch")
        samples += len(contents)
        size += sum(map(len, contents))
        elapsed = time.perf_counter() - started
        first = first or elapsed
        if elapsed > seconds:
            break
    rate = size / (time.perf_counter() - started)
    return {"first": first, "rate": rate, "samples": float(samples), "bytes": float(size)}
