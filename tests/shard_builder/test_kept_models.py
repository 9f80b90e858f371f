"""What conversions leave in the data folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.errors import ModelError
from shard_builder.sources.kept_models import keep


def test_a_refused_conversion_leaves_no_folder_for_it(tmp_path: Path) -> None:
    def refuse(scratch: Path) -> None:
        (scratch / "half").write_text("half")
        raise ModelError("No.")

    kept = tmp_path / "home" / "converted-models"
    for needed_bytes in (0, 1 << 60):
        with pytest.raises(ModelError):
            keep(kept / "model", needed_bytes, "Converting it", refuse)
        assert not list(tmp_path.iterdir())
    keep(kept / "model", 0, "Converting it", lambda scratch: None)
    with pytest.raises(ModelError):
        keep(kept / "other", 0, "Converting it", refuse)
    assert [path.name for path in kept.iterdir()] == ["model"]
