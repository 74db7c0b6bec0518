"""A page as a real Chromium shows it: its DOM, what its console says, and what it is asked.

Used by the tests of every page that the project writes or serves. `apt-get install
chromium-headless-shell` brings the browser. Each call starts one
of its own, which resolves no name but this machine's, and ends it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.programs import program

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--remote-debugging-port=0", "--window-size=1280,900"),
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1 , EXCLUDE localhost",
)
LIMIT_S = 60.0


@dataclass
class Page:
    """What was seen."""

    dom: str = ""
    console: list[str] = field(default_factory=list)  # messages, errors and what was blocked
    answers: dict[str, Any] = field(default_factory=dict)


def render(
    url: str,
    screenshot: Path | None = None,
    *,
    ready: str = "true",
    questions: Mapping[str, str] | None = None,
) -> Page:
    """Open the URL (http: or file:) and look, once it is loaded and `ready` holds.

    `ready` and each of the `questions` are JavaScript expressions, which a page's policy against
    scripts does not stop; the answers have the questions' names. `screenshot`: a PNG of the whole.
    """
    with _browser() as port:
        return asyncio.run(
            asyncio.wait_for(_look(port, url, screenshot, ready, questions or {}), LIMIT_S)
        )


@contextmanager
def _browser() -> Iterator[Path]:
    """The file in which a browser says how it is reached."""
    browser = program(*BROWSERS, install="apt-get install chromium-headless-shell")
    with tempfile.TemporaryDirectory(prefix="dflash-browser-", ignore_cleanup_errors=True) as home:
        command = [browser, *OPTIONS, f"--user-data-dir={home}", "about:blank"]
        silent = subprocess.DEVNULL
        child = subprocess.Popen(command, stdout=silent, stderr=silent, start_new_session=True)
        try:
            yield Path(home, "DevToolsActivePort")
        finally:  # its own group: the program is a shell script that waits for the browser
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


async def _look(
    port: Path, url: str, screenshot: Path | None, ready: str, questions: Mapping[str, str]
) -> Page:
    while not (port.is_file() and "\n" in port.read_text()):
        await asyncio.sleep(0.05)
    where = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json/list"
    async with aiohttp.ClientSession() as session:
        async with session.get(where) as reply:
            (target,) = [t for t in await reply.json() if t["type"] == "page"]
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            tab = _Tab(socket)
            await tab.open(url)
            while not await tab.ask(ready):
                await asyncio.sleep(0.1)
            for name, question in questions.items():
                tab.page.answers[name] = await tab.ask(question)
            tab.page.dom = await tab.ask("document.documentElement.outerHTML")
            if screenshot:
                options = {"captureBeyondViewport": True}
                shot = await tab.call("Page.captureScreenshot", options)
                screenshot.write_bytes(base64.b64decode(shot["data"]))
            return tab.page


class _Tab:
    """Speaks Chrome's DevTools protocol with one tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.page = Page()
        self._socket = socket
        self._num_sent = 0
        self._is_loaded = False

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable", {})
        self._is_loaded = False
        found = await self.call("Page.navigate", {"url": url})
        assert "errorText" not in found, f"{url}: {found['errorText']}"
        while not self._is_loaded:
            self._note(await self._next())

    async def ask(self, expression: str) -> Any:
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = await self.call("Runtime.evaluate", asked)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    async def call(self, method: str, params: Mapping[str, Any]) -> Any:
        self._num_sent += 1
        await self._socket.send_json({"id": self._num_sent, "method": method, "params": params})
        while (message := await self._next()).get("id") != self._num_sent:
            self._note(message)
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    async def _next(self) -> Any:
        return json.loads(await self._socket.receive_str())

    def _note(self, event: Any) -> None:
        name, facts = event.get("method"), event.get("params")
        if name == "Page.loadEventFired":
            self._is_loaded = True
        elif name == "Log.entryAdded":
            self.page.console.append(f"{facts['entry']['level']}: {facts['entry']['text']}")
        elif name == "Runtime.exceptionThrown":
            self.page.console.append(f"exception: {json.dumps(facts['exceptionDetails'])}")
        elif name == "Runtime.consoleAPICalled":
            said = " ".join(str(a.get("value", a.get("description"))) for a in facts["args"])
            self.page.console.append(f"{facts['type']}: {said}")
