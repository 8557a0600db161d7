"""The picture of a report in the documentation: `python docs/screenshot.py report.html docs/images/report.png`.

Takes what a reader sees first, and the texts with one token under the mouse, in one picture.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1120, "height": 2100})
    page.goto(Path(sys.argv[1]).resolve().as_uri())
    page.locator(".t.x[data-i]").nth(1).hover()
    page.screenshot(path=sys.argv[2])
    browser.close()
