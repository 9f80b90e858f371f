"""From a chosen model to a deployment: cut it, propose a placement, assess every change, build what differs, deploy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, Signal

from app.fleet_bridge import FleetBridge
from app.looks import words
from app.placement.assessment import Assessment, assess
from app.placement.builder_process import BuilderProcess
from app.placement.draft import PlacementDraft
from app.placement.model_source import ModelSource, read_source, shard_folder_for
from app.placement.placement_page import PlacementPage, problem_text
from app.settings import Settings
from app.task_group import TaskGroup
from fleet.build_messages import BuildDone, BuildProgress, BuildRequest
from fleet.errors import CancelledError, ModelError, PacelineError, PlacementError
from fleet.manifest import Manifest, load_manifest
from fleet.node import NodeId
from fleet.placement import PlacementNode, plan


class BuildError(PacelineError):
    """The shard builder failed; ``details`` holds the end of its log."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


class PlacementFlow(QObject):
    """Keeps the chosen model and its shards while the page changes the draft.

    Signals:
        deployed: a deployment began; its id.
    """

    deployed = Signal(str)

    def __init__(
        self,
        page: PlacementPage,
        bridge: FleetBridge,
        tasks: TaskGroup,
        settings: Settings,
        data_dir: Path,
        *,
        make_builder: Callable[[QObject], BuilderProcess] = BuilderProcess,
    ) -> None:
        super().__init__(page)
        self._page = page
        self._bridge = bridge
        self._tasks = tasks
        self._settings = settings
        self._shards_dir = data_dir / "shards"
        self._make_builder = make_builder
        self._builder: BuilderProcess | None = None
        self._source: ModelSource | None = None
        self._shards: Path | None = None
        self._manifest: Manifest | None = None
        self._assessment: Assessment | None = None
        self._left_out: dict[NodeId, str] = {}
        self._busy = False
        page.set_recent(settings.recent_models, None)
        page.path_chosen.connect(lambda path: self._begin(self._open(Path(path)), "open model"))
        page.proposal_wanted.connect(lambda: self._begin(self._propose(), "propose placement"))
        page.deploy_wanted.connect(lambda: self._begin(self._deploy(), "deploy"))
        page.demand_changed.connect(lambda _demand: self._assess())
        page.draft_changed.connect(lambda _draft: self._assess())
        page.build_cancel_wanted.connect(self._cancel_build)
        self._assess()

    def open_path(self, path: Path) -> None:
        """Choose this model, as if the person had."""
        self._begin(self._open(path), "open model")

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a flow, one at a time."""
        if self._busy:
            work.close()
            return
        self._busy = True
        self._page.banner.clear()
        self._page.set_busy(True)
        self._tasks.start(self._guard(work), name)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Show a fault on the page, in words; a stop that the person asked for is none."""
        try:
            await work
        except CancelledError:
            pass
        except BuildError as error:
            self._page.banner.show_message(str(error), error.details)
        except PacelineError as error:
            self._page.banner.show_message(str(error))
        finally:
            self._busy = False
            self._page.set_busy(False)
            self._assess()

    async def _open(self, path: Path) -> None:
        source = read_source(path)
        nodes = await self._bridge.placement_nodes()
        if source.kind == "shards":
            self._source, shards = None, source.path
            manifest = await asyncio.to_thread(load_manifest, shards)
        else:
            self._source = source
            shards, manifest = await self._build(source, None, max(len(nodes), 1))
        self._shards, self._manifest = shards, manifest
        self._settings.remember_model(str(path))
        self._page.set_recent(self._settings.recent_models, str(path))
        await self._propose()

    async def _propose(self) -> None:
        manifest = self._manifest
        if manifest is None:
            return
        nodes = await self._bridge.placement_nodes()
        if not nodes:
            self._page.set_draft(None)
            raise PlacementError(
                self.tr("No enrolled PC answers, so there is nowhere to place layers. See the Fleet page.")
            )
        demand = self._page.demand
        self._left_out = {}
        if self._source is None:
            own = PlacementDraft.of_shards(manifest, nodes, demand.context_tokens, demand.users)
            if own is not None:
                self._page.set_draft(own)
                return
        try:
            proposal = await asyncio.to_thread(
                plan, manifest, nodes, context_tokens=demand.context_tokens, users=demand.users
            )
        except PlacementError:
            # The person still sees what each PC would need, and what the planner says is missing.
            self._page.set_draft(PlacementDraft.even(len(manifest.layers), nodes))
            raise
        self._left_out = {one.node: one.reason for one in proposal.left_out}
        self._page.set_draft(PlacementDraft.from_placement(proposal, nodes))

    async def _deploy(self) -> None:
        manifest, shards, assessment = self._manifest, self._shards, self._assessment
        if manifest is None or shards is None or assessment is None:
            return
        if assessment.draft.cuts != manifest.cuts:
            if self._source is None:
                raise ModelError(self._other_cut_text(manifest))
            self._shards, self._manifest = shards, manifest = await self._build(
                self._source, assessment.draft.cuts, len(assessment.draft.nodes)
            )
            assessment = assess(manifest, assessment.draft, self._page.demand)
        if not assessment.fits:
            raise PlacementError(problem_text(assessment))
        self.deployed.emit(await self._bridge.deploy(shards, assessment.placement, manifest.kv_precision))

    async def _build(self, source: ModelSource, cuts: Sequence[int] | None, stages: int) -> tuple[Path, Manifest]:
        """The shards of a model, from an earlier build where there is one."""
        output = shard_folder_for(self._shards_dir, source, cuts, stages)
        if output.exists():
            return output, await asyncio.to_thread(load_manifest, output)
        self._shards_dir.mkdir(parents=True, exist_ok=True)
        request = BuildRequest(
            model=str(source.path),
            output=str(output),
            stages=stages if cuts is None else None,
            cuts=None if cuts is None else tuple(cuts),
        )
        done: asyncio.Future[BuildDone] = asyncio.get_running_loop().create_future()
        builder = self._builder = self._make_builder(self)
        builder.progressed.connect(self._page.show_build)
        builder.done.connect(done.set_result)
        builder.failed.connect(lambda *failure: done.set_exception(_fault(*failure)))
        self._page.show_build(BuildProgress(phase="convert", fraction=0.0))
        try:
            builder.start(request)
            result = await asyncio.shield(done)
        except asyncio.CancelledError:
            builder.cancel()
            await asyncio.wait([done])
            done.exception()
            raise
        finally:
            self._builder = None
            self._page.show_build(None)
        return Path(result.output), result.manifest

    def _cancel_build(self) -> None:
        if self._builder is not None:
            self._builder.cancel()

    def _assess(self) -> None:
        """Say what the draft needs, and what the main button can do."""
        manifest, draft = self._manifest, self._page.draft
        if manifest is None or draft is None:
            self._assessment = None
            self._page.show_assessment(None)
            self._page.set_action(self.tr("Deploy"), enabled=False)
            return
        assessment = self._assessment = assess(manifest, draft, self._page.demand)
        self._page.show_assessment(assessment, self._unused_text(draft.unused))
        same_cut = draft.cuts == manifest.cuts
        why = "" if same_cut or self._source is not None else self._other_cut_text(manifest)
        self._page.set_action(
            self.tr("Deploy") if same_cut else self.tr("Build and deploy"),
            enabled=not self._busy and assessment.fits and not why,
            why=why,
        )

    def _unused_text(self, unused: Sequence[PlacementNode]) -> str:
        """Which PCs hold no layers, with the planner's reason where it has one."""
        parts = [
            f"{node.name} ({self._left_out[node.id]})" if node.id in self._left_out else node.name for node in unused
        ]
        return self.tr("Not used: {names}").format(names="; ".join(parts)) if parts else ""

    def _other_cut_text(self, manifest: Manifest) -> str:
        edges = (0, *manifest.cuts, len(manifest.layers))
        stages = ", ".join(words.layer_range(first, end) for first, end in pairwise(edges))
        return self.tr(
            "This folder is cut into {stages}. To cut elsewhere, choose the model that it was made from."
        ).format(stages=stages)


def _fault(message: str, details: str, cancelled: bool) -> PacelineError:
    return CancelledError(message) if cancelled else BuildError(message, details)
