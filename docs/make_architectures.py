"""Cuts tiny random models of every architecture, and writes what the checks found to docs/architectures.md.

    python docs/make_architectures.py [--all] [--check] [--keep FOLDER] [NAME...]

Needs the ``export`` extra. Without a name it runs the named architectures; ``--all`` adds all others that the
installed transformers exports. Rows of what is not run stay as they are in the document. ``--check`` writes nothing and
fails where the document would change; ``--keep`` leaves the exported models in a folder and takes them from there.
Either way it fails where a cut is not exact, or one of the named architectures is not cut.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from architecture_table import Row, fill_page, read_rows, row_of
from further_architectures import ALL_ARCHITECTURES
from named_architectures import NAMED_ARCHITECTURES
from tiny_model import REFUSED_NAME, TinyModel

from fleet.errors import PacelineError
from shard_builder import build

DOCUMENT = Path(__file__).with_name("architectures.md")
STAGES = (2, 3)
WORKERS = 2


def main() -> int:
    """0 where all is exact and the document says so."""
    options = _options()
    models = _chosen(options.names, everything=options.all)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        shares = [models[worker::WORKERS] for worker in range(WORKERS)]
        with ThreadPoolExecutor(WORKERS) as pool:
            found = [row for rows in pool.map(lambda share: _rows(share, folder), shares) for row in rows]
    before = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    after = fill_page(read_rows(before) | {row.name: row.text for row in found})
    faults = [row.fault for row in found if row.fault]
    if not options.check:
        DOCUMENT.write_text(after, encoding="utf-8")
    elif after != before:
        faults.append(f"{DOCUMENT.name} is out of date; run {Path(__file__).name} and look at what changed.")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write docs/architectures.md.")
    parser.add_argument("--all", action="store_true", help="also what is not tried with every change")
    parser.add_argument("--check", action="store_true", help="fail where the document would change")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep exported models there, and take what it has")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a row of the page, such as 'falcon, ALiBi'")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in ALL_ARCHITECTURES]
    if unknown:
        parser.error(f"there is no row '{unknown[0]}'")
    return options


def _chosen(names: Sequence[str], *, everything: bool) -> list[TinyModel]:
    if names:
        return [ALL_ARCHITECTURES[name] for name in names]
    if not everything:
        return list(NAMED_ARCHITECTURES)
    return [model for model in ALL_ARCHITECTURES.values() if model.transformers in ("", version("transformers"))]


def _rows(models: Sequence[TinyModel], folder: Path) -> list[Row]:
    """The rows of some models; one is cut while the next is exported."""
    if not models:
        return []
    program = Path(__file__).with_name("export_tiny_models.py")
    command = [sys.executable, str(program), str(folder), *(model.name for model in models)]
    waiting = {model.name: model for model in models}
    rows = []
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as exporter,
    ):
        assert exporter.stdout is not None
        for line in exporter.stdout:
            model = waiting.pop(line.rstrip("\n"), None)
            if model is not None:
                rows.append(_cut(model, folder / model.name))
                print(rows[-1].text, flush=True)
        if exporter.wait() or waiting:
            complaints.seek(0)
            raise SystemExit(f"{program.name} ended before {', '.join(waiting)}: {complaints.read()[-2000:]}")
    return rows


def _cut(model: TinyModel, exported: Path) -> Row:
    refusal = exported / REFUSED_NAME
    if refusal.exists():
        return row_of(model, f"not exported: {refusal.read_text(encoding='utf-8')}")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return row_of(model, [build(exported, Path(scratch) / str(stages), stages=stages) for stages in STAGES])
        except PacelineError as error:
            return row_of(model, f"refused: {error}".replace(str(exported), "the model"))


if __name__ == "__main__":
    sys.exit(main())
