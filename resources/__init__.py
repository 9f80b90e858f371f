"""Files that ship with the program: icons. Read through here, so that a zipped or frozen program finds them too."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def icon_svg(name: str) -> str:
    """The SVG text of ``icons/<name>.svg``.

    Line icons draw in ``currentColor``, which the caller replaces by the colour of the theme.

    Raises:
        FileNotFoundError: there is no such icon.
    """
    return files("resources").joinpath("icons", f"{name}.svg").read_text(encoding="utf-8")


def icon_path(name: str) -> Path:
    """Where the icon lies on the disk, for what can only read files (a style sheet)."""
    return Path(str(files("resources").joinpath("icons", f"{name}.svg")))


def icon_names() -> list[str]:
    """Names of all icons, sorted."""
    return sorted(
        entry.name.removesuffix(".svg")
        for entry in files("resources").joinpath("icons").iterdir()
        if entry.name.endswith(".svg")
    )
