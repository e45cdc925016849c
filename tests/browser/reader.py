"""A reader of a page of commtrace, who sees what is drawn and hears of every error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

VIEWPORT: Final = {"width": 1280, "height": 900}


class Reader:
    """A page and everything that it did."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("dialog", self._dismiss)

    def _dismiss(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def load(self, path: Path) -> Reader:
        return self.go_to(path.as_uri())

    def go_to(self, address: str) -> Reader:
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready]")
        self.settle()
        return self

    def leave(self) -> None:
        """Make the page as a new one is, for the next reader."""
        page = self.page
        page.unroute_all()
        page.emulate_media(media="null", color_scheme="null")
        page.set_viewport_size(VIEWPORT)
        page.mouse.move(0, 0)
        page.evaluate("location.protocol === 'about:' || localStorage.clear()")
        page.goto("about:blank")
        for heard in (self.errors, self.requests, self.dialogs):
            heard.clear()

    def show(self, view: str) -> Reader:
        """Choose a view from the navigation, by its name in the address."""
        self.page.click(f"#views [data-view='{view}']")
        self.settle()
        return self

    def choose_step(self, index: int, step: int) -> None:
        self.page.select_option("#step", index=index)
        self.wait_for_step(step)

    def wait_for_step(self, step: int) -> None:
        """Wait until the data of a step are there and drawn."""
        self.page.wait_for_selector(f"#stage[data-step='{step}']")
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")

    def boxes(self, **wanted: Any) -> list[dict[str, Any]]:
        found = self.page.evaluate("window.commtraceViewer.visibleBoxes()")
        return [box for box in found if all(box[name] == value for name, value in wanted.items())]

    def window(self) -> dict[str, float]:
        window: dict[str, float] = self.page.evaluate("window.commtraceViewer.window()")
        return window

    def point_at(self, box: dict[str, Any]) -> None:
        canvas = self.page.locator("#timeline").bounding_box()
        self.page.mouse.move(canvas["x"] + box["x"] + box["width"] / 2, canvas["y"] + box["y"] + box["height"] / 2)
        self.settle()

    def tooltip(self) -> str:
        text: str = self.page.locator("#tooltip").inner_text()
        return text
