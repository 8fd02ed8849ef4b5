"""Rows of tokens of one length, packed from documents, with the places where documents begin."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.combine.lengths import lengths_by
from penstock.errors import PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.keyed import Key, Keyed, Keys
from penstock.operation import ArraySpec
from penstock.order.order import whole
from penstock.pipeline import By, Pipeline
from penstock.source.source import Source
from penstock.stops.road import OpenRoad, Road, draws_globally
from penstock.stops.stop import Fields, StageFailure
from penstock.tree import as_array

_Indices = NDArray[np.int64]


def pack_sequences(
    documents: Pipeline,
    length: int,
    *,
    on: str | int | None = None,
    by: By | None = None,
    split: bool = True,
    pad: int = 0,
    drop_last: bool = False,
    seed: int | None = 0,
) -> Pipeline:
    """Rows of ``length`` tokens, packed from the documents of a pipeline.

    A document is a flat array or list of token numbers, or ``on`` names the field of the sample
    that is. A row is a dict of arrays of ``length`` entries:

    - ``tokens``: the tokens of one or more documents, one after the other;
    - ``position_ids``: the place of each token in its document, which starts again in each row;
    - ``segment_ids``: the number of the document in the row, from 1 on; 0 is padding.

    ``split=True`` joins all documents and cuts them into rows, so that only the last row is padded;
    ``drop_last`` leaves that one out. ``split=False`` keeps documents whole (best fit, longest
    first) and pads the rows; only documents longer than a row are cut.

    ``seed`` shuffles the documents once, before they are packed; ``None`` keeps their order. The
    same rows come in every epoch, in the order of the loader. ``by`` gives the lengths of the
    documents, as in ``Pipeline.batch``; by default they are measured once, and kept on disk.

    >>> import numpy as np
    >>> import penstock as ps
    >>> texts = ps.from_dataset([np.arange(10, 15), np.arange(20, 22), np.arange(30, 34)])
    >>> rows = ps.pack_sequences(texts, 4, by=[5, 2, 4], seed=None)
    >>> for batch in rows.batch(3).loader(workers=0, shuffle=False):
    ...     print(batch["tokens"], batch["position_ids"][1], batch["segment_ids"][2])
    [[10 11 12 13]
     [14 20 21 30]
     [31 32 33  0]] [0 0 1 0] [1 1 1 0]
    """
    whole("length", length, 1)
    if not isinstance(documents, Pipeline):
        raise PipelineError(
            f"pack_sequences() got {type(documents).__name__}. Give a pipeline of documents, such "
            "as ps.from_dataset(...).map(tokenize, random=False)."
        )
    documents._check_above_batch("pack_sequences()")
    documents._check_indexed("pack_sequences()")
    for stop in documents.stops:
        if stop.random or stop.keeps or stop.repeats:
            kind = "random" if stop.random else "no map"
            raise PipelineError(
                f"pack_sequences() below {stop.name}, which is {kind}: rows are packed from "
                "documents that never change. Put it below pack_sequences(), or, if it is not "
                "random, give map(..., random=False)."
            )
    if draws_globally(documents.source):
        raise PipelineError(
            "pack_sequences() below a dataset that may be random: rows are packed from documents "
            "that never change. If it is not random, give from_dataset(..., random=False)."
        )
    reader = _Documents(documents, on)
    found = lengths_by(documents, by if by is not None else len if on is None else on)
    lengths = np.asarray(found)
    if lengths.shape != (len(documents.source),) or lengths.dtype.kind not in "iu":
        raise PipelineError(
            f"The lengths of pack_sequences() are {lengths.dtype} of shape {lengths.shape}, but "
            f"there are {len(documents.source)} documents. Give a whole number for each."
        )
    lengths = lengths.astype(np.int64)
    plan = (_split if split else _whole_documents)(lengths, length, seed)
    rows = len(plan.ends)
    if drop_last and split and rows and int(lengths.sum()) % length:
        rows -= 1
    if rows == 0:
        raise PipelineError(
            f"pack_sequences() makes no row of {length} tokens: the documents have "
            f"{int(lengths.sum())} tokens together. Give a smaller length."
        )
    return Pipeline(SequenceSource(reader, lengths, plan, rows, length, pad))


def cu_seqlens(segment_ids: Any) -> tuple[Any, int]:
    """Where documents begin in the flattened batch, for FlashAttention; and the longest of them.

    ``segment_ids``: those of a batch of rows, as NumPy array or torch tensor. The first result is
    an int32 array of the same kind: 0, the ends of all documents, and the number of all tokens.
    Padding counts as a document of its own.

    >>> import numpy as np
    >>> ends, longest = cu_seqlens(np.array([[1, 1, 2, 2], [1, 1, 1, 0]]))
    >>> ends.tolist(), longest
    ([0, 2, 4, 7, 8], 3)
    """
    tensor = hasattr(segment_ids, "detach")
    found = np.asarray(segment_ids.detach().cpu() if tensor else segment_ids)
    rows = np.atleast_2d(found)
    begins = np.ones(rows.shape, dtype=bool)
    begins[:, 1:] = rows[:, 1:] != rows[:, :-1]
    ends = np.append(np.flatnonzero(begins), rows.size).astype(np.int32)
    longest = int(np.diff(ends).max()) if rows.size else 0
    if tensor:
        torch: Any = sys.modules["torch"]
        return torch.from_numpy(ends).to(segment_ids.device), longest
    return ends, longest


class _RowPlan:
    """Which pieces of documents make up each row.

    Piece i is ``counts[i]`` tokens of document ``documents[i]`` from ``starts[i]`` on. The pieces
    of row r end before number ``ends[r]``.
    """

    def __init__(
        self, documents: _Indices, starts: _Indices, counts: _Indices, ends: _Indices
    ) -> None:
        self.documents, self.starts, self.counts, self.ends = documents, starts, counts, ends

    def row(self, number: int) -> list[tuple[int, int, int]]:
        """The pieces of a row: (document, start, count)."""
        pieces = slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))
        columns = (self.documents[pieces], self.starts[pieces], self.counts[pieces])
        return list(zip(*(column.tolist() for column in columns), strict=True))


def _shuffled(count: int, seed: int | None) -> _Indices:
    if seed is None:
        return np.arange(count, dtype=np.int64)
    return Keyed(seed, "sequences").fresh(Key(0)).permutation(count).astype(np.int64)


def _split(lengths: _Indices, length: int, seed: int | None) -> _RowPlan:
    """All documents joined, and cut into rows."""
    order = _shuffled(len(lengths), seed)
    order = order[lengths[order] > 0]
    ends = np.cumsum(lengths[order])
    total = int(ends[-1]) if len(ends) else 0
    # A piece ends where a document or a row ends.
    cuts = np.union1d(ends, np.append(np.arange(length, total, length), total)).astype(np.int64)
    begins = np.concatenate(([0], cuts[:-1]))[: len(cuts)]
    place = ends.searchsorted(begins, side="right")
    starts = begins - np.concatenate(([0], ends))[place] if len(ends) else begins
    rows = np.arange(length, total + length, length)
    return _RowPlan(
        order[place] if len(ends) else order,
        starts,
        cuts - begins,
        cuts.searchsorted(np.minimum(rows, total), side="left") + 1,
    )


def _whole_documents(lengths: _Indices, length: int, seed: int | None) -> _RowPlan:
    """Documents kept whole: the longest first, each into the fullest row that has room for it."""
    order = _shuffled(len(lengths), seed)
    order = order[lengths[order] > 0]
    per_document = -(-lengths[order] // length)
    documents = np.repeat(order, per_document)
    number = np.arange(len(documents)) - np.repeat(
        np.cumsum(per_document) - per_document, per_document
    )
    starts = number * length
    counts = np.minimum(length, lengths[documents] - starts)
    by_length = np.argsort(-counts, kind="stable")
    room: list[int] = []
    """The free places of rows that have some, each number once, in order."""
    rows_with: dict[int, list[int]] = {}
    row_of = np.empty(len(documents), dtype=np.int64)
    made = 0
    for piece, count in zip(by_length.tolist(), counts[by_length].tolist(), strict=True):
        place = bisect_left(room, count)
        if place < len(room):
            free = room[place]
            row = rows_with[free].pop()
            if not rows_with[free]:
                del room[place], rows_with[free]
        else:
            free, row = length, made
            made += 1
        row_of[piece] = row
        left = free - count
        if left:
            if left not in rows_with:
                insort(room, left)
                rows_with[left] = []
            rows_with[left].append(row)
    sequence = by_length[np.argsort(row_of[by_length], kind="stable")]
    ends = np.cumsum(np.bincount(row_of, minlength=made))
    return _RowPlan(documents[sequence], starts[sequence], counts[sequence], ends)


class _Documents:
    """The documents of a pipeline by index; each thread has a road of its own."""

    def __init__(self, pipeline: Pipeline, on: str | int | None) -> None:
        self.pipeline, self.on = pipeline, on
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"pipeline": self.pipeline, "on": self.on}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read(self, indices: list[int]) -> list[NDArray[Any]]:
        road: OpenRoad | None = getattr(self._local, "road", None)
        if road is None:
            compiled: Road = self.pipeline.road(0)
            road = self._local.road = compiled.open()
        road.begin()
        try:
            samples = road.get(Keys(0, indices))
        except StageFailure as failure:
            if len(indices) > 1:
                return [document for index in indices for document in self.read([index])]
            cause = failure.__cause__
            raise SourceError(
                f"the document {self.pipeline.source.name(indices[0])} failed in {failure.stage}: "
                f"{type(cause).__name__}: {cause}"
            ) from cause
        pairs = zip(samples, indices, strict=True)
        return [self._tokens(sample, index) for sample, index in pairs]

    def _tokens(self, sample: Any, index: int) -> NDArray[Any]:
        value = sample if self.on is None else sample[self.on]
        array = as_array(value)
        if array is None and isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            array = np.asarray(value)
        if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
            found = type(value).__name__ if array is None else f"{array.dtype} {array.shape}"
            raise SourceError(
                f"the document {self.pipeline.source.name(index)} is {found}. pack_sequences() "
                "packs flat arrays of whole numbers; name the field of the sample with on=, or "
                "tokenize in a map above it."
            )
        return array

    @property
    def threadsafe(self) -> bool:
        return self.pipeline.source.threadsafe and all(s.threadsafe for s in self.pipeline.stops)


class SequenceSource(Source):
    """Rows of tokens; see ``pack_sequences``."""

    def __init__(
        self,
        documents: _Documents,
        lengths: _Indices,
        plan: _RowPlan,
        rows: int,
        length: int,
        pad: int,
    ) -> None:
        self._documents, self._lengths = documents, lengths
        self._plan, self._rows = plan, rows
        self._length, self._pad = length, pad
        first, _, _ = plan.row(0)[0]
        self._dtype = documents.read([first])[0].dtype
        bounds = np.iinfo(self._dtype)
        if not bounds.min <= pad <= bounds.max:
            raise PipelineError(
                f"pad is {pad}, which does not fit into {self._dtype}, the type of the tokens. "
                "Give another number, or tokens of a larger type."
            )
        # Class variables in Source; here they depend on the documents.
        self.__dict__["threadsafe"] = documents.threadsafe
        source, stops = documents.pipeline.source, documents.pipeline.stops
        self.__dict__["runs_user_code"] = source.runs_user_code or bool(stops)

    def __len__(self) -> int:
        return self._rows

    def read(self, indices: Sequence[int]) -> list[Any]:
        rows = [self._plan.row(int(index)) for index in indices]
        wanted = list(dict.fromkeys(piece[0] for row in rows for piece in row))
        documents = dict(zip(wanted, self._documents.read(wanted), strict=True))
        for document, tokens in documents.items():
            stated = self._lengths.item(document)
            if len(tokens) != stated:
                name = self._documents.pipeline.source.name(document)
                raise SourceError(
                    f"the document {name} has {len(tokens)} tokens, but by its length {stated}. "
                    "Correct the lengths given with by=. To shorten documents, use a map above "
                    "pack_sequences()."
                )
        return [self._row(row, documents) for row in rows]

    def _row(
        self, pieces: list[tuple[int, int, int]], documents: dict[int, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        length = self._length
        tokens = np.full(length, self._pad, dtype=self._dtype)
        positions = np.empty(length, dtype=np.int32)
        segments = np.zeros(length, dtype=np.int32)
        at = 0
        for number, (document, start, count) in enumerate(pieces, start=1):
            part = documents[document][start : start + count]
            if part.dtype != self._dtype and not np.can_cast(part.dtype, self._dtype):
                name = self._documents.pipeline.source.name(document)
                raise SourceError(
                    f"the document {name} has tokens of type {part.dtype}, and the first document "
                    f"{self._dtype}, which cannot hold all of them. Give all documents one type "
                    "with a map above pack_sequences()."
                )
            end = at + count
            tokens[at:end], positions[at:end], segments[at:end] = part, np.arange(count), number
            at = end
        positions[at:] = np.arange(length - at)
        return {"tokens": tokens, "position_ids": positions, "segment_ids": segments}

    def name(self, index: int) -> str:
        document, start, _ = self._plan.row(index)[0]
        source = self._documents.pipeline.source
        return f"row {index}, which begins with token {start} of {source.name(document)}"

    def identity(self) -> str:
        pipeline, plan = self._documents.pipeline, self._plan
        stops = [stop.fingerprint() for stop in pipeline.stops]
        pieces = (plan.documents, plan.starts, plan.counts, plan.ends)
        how = (self._documents.on, self._length, self._pad, self._rows)
        return fingerprint(("sequences", pipeline.source.identity(), stops, pieces, how))

    def fields(self) -> Fields:
        shape = (self._length,)
        return {
            "tokens": ArraySpec.of(shape, self._dtype),
            "position_ids": ArraySpec.of(shape, np.int32),
            "segment_ids": ArraySpec.of(shape, np.int32),
        }
