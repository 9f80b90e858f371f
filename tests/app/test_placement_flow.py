"""From a chosen model to a deployment: builds in a child process, proposals, and every fault in words."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import qasync
from PySide6.QtCore import QObject
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.fleet_bridge import FleetBridge
from app.placement.assessment import Demand
from app.placement.builder_process import BuilderProcess
from app.placement.model_source import ModelSource, read_source, shard_folder_for
from app.placement.placement_flow import PlacementFlow
from app.placement.placement_page import PlacementPage
from app.settings import Settings
from app.task_group import TaskGroup
from fleet.build_messages import BuildProgress, BuildRequest
from fleet.errors import ModelError
from fleet.manifest import MANIFEST_NAME, FileEntry, Layer, Manifest, ModelId, Run, RunPlace, Stage, encode_manifest
from fleet.node import NodeId
from fleet.placement import Placement, PlacementNode

RunInLoop = Callable[[Coroutine[Any, Any, Any]], Any]
LAYERS = 8
LAYER_BYTES = 4096 * 256

PLAYED_BUILDER = """
import json, pathlib, sys
request = json.loads(sys.stdin.readline())
print("a library says hello", flush=True)
mode = pathlib.Path(request["model"]).read_text()
def say(**line):
    print(json.dumps(line), flush=True)
say(type="progress", phase="convert", fraction=0.1)
if mode == "fail":
    print("line of the log", file=sys.stderr, flush=True)
    say(type="failed", message="The model has no layers that can be cut.")
elif mode == "crash":
    print("terrible", file=sys.stderr, flush=True)
    sys.exit(3)
elif mode == "wait":
    sys.stdin.read()
    say(type="failed", message="The build was stopped.", cancelled=True)
else:
    say(type="progress", phase="write", fraction=0.5, bytes_done=10, bytes_total=20)
    cuts = request.get("cuts")
    if cuts is None:
        cuts = [round(8 * number / request["stages"]) for number in range(1, request["stages"])]
    manifest = json.loads(mode)
    edges = [0, *cuts, 8]
    stage = manifest["stages"][0]
    manifest["stages"] = [
        dict(stage, stage=number, first_layer=first, end_layer=end, runs=[])
        for number, (first, end) in enumerate(zip(edges, edges[1:]))
    ]
    output = pathlib.Path(request["output"])
    output.mkdir(parents=True)
    (output / "manifest.json").write_text(json.dumps(manifest))
    say(type="done", output=str(output), manifest=manifest)
