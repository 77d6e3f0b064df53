"""Finds a Chromium to drive the web page with."""

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """The first on the PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)
