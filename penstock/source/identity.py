"""The identity of a loader's data, worked out once, in the background if the data is in files."""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

import numpy as np

from penstock.errors import FingerprintError
from penstock.fingerprint import fingerprint
from penstock.source.listing import REPORT_EVERY, Listing
from penstock.source.source import Source

_log = logging.getLogger("penstock.source")

PATIENCE: Final = 60.0
"""Seconds to wait for a file system that does not answer. A sample takes milliseconds, and up to a
second on a network."""

IdentityParts = dict[str, str | None]
"""Fingerprints of the parts of an identity; ``None``: not known, or it cannot be made."""


class DataIdentity:
    """The identity of the data of one loader, in up to three parts.

    - ``names``: the names of the files, their order, and their labels.
    - ``sample``: sizes and modification times of about a thousand files.
    - ``all``: ``Source.identity()``: sizes and modification times of all files; for data that is
      not in files, the only part.

    For files a thread works out one part after the other. It ends after ``sample`` if files are on
    a network file system, where all of them would take minutes. Each part is worked out once, so it
    describes the files as they were when the loader began.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._listing = source.listing
        self._parts: IdentityParts = {}
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._sampled = threading.Event()
        self._stopped = False
        self._done = False
        self._pid = os.getpid()

    def begin(self) -> None:
        """Start to work it out, if that can be done in the background."""
        if self._listing is None or self._done:
            return
        if os.getpid() != self._pid:
            # A fork of the process that began has no thread, and maybe a lock that stays locked.
            self._stopped, self._sampled = False, threading.Event()
            self._work(self._listing)
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, args=(self._listing,), name="penstock-identity", daemon=True
                )
                self._thread.start()

    def parts(self) -> IdentityParts:
        """The parts that are known, without waiting for sizes and times of all files."""
        if self._listing is None:
            if not self._parts:
                self._parts = {"all": self._identity()}
            return dict(self._parts)
        self.begin()
        self._sampled.wait(PATIENCE)
        return self._known()

    def complete(self, limit: float | None = None) -> IdentityParts:
        """All parts; after ``limit`` seconds those that are known by then."""
        parts = self.parts()
        if self._thread is None or self._listing is None:
            return parts
        self._thread.join(REPORT_EVERY if limit is None else limit)
        while limit is None and self.pending:
            files = f"{len(self._listing):,}"
            _log.warning("penstock: reading the sizes and times of %s files takes long", files)
            self._thread.join(REPORT_EVERY)
        return self._known()

    @property
    def pending(self) -> bool:
        """Whether a part is still being worked out."""
        return self._thread is not None and not self._done

    def renew(self) -> None:
        """Work out again what is known of data that is not in files: the user may have changed it.

        Files are not looked at again.
        """
        if self._listing is None and self._parts:
            self._parts = {"all": self._identity()}

    def close(self) -> None:
        """End the thread. What is known stays known."""
        self._stopped = True
        thread = self._thread
        # Garbage collection may close it in its own thread.
        if thread not in (None, threading.current_thread()) and os.getpid() == self._pid:
            # A file system that does not answer must not keep the program from ending.
            thread.join(1.0)

    def _identity(self) -> str | None:
        try:
            return self._source.identity()
        except FingerprintError:
            return None

    def _known(self) -> IdentityParts:
        if self._error is not None:
            # One object is raised each time, and its traceback would grow.
            raise self._error.with_traceback(None)
        # A copy in one step, because the thread adds parts.
        return dict(self._parts)

    def _work(self, listing: Listing) -> None:
        try:
            self._work_out(listing)
        except FingerprintError:
            # Labels that have no fingerprint: nothing is known of the data.
            self._parts = dict.fromkeys(("names", "sample", "all"))
        except Exception as error:  # raised where the identity is asked for
            self._error = error
        finally:
            self._done = True
            self._sampled.set()

    def _work_out(self, listing: Listing) -> None:
        identify = self._source.identify
        self._parts["names"] = identify(None)
        stats = listing.sample_stats()
        self._parts["sample"] = fingerprint(stats)
        if len(stats) == len(listing):
            self._parts["all"] = identify(stats)
            return
        self._sampled.set()
        if listing.on_network:
            return
        slices = []
        for stats in listing.slices():
            if self._stopped:
                return
            slices.append(stats)
        self._parts["all"] = identify(np.concatenate(slices))
