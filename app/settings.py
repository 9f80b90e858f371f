"""What the window remembers between starts, in a file of the data folder."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from PySide6.QtCore import QByteArray, QSettings

from app.looks.tokens import SchemeChoice

_RECENT_LIMIT = 8


class Settings:
    """Typed access to ``app.ini``. What is missing or broken there counts as never set."""

    def __init__(self, data_dir: Path) -> None:
        self._store = QSettings(str(data_dir / "app.ini"), QSettings.Format.IniFormat)

    @property
    def scheme(self) -> SchemeChoice:
        value = str(self._store.value("window/scheme", "auto"))
        return cast(SchemeChoice, value) if value in ("auto", "light", "dark") else "auto"

    @scheme.setter
    def scheme(self, choice: SchemeChoice) -> None:
        self._store.setValue("window/scheme", choice)

    @property
    def geometry(self) -> QByteArray:
        value = self._store.value("window/geometry")
        return value if isinstance(value, QByteArray) else QByteArray()

    @geometry.setter
    def geometry(self, value: QByteArray) -> None:
        self._store.setValue("window/geometry", value)

    @property
    def recent_models(self) -> list[str]:
        """Paths of models and shard folders, the last used first."""
        value = self._store.value("placement/recent", [])
        items = value if isinstance(value, list) else [value]
        return [item for item in items if isinstance(item, str) and item][:_RECENT_LIMIT]

    def remember_model(self, path: str) -> None:
        recent = [path, *(other for other in self.recent_models if other != path)]
        self._store.setValue("placement/recent", recent[:_RECENT_LIMIT])

    def save(self) -> None:
        self._store.sync()
