"""A headless Chromium, driven through the WebDriver protocol over plain HTTP: no package needed."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.http.served import free_port

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "" if CHROMIUM and CHROMEDRIVER else "needs chromium and chromedriver on the PATH"


class Browser:
    """One window, from its making to `close`."""

    def __init__(self) -> None:
        assert CHROMEDRIVER is not None and CHROMIUM is not None
        port = free_port()
        self._driver = subprocess.Popen(
            [CHROMEDRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
        try:
            self._await_driver()
            arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            options = {
                "binary": CHROMIUM,
                "args": [*arguments, "--disable-dev-shm-usage", "--no-proxy-server"],
            }
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{made['sessionId']}"
        except BaseException:
            self._end_driver()
            raise

    def open(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Load a page in a window of this size, for somebody who prefers this colour scheme."""
        mobile = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.devtools("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})
        self._post(f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """The value a function body returns in the page."""
        return self._post(f"{self._session}/execute/sync", {"script": script, "args": []})

    def text(self, selector: str) -> str:
        return str(self.run(f"return document.querySelector({selector!r})?.innerText ?? ''"))

    def until(self, script: str, within_s: float = 20.0) -> Any:
        """Wait for a function body to return something true in the page."""
        end_s = time.monotonic() + within_s
        while not (value := self.run(script)):
            assert time.monotonic() < end_s, f"never true: {script}"
            time.sleep(0.05)
        return value

    def press(self, *keys: str) -> None:
        """Keys one after the other, to whatever has the focus; "ctrl+x" holds one down."""
        names = {"tab": "\ue004", "enter": "\ue007", "ctrl": "\ue009", "space": " "}
        actions = []
        for key in keys:
            chord = [names.get(part, part) for part in key.split("+")]
            actions += [{"type": "keyDown", "value": part} for part in chord]
            actions += [{"type": "keyUp", "value": part} for part in reversed(chord)]
        source = {"type": "key", "id": "keyboard", "actions": actions}
        self._post(f"{self._session}/actions", {"actions": [source]})

    def problems(self) -> list[str]:
        """Errors and warnings the page has logged since the last call."""
        entries = self._post(f"{self._session}/se/log", {"type": "browser"})
        return [e["message"] for e in entries if e["level"] in ("SEVERE", "WARNING")]

    def save_screenshot(self, path: Path) -> None:
        """The whole page, however long."""
        wanted = {"captureBeyondViewport": True, "format": "png"}
        shot = self.devtools("Page.captureScreenshot", wanted)
        path.write_bytes(base64.b64decode(shot["data"]))

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        body = {"cmd": command, "params": parameters}
        return self._post(f"{self._session}/goog/cdp/execute", body)

    def close(self) -> None:
        with suppress(httpx.HTTPError):
            self._http.delete(self._session)
        self._end_driver()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def _await_driver(self) -> None:
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            with suppress(httpx.TransportError):
                if self._http.get("/status").json()["value"]["ready"]:
                    return
            time.sleep(0.05)
        raise AssertionError("chromedriver does not start")

    def _end_driver(self) -> None:
        self._http.close()
        self._driver.terminate()
        self._driver.wait(20)
