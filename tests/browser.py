"""A real headless Chromium, driven over its DevTools protocol through a pipe: no port, no further package."""

import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


class Navigated(Exception):
    """The page was left while an expression was evaluated."""


class Browser:
    """One page. Everything that its scripts log, throw or are forbidden is in `complaints`."""

    def __init__(self, profile: Path):
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()

        def give_pipes() -> None:  # 3 is what Chromium reads, 4 what it writes
            first, second = os.dup(to_child), os.dup(from_child)
            os.dup2(first, 3)
            os.dup2(second, 4)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        self.process = subprocess.Popen(
            [CHROMIUM, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=give_pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self._buffer, self._number, self._session = b"", 0, None
        self.complaints: list[str] = []
        page = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params):
        """The result of a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise Navigated
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self, timeout: float = 20) -> dict:
        end = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            assert ready, "Chromium is silent"
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        kind, params = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["exception"].get("description", "an exception"))
        elif kind == "Runtime.consoleAPICalled":
            self.complaints.append(str([one.get("value") for one in params["args"]]))
        elif kind == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif kind == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {params['message']}")
        return message

    def run(self, script: str):
        """The value of a JavaScript expression; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, address: str) -> None:
        """Go to an address; returns when the page's own scripts have run."""
        assert "errorText" not in self.call("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(address)})")

    def wait(self, condition: str, timeout: float = 10):
        """Until an expression is true; returns its value."""
        end = time.monotonic() + timeout
        while True:
            with suppress(Navigated):
                if value := self.run(condition):
                    return value
            assert time.monotonic() < end, (condition, self.run("document.body?.innerText"), self.complaints)
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what a selector names."""
        find = f"const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
        middle = "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2];"
        box = self.run(f"(() => {{ {find} {middle} }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        for kind, given in (("keyDown", {"text": "\r"}), ("keyUp", {})):
            self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, **given)

    def choose_files(self, selector: str, *paths: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def close(self) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self.process.wait(10)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, 9)
            self.process.wait()
            os.close(self._out)
            os.close(self._in)


@contextmanager
def chromium(profile: Path):
    """A running Browser; skips where there is no Chromium."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
