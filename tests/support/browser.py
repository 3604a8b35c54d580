"""A real browser for pages: headless Chromium, spoken to through its DevTools pipe, so that it needs no port."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """One tab of a running browser. `events` are what it reported so far."""

    def __init__(self, process: subprocess.Popen, sender: int, receiver: int) -> None:
        self.process, self.sender, self.receiver = process, sender, receiver
        self.events: list[dict[str, Any]] = []
        self._last, self._buffer, self.session = 0, b"", None

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run a command of the DevTools protocol and return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.sender, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self.receiver, 1 << 16)
            assert part, "the browser has gone"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int = 1200, dark: bool = False) -> None:
        """Show a file and wait until it is loaded."""
        if self.session is None:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def requests(self) -> list[str]:
        """The addresses that were asked for after the page itself, data in the page left out."""
        sent = [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in sent if not url.startswith(("file:", "data:"))]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console and of scripts."""
        names = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in names]


@contextlib.contextmanager
def running(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile; skips where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)")
    for_browser, sender = os.pipe()
    receiver, from_browser = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    command = [program, *flags, f"--user-data-dir={profile}", "about:blank"]
    # The protocol's pipe is file descriptors 3 and 4 of the browser.
    wrapper = ["bash", "-c", f'exec 3<&{for_browser} 4>&{from_browser}; exec "$@"', "browser", *command]
    process = subprocess.Popen(
        wrapper, pass_fds=(for_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(for_browser)
    os.close(from_browser)
    try:
        yield Browser(process, sender, receiver)
    finally:
        process.terminate()
        process.wait(60)
        os.close(sender)
        os.close(receiver)
