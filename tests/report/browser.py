"""Headless Chromium over its pipe of the DevTools protocol: pages as a reader sees them, without another package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")


class Browser:
    """One tab.

    Attributes:
        events: what Chromium reported, in order, as (method, parameters).
    """

    def __init__(self, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # the protocol's ends are descriptors 3 and 4 of Chromium
        moved = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        options += ["--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(
            ["bash", "-c", moved, CHROMIUM, *options],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._buffer, self._calls, self._session = b"", 0, {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._calls:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._read, 1 << 16)
            assert read, "Chromium is gone"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Load a file in a window of so many CSS pixels, in a light or dark color scheme."""
        self.events.clear()
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._message()

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def requests(self) -> list[str]:
        """URLs that the page asked for, itself included."""
        return [
            parameters["request"]["url"] for method, parameters in self.events if method == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[Any]:
        """What the console shows."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [parameters for method, parameters in self.events if method in kinds]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A Chromium that is gone afterwards."""
    tab = Browser(profile)
    try:
        yield tab
    finally:
        tab.process.terminate()
        tab.process.wait()
