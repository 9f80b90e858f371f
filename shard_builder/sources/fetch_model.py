"""Downloads a model from the Hugging Face hub: ``python -m shard_builder.sources.fetch_model REPOSITORY REVISION``."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fleet.errors import ModelError
from shard_builder.sources.child_work import Tell, WorkProgress, do_child_work
from shard_builder.sources.hub import Fetched, HubModel, first_files, weight_files

SPARE_DISK_BYTES = 64 << 20
_ATTEMPTS = 5
_PAUSE_S = 1.0
_REPORT_S = 0.2


def fetch_model(arguments: Sequence[str], tell: Tell) -> str:
    """The work of this process; its value is a ``Fetched`` in JSON."""
    model = HubModel(arguments[0], arguments[1])
    try:
        return msgspec.json.encode(_fetch(model, tell)).decode()
    except GatedRepoError:
        raise ModelError(
            f"{model} is gated: accept its terms at {constants.ENDPOINT}/{model.repository}, and log in on this PC "
            "with 'hf auth login' or set HF_TOKEN."
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{model.repository} has no revision '{model.revision}' on the hub.") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelError(
            f"There is no model at {model}, and no public one of that name at {constants.ENDPOINT}: check the name; "
            "for a private one log in with 'hf auth login' or set HF_TOKEN."
        ) from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, httpx.TransportError) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        reason = f" ({error})" if isinstance(error, httpx.TransportError) and str(error) else ""
        raise ModelError(
            f"{model} is not on this PC as a whole, and {why}{reason}: go online and try again, or give the folder of "
            "a model. What has arrived is kept."
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(
            f"{constants.ENDPOINT} answered with status {error.response.status_code} for {model}; try again later."
        ) from None
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0].rstrip(".")
        raise ModelError(f"{model} cannot be downloaded to {constants.HF_HUB_CACHE}: {reason}; try again.") from None


def _fetch(model: HubModel, tell: Tell) -> Fetched:
    try:
        info = HfApi().model_info(model.repository, revision=model.revision, files_metadata=True)
    except (OfflineModeIsEnabled, HfHubHTTPError, httpx.TransportError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            raise
        found = _find_cached(model)
        if found is None:
            raise
        return found
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    download = _Download(model, str(info.sha), tell)
    first = first_files(sizes)
    if not first:
        raise ModelError(f"{model} holds no language model: it has neither a config.json nor an OpenVINO model.")
    download.get({name: sizes[name] for name in first})
    weights = _weight_files(model, sizes, lambda name: (download.folder / name).read_bytes())
    missing = [name for name in weights if name not in sizes]
    if missing:
        raise ModelError(f"{model} is not complete on the hub: it lacks {missing[0]}.")
    download.get({name: sizes[name] for name in weights})
    return Fetched(str(download.folder), download.commit)


def _weight_files(model: HubModel, names: dict[str, int], read: Callable[[str], bytes]) -> list[str]:
    try:
        weights = weight_files(names, read)
    except ValueError:
        raise ModelError(f"The index of the weights of {model} is damaged.") from None
    if not weights:
        quantised = next((name for name in sorted(names) if name.endswith(".gguf")), None)
        hint = f"; download {quantised} or another GGUF file of it and give its path" if quantised else ""
        raise ModelError(f"{model} holds no weights that can be used: no safetensors, no pytorch_model.bin{hint}.")
    return weights


def _find_cached(model: HubModel) -> Fetched | None:
    """What an earlier download left, where it is whole."""
    configuration = try_to_load_from_cache(model.repository, "config.json", revision=model.revision)
    if not isinstance(configuration, str):
        return None
    folder = Path(configuration).parent
    names = {path.name: 0 for path in folder.iterdir()}
    weights = _weight_files(model, names, lambda name: (folder / name).read_bytes())
    return Fetched(str(folder), folder.name) if all(name in names for name in weights) else None


class _Download:
    """Gets files of one commit and tells how many bytes there are of how many.

    The first file is asked for by the revision's own name, from which the hub's cache learns which commit that is, for
    the day on which the PC is offline.
    """

    def __init__(self, model: HubModel, commit: str, tell: Tell) -> None:
        self._model = model
        self._tell = tell
        self._completed = 0
        """Bytes of files that have arrived whole."""
        self._current = 0
        self._total = 0
        self._told_s = 0.0
        self._revision = model.revision
        self.commit = commit
        self.folder = Path()

    def get(self, sizes: dict[str, int]) -> None:
        """Gets the files, those that are on the PC already without asking for them.

        Raises:
            ModelError: they do not fit on the disk.
        """
        wanted = {name: size for name, size in sizes.items() if not self._cached(name)}
        self._total += sum(wanted.values())
        self._check_disk(sum(wanted.values()))
        for name in sizes:
            self.folder = self._get(name)

    def _cached(self, name: str) -> bool:
        return isinstance(try_to_load_from_cache(self._model.repository, name, revision=self.commit), str)

    def _check_disk(self, needed: int) -> None:
        cache = Path(constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
        if free < needed + SPARE_DISK_BYTES:
            raise ModelError(
                f"{self._model} needs {needed:,} bytes on the disk of {cache}, which has {free:,} free; make room, or "
                "set HF_HOME to a folder on a larger disk."
            )

    def _get(self, name: str) -> Path:
        failures = 0
        while True:
            reached = self._current
            try:
                path = hf_hub_download(
                    self._model.repository, name, revision=self._revision, tqdm_class=self._meter_class()
                )
                break
            except httpx.TransportError:
                # A connection that broke off; the part that has arrived is kept, and the next attempt goes on from it.
                failures = failures + 1 if self._current <= reached else 1
                if failures == _ATTEMPTS:
                    raise
                time.sleep(_PAUSE_S)
        self._completed += self._current
        self._current = 0
        folder = Path(path).parent
        self.commit = self._revision = folder.name
        return folder

    def _advance(self) -> None:
        if time.monotonic() - self._told_s >= _REPORT_S:
            self._told_s = time.monotonic()
            done = min(self._completed + self._current, self._total)
            self._tell(WorkProgress(done / self._total if self._total else 1.0, done, self._total))

    def _meter_class(self) -> Any:
        download = self

        class Meter:
            """Takes the place of the hub's progress bar, a tqdm: shows nothing and counts the bytes."""

            def __init__(self, *, initial: int = 0, **_: Any) -> None:
                download._current = initial

            def __enter__(self) -> Meter:
                return self

            def __exit__(self, *_: object) -> None:
                return None

            def update(self, n: float | None = 1) -> None:
                download._current += int(n or 0)
                download._advance()

            def close(self) -> None:
                """There is nothing to close."""

        return Meter


if __name__ == "__main__":
    sys.exit(do_child_work(fetch_model))
