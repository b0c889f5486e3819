"""A Chromium without a window, spoken to through pipes in its DevTools protocol; as a command, telling that there is none.

Needs no package of Python, and of the system only `chromium`.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 30
READY = "document.body && document.body.dataset.ready === 'yes'"
"""What a report says of itself when it is drawn."""
LOADED = "document.readyState === 'complete'"
"""So is any other page."""
# The browser reads from 3 and writes to 4.
START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"


def chromium() -> str | None:
    """Return where one is; None: there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def untried() -> str:
    """Return what is said where no page is opened; empty: there is a browser."""
    return "" if chromium() else "NOT TRIED: reports and the site in a browser. Install one: apt-get install chromium."


class LeftError(Exception):
    """The page was left while it was asked."""


@final
class Page:
    """A page that was opened from disk. A context manager."""

    def __init__(self, file: Path, *, ready: str = READY, dark: bool = False, size: tuple[int, int] = (1400, 1000)) -> None:
        self.errors: list[str] = []
        """What the console complained of, and exceptions."""
        self.requests: list[str] = []
        """All addresses that were asked for, the page's own first."""
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._heard: list[str] = []
        self._buffer = b""
        self._folder = TemporaryDirectory(ignore_cleanup_errors=True)
        executable = chromium()
        assert executable is not None
        theirs, self._to = os.pipe()
        self._from, written = os.pipe()
        # Not at 3 or 4, which are written over.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs, written)]
        for end in (theirs, written):
            os.close(end)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={self._folder.name}", "--window-size={},{}".format(*size)]
        command = [sys.executable, "-c", START, *map(str, ends), executable, *flags, "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in ends:
            os.close(end)
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.send(f"{domain}.enable")
        if dark:
            self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        self.open(file, ready=ready)

    def open(self, file: Path, *, ready: str = READY) -> None:
        """Open a page, and wait until it is ready."""
        url = file.resolve().as_uri()
        self.send("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && ({ready})")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while number not in self._answers:
            self._read()
        answer = self._answers.pop(number)
        if "navigated" in answer.get("error", {}).get("message", ""):
            raise LeftError
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true, on this page or on the one that a click leads to."""
        deadline = time.monotonic() + SECONDS
        while True:
            with suppress(LeftError):
                if self.evaluate(expression):
                    return
            assert time.monotonic() < deadline, f"{expression} did not come true; the console said {self.errors}"

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left" if kind != "mouseMoved" else "none", clickCount=1
            )

    def drag(self, x: float, y: float, by: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", buttons=1)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + by, y=y, button="left", buttons=1)
        self.send("Input.dispatchMouseEvent", type="mouseReleased", x=x + by, y=y, button="left")

    def wheel(self, x: float, y: float, by: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    def key(self, name: str) -> None:
        text = {"text": name} if len(name) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=name, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=name)

    def picture(self, file: Path) -> None:
        """Write what is seen into a .png file."""
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def png_at(self, selector: str, *, pixels: int = 4) -> bytes:
        """Return what is seen of an element's upper left corner, wherever it is on the page, as a .png."""
        box = f"(box => [box.x + scrollX, box.y + scrollY])(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        x, y = self.evaluate(box)
        clip = {"x": x, "y": y, "width": pixels, "height": pixels, "scale": 1}
        return base64.b64decode(self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"])

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._from, selectors.EVENT_READ)
            assert selector.select(SECONDS), "the browser says nothing"
        data = os.read(self._from, 1 << 20)
        assert data, "the browser has ended"
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
                continue
            parameters = message["params"]
            match message["method"]:
                case "Runtime.exceptionThrown":
                    self.errors.append(json.dumps(parameters["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if parameters["type"] != "log":
                    self.errors.append(json.dumps(parameters["args"]))
                case "Log.entryAdded":
                    self.errors.append(parameters["entry"]["text"])
                case "Network.requestWillBeSent":
                    self.requests.append(parameters["request"]["url"])


if __name__ == "__main__":
    print(untried())
