"""Undo and redo of changes to a placement draft."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtGui import QUndoCommand

from app.placement.draft import PlacementDraft


class ChangeDraft(QUndoCommand):
    """From one draft to another. Moves of the same boundary that follow each other become one step."""

    def __init__(
        self,
        text: str,
        before: PlacementDraft,
        after: PlacementDraft,
        show: Callable[[PlacementDraft], None],
        merge_key: int = -1,
    ) -> None:
        super().__init__(text)
        self._before = before
        self._after = after
        self._show = show
        self._merge_key = merge_key

    def undo(self) -> None:
        self._show(self._before)

    def redo(self) -> None:
        self._show(self._after)

    def id(self) -> int:
        return self._merge_key

    def mergeWith(self, other: QUndoCommand) -> bool:
        if not isinstance(other, ChangeDraft) or other.id() != self.id():
            return False
        self._after = other._after
        self.setObsolete(self._after == self._before)
        return True