"""


def manifest(cuts: tuple[int, ...] = ()) -> Manifest:
    edges = (0, *cuts, LAYERS)
    runs = tuple(Run(f"{layer:064x}", LAYER_BYTES, "layer", layer) for layer in range(LAYERS))
    return Manifest(
        manifest_version=1,
        model_id=ModelId("played"),
        name="played",
        architecture="llama",
        hidden_size=64,
        vocabulary_size=100,
        context_tokens=2048,
        kv_precision="f16",
        layers=tuple(Layer(layer, LAYER_BYTES, 64, 128) for layer in range(LAYERS)),
        runs=runs,
        stages=tuple(
            Stage(
                stage=number,
                first_layer=first,
                end_layer=end,
                bytes=(end - first) * LAYER_BYTES,
                graph=FileEntry(f"stage-{number}.xml", 1, "0" * 64),
                weights=FileEntry(f"stage-{number}.bin", (end - first) * LAYER_BYTES, "1" * 64),
                runs=tuple(RunPlace(runs[layer].sha256, (layer - first) * LAYER_BYTES) for layer in range(first, end)),
                inputs=("input_ids",),
            )
            for number, (first, end) in enumerate(itertools.pairwise(edges))
        ),
        tokenizer=(),
        stop_token_ids=(),
    )


def nodes(count: int, budget_bytes: int = 8 << 30) -> list[PlacementNode]:
    return [PlacementNode(NodeId(f"{number:016x}"), f"pc-{number}", "CPU", budget_bytes) for number in range(count)]


@pytest.fixture
def run(qapp: QApplication) -> Iterator[RunInLoop]:
    loop = qasync.QEventLoop(qapp)
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, 30))
    loop.close()


class Setting:
    def __init__(self, network: Any, data_dir: Path) -> None:
        self.network = network
        self.page = PlacementPage()
        self.bridge = FleetBridge(network)
        self.tasks = TaskGroup(lambda name, error: pytest.fail(f"{name}: {error!r}"))
        self.settings = Settings(data_dir)
        self.progress: list[BuildProgress] = []
        self.flow = PlacementFlow(
            self.page, self.bridge, self.tasks, self.settings, data_dir, make_builder=self._builder
        )
        self.deployed: list[str] = []
        self.flow.deployed.connect(self.deployed.append)

    def _builder(self, parent: QObject) -> BuilderProcess:
        builder = BuilderProcess(parent, command=("-c", PLAYED_BUILDER))
        builder.progressed.connect(self.progress.append)
        return builder

    async def open(self, path: Path) -> None:
        self.flow.open_path(path)
        await self.idle()

    async def idle(self) -> None:
        while self.flow._busy:  # noqa: ASYNC110 - the flow tells nobody
            await asyncio.sleep(0.01)

    async def press_deploy(self) -> None:
        self.page.deploy_button().click()
        await self.idle()

    async def close(self) -> None:
        await self.tasks.close()
        await self.bridge.close()


@pytest.fixture
def setting(network: Any, qtbot: QtBot, tmp_path: Path) -> Setting:
    setting = Setting(network, tmp_path / "data")
    qtbot.addWidget(setting.page)
    network.controller.nodes = nodes(2)
    return setting


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(msgspec.json.encode(manifest()))
    return path


def test_a_gguf_file_is_cut_placed_and_deployed(run: RunInLoop, setting: Setting, gguf: Path) -> None:
    async def story() -> None:
        await setting.open(gguf)
        assert setting.page.draft is not None
        assert setting.page.banner.message() == ""
        assert [progress.phase for progress in setting.progress] == ["convert", "write"]
        assert setting.page.deploy_button().text() == "Deploy"
        await setting.press_deploy()
        await setting.close()

    run(story())
    ((what, about),) = setting.network.controller.asked
    assert what == "deploy"
    folder, placement = about
    assert (folder / MANIFEST_NAME).exists()
    assert isinstance(placement, Placement)
    assert [stage.node_name for stage in placement.stages] == ["pc-0", "pc-1"]
    assert setting.deployed == [f"{7:012x}"]
    assert setting.settings.recent_models == [str(gguf)]


def test_another_cut_is_built_before_it_is_deployed_and_only_once(run: RunInLoop, setting: Setting, gguf: Path) -> None:
    async def story() -> None:
        await setting.open(gguf)
        setting.page.move_boundary(0, -2)
        assert setting.page.deploy_button().text() == "Build and deploy"
        await setting.press_deploy()
        assert setting.page.banner.message() == ""
        builds = len(setting.progress)
        setting.page.move_boundary(0, 1)
        setting.page.move_boundary(0, -1)
        await setting.press_deploy()
        assert len(setting.progress) == builds
        await setting.close()

    run(story())
    folders = [about[0] for _what, about in setting.network.controller.asked]
    assert len(folders) == 2
    assert folders[0] == folders[1]
    assert folders[0].name.endswith("-2")


def test_a_shard_folder_opens_at_once_and_is_not_cut_anew(run: RunInLoop, setting: Setting, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest((3,))))
    first, second = nodes(2)
    full = msgspec.structs.replace(second, budget_bytes=1)
    setting.network.controller.nodes = [first, full, PlacementNode(NodeId("f" * 16), "large", "CPU", 64 << 30)]

    async def story() -> None:
        await setting.open(folder)
        assert setting.progress == []
        assert setting.page.draft is not None
        assert [node.name for node in setting.page.draft.nodes] == ["pc-0", "large"]
        assert [node.name for node in setting.page.draft.unused] == ["pc-1"]
        assert setting.page.deploy_button().isEnabled()
        setting.page.move_boundary(0, 1)
        assert not setting.page.deploy_button().isEnabled()
        assert "layers 0 to 2, layers 3 to 7" in setting.page.deploy_button().toolTip()
        setting.page.undo()
        assert setting.page.deploy_button().isEnabled()
        await setting.close()

    run(story())


@pytest.mark.parametrize(
    ("mode", "message", "details"),
    [
        ("fail", "The model has no layers that can be cut.", "line of the log"),
        ("crash", "exit code 3", "terrible"),
    ],
)
def test_a_failed_build_is_told_with_the_end_of_its_log(
    run: RunInLoop, setting: Setting, gguf: Path, mode: str, message: str, details: str
) -> None:
    gguf.write_text(mode)

    async def story() -> None:
        await setting.open(gguf)
        await setting.close()

    run(story())
    assert message in setting.page.banner.message()
    assert details in setting.page.banner.details()
    assert setting.page.draft is None


def test_a_build_can_be_stopped_and_that_is_no_fault(run: RunInLoop, setting: Setting, gguf: Path) -> None:
    gguf.write_text("wait")

    async def story() -> None:
        setting.flow.open_path(gguf)
        while not setting.progress:  # noqa: ASYNC110 - the child tells nobody else
            await asyncio.sleep(0.01)
        setting.page.build_cancel_wanted.emit()
        await setting.idle()
        await setting.close()

    run(story())
    assert setting.page.banner.message() == ""


def test_closing_the_window_ends_the_builder(run: RunInLoop, setting: Setting, gguf: Path) -> None:
    gguf.write_text("wait")

    async def story() -> None:
        setting.flow.open_path(gguf)
        while not setting.progress:  # noqa: ASYNC110 - the child tells nobody else
            await asyncio.sleep(0.01)
        builder = setting.flow._builder
        assert builder is not None
        await setting.close()
        assert not builder.running

    run(story())


def test_a_model_that_fits_nowhere_is_shown_with_what_is_missing(run: RunInLoop, setting: Setting, gguf: Path) -> None:
    setting.network.controller.nodes = nodes(2, budget_bytes=1 << 20)

    async def story() -> None:
        await setting.open(gguf)
        await setting.close()

    run(story())
    assert "played does not fit" in setting.page.banner.message()
    assert setting.page.draft is not None
    assert not setting.page.deploy_button().isEnabled()
    assert "too much" in setting.page._reason.text()


def test_without_a_pc_the_person_is_told(run: RunInLoop, setting: Setting, gguf: Path) -> None:
    setting.network.controller.nodes = []

    async def story() -> None:
        await setting.open(gguf)
        await setting.close()

    run(story())
    assert "No enrolled PC answers" in setting.page.banner.message()


def test_more_context_needs_more_memory(run: RunInLoop, setting: Setting, gguf: Path) -> None:
    async def story() -> None:
        await setting.open(gguf)
        before = setting.page.table().model().index(0, 5).data()
        setting.page.set_demand(Demand(65536, 8))
        assert setting.page.table().model().index(0, 5).data() != before
        await setting.close()

    run(story())


def test_what_a_path_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not there any more"):
        read_source(tmp_path / "gone")
    with pytest.raises(ModelError, match="holds neither"):
        read_source(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("x")
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_source(text)
    folder = tmp_path / "ir"
    folder.mkdir()
    (folder / "openvino_model.xml").write_text("<net/>")
    assert read_source(folder) == ModelSource(folder, "ir")
    assert read_source(folder / "openvino_model.xml") == ModelSource(folder, "ir")


def test_a_changed_model_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    model = tmp_path / "my model.gguf"
    model.write_text("one")
    source = read_source(model)
    first = shard_folder_for(tmp_path, source, (3, 5), 3)
    assert first.name.startswith("my-model-")
    assert first.name.endswith("-3-5")
    assert shard_folder_for(tmp_path, source, (3, 6), 3) != first
    assert shard_folder_for(tmp_path, source, None, 3).name.endswith("-even-3")
    model.write_text("other")
    assert shard_folder_for(tmp_path, source, (3, 5), 3) != first


def test_a_builder_that_cannot_be_started_is_told(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    builder = BuilderProcess()
    with qtbot.waitSignal(builder.failed) as failed:
        builder.start(BuildRequest(model="m", output="o", stages=1))
    assert failed.args is not None
    assert "could not be started" in failed.args[0]
