"""A real browser for tests of pages: headless Chromium, controlled over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page in one browser. ``complaints`` holds the errors and warnings of its console."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self._loaded = False
        self.complaints: list[str] = []
        self.asked: list[str] = []
        """Addresses that the page requested, without its own."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result

    def _next(self, patience: float = 60.0) -> dict[str, Any]:
        end = time.monotonic() + patience
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser is gone"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.asked.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["exceptionDetails"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.complaints.append(event["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(event["args"]))

    def open(self, page: Path, scheme: str, width: int = 1180, height: int = 900) -> None:
        """Load a file in the light or dark scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self._loaded = False
        self.complaints.clear()
        self.asked.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._next()
        self.asked = [address for address in self.asked if address != page.as_uri()]

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it returns."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path, whole: bool = True) -> None:
        image = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        path.write_bytes(base64.b64decode(image["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with its files in ``profile``, and end it afterwards."""
    assert CHROMIUM is not None
    to_read, from_us = os.pipe()
    to_us, to_write = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4: the shell puts our pipes there.
    command = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
    options = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
    )
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", CHROMIUM, *options, f"--user-data-dir={profile}"],
        pass_fds=(to_read, to_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        yield Browser(to_us, from_us)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_us)
        os.close(to_us)
