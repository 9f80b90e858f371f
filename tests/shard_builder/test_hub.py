"""Downloads models by their id, from a server on loopback that plays the Hugging Face hub.

The protocol as ``huggingface_hub`` speaks it: ``GET /api/models/ID/revision/REVISION`` for what there is, ``HEAD`` and
``GET /ID/resolve/REVISION/FILE`` for the files, errors named in the header ``X-Error-Code``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.build_messages import BuildProgress
from fleet.data_dir import HOME_VARIABLE
from fleet.errors import CancelledError, ModelError
from shard_builder import build
from shard_builder.sources.child_work import WorkProgress
from shard_builder.sources.hub import HubModel, fetch, first_files, parse_hub_id, weight_files

ID = "people/tiny"
COMMIT = "c0ffee" + "0" * 34
_API = re.compile(r"/api/models/([^/]+/[^/?]+)/revision/([^/?]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """Repositories by id, each a folder, and what happens to requests.

    ``breaks`` says after how many bytes of a file the connection is cut, once.
    """

    repositories: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    breaks: dict[str, int] = field(default_factory=dict)
    status: int = 200
    asked: list[str] = field(default_factory=list)
    """Method, file and range of every request for a file."""
    endpoint: str = ""


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """The hub at ``hub.endpoint`` while the block runs."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing: the tests look at ``Hub.asked``."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        listing, file = _API.fullmatch(self.path.partition("?")[0]), _FILE.fullmatch(self.path)
        found = listing or file
        folder = self.hub.repositories.get(found[1]) if found else None
        if self.hub.status != 200:
            self._fail(self.hub.status, "")
        elif found is None or folder is None:
            # As the hub does it, so that nobody learns which private repositories there are.
            self._fail(401, "RepoNotFound")
        elif found[2] not in ("main", COMMIT):
            self._fail(404, "RevisionNotFound")
        elif listing:
            self._list(found[1], folder)
        elif found[1] in self.hub.gated:
            self._fail(403, "GatedRepo")
        elif not (folder / found[3]).is_file():
            self._fail(404, "EntryNotFound")
        else:
            self._send_file(folder / found[3])

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self, repository: str, folder: Path) -> None:
        siblings = [
            {"rfilename": path.relative_to(folder).as_posix(), "size": path.stat().st_size}
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
        body = json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, path: Path) -> None:
        content = path.read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(found[1]) if found else 0
        self.hub.asked.append(f"{self.command} {path.name} {start}")
        self.send_response(206 if found else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        if found:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = self.hub.breaks.pop(path.name, len(content))
        self.wfile.write(content[start:end])
        if end < len(content):
            self.close_connection = True


@pytest.fixture
def hub(tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one OpenVINO model and files that nobody needs; this PC's cache is empty."""
    folder = tiny_model()
    (folder / "README.md").write_text("# Tiny")
    (folder / "LICENSE").write_text("Do as you like.")
    (folder / "model.safetensors").write_bytes(b"\0" * 100_000)
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"\0" * 100)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-cache"))
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with serve(Hub({ID: folder})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running


def get(text: str, heard: list[WorkProgress] | None = None) -> Path:
    model = parse_hub_id(text)
    assert model is not None
    fetched = fetch(model, (heard if heard is not None else []).append, lambda: False)
    assert fetched.commit == COMMIT
    return Path(fetched.folder)


def test_only_what_is_needed_is_downloaded_once_and_found_again_offline(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[WorkProgress] = []
    folder = get(ID, heard)
    names = {path.name for path in folder.iterdir()}
    assert {"openvino_model.xml", "openvino_model.bin", "config.json", "LICENSE"} <= names
    assert not names & {"README.md", "model.safetensors", "onnx"}
    assert heard[-1].bytes_done <= heard[-1].bytes_total
    asked = len(hub.asked)
    assert get(f"{ID}@{COMMIT}") == folder
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert get(ID) == folder
    assert len(hub.asked) == asked


def test_a_download_goes_on_where_the_connection_broke_off(hub: Hub) -> None:
    # huggingface_hub writes 10 MB at a time, so that much of what had arrived is kept.
    whole = os.urandom(24 << 20)
    (hub.repositories[ID] / "openvino_model.bin").write_bytes(whole)
    hub.breaks["openvino_model.bin"] = 15 << 20
    folder = get(ID)
    assert (folder / "openvino_model.bin").read_bytes() == whole
    first, second = (asked for asked in hub.asked if asked.startswith("GET openvino_model.bin"))
    assert first == "GET openvino_model.bin 0"
    assert second == f"GET openvino_model.bin {10 << 20}"


def test_a_model_is_built_by_its_id(hub: Hub, tmp_path: Path) -> None:
    heard: list[BuildProgress] = []
    manifest = build(ID, tmp_path / "shards", stages=2, progress=heard.append)
    assert manifest.name == "tiny"
    assert "LICENSE" in {entry.name for entry in manifest.tokenizer}
    source = json.loads((tmp_path / "shards" / "source.json").read_bytes())
    assert source["model"] == f"{ID}@{COMMIT}"
    assert [one.fraction for one in heard] == sorted(one.fraction for one in heard)
    assert any(one.phase == "download" for one in heard)


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        ("people/other", {}, "There is no model at people/other, and no public one of that name"),
        (f"{ID}@old", {}, "has no revision 'old'"),
        (ID, {"gated": {ID}}, "people/tiny is gated: accept its terms at http://"),
        (ID, {"status": 503}, "answered with status 503"),
    ],
)
def test_what_the_hub_refuses_is_said_plainly(
    hub: Hub, tmp_path: Path, text: str, change: dict[str, object], message: str
) -> None:
    for name, value in change.items():
        setattr(hub, name, value)
    with pytest.raises(ModelError, match=message):
        build(text, tmp_path / "shards", stages=2)
    assert not (tmp_path / "shards").exists()


def test_no_network_and_no_copy(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"not on this PC as a whole, and http://127.0.0.1:9 cannot be reached"):
        get(ID)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        get(ID)


def test_a_download_can_be_stopped(hub: Hub) -> None:
    with pytest.raises(CancelledError):
        fetch(HubModel(ID), lambda _: None, lambda: True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubModel("org/name")),
        ("org/name@v1.0", HubModel("org/name", "v1.0")),
        ("org/name@refs/pr/1", HubModel("org/name", "refs/pr/1")),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("org/name/more", None),
        ("models/tiny.gguf", None),
        ("org/..", None),
        ("C:\\org\\name", None),
    ],
)
def test_what_is_an_id(text: str, expected: HubModel | None) -> None:
    assert parse_hub_id(text) == expected


CHECKPOINT = {"config.json", "tokenizer.json", "LICENSE.md", "README.md", "original/consolidated.pth", "modeling_x.py"}


def test_which_files_of_a_checkpoint_are_needed() -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    sharded = CHECKPOINT | {"model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"}
    both = sharded | {"pytorch_model.bin", "model.gguf"}
    assert first_files(both) == ["config.json", "LICENSE.md", "model.safetensors.index.json", "tokenizer.json"]
    assert weight_files(both, lambda _: index) == ["model-1.safetensors", "model-2.safetensors"]
    assert weight_files(CHECKPOINT | {"model.safetensors", "pytorch_model.bin"}, lambda _: b"") == ["model.safetensors"]
    assert weight_files(CHECKPOINT | {"pytorch_model.bin"}, lambda _: b"") == ["pytorch_model.bin"]
    assert weight_files(CHECKPOINT | {"model.gguf"}, lambda _: b"") == []


@given(st.sets(st.sampled_from(sorted(CHECKPOINT | {"model.safetensors", "openvino_model.xml", "a/config.json"}))))
def test_nothing_in_a_folder_of_the_repository_is_downloaded(names: set[str]) -> None:
    assert all(os.sep not in name and "/" not in name for name in first_files(names))
