"""Draws every page of the control panel, light and dark, into docs/screenshots.

    python docs/make_screenshots.py [FOLDER]

Works without a screen. The fleet is made up; its devices are property sets recorded on real machines.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ["QT_QPA_PLATFORM"] = "offscreen"
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import example_fleet
import msgspec
from PySide6.QtCore import QEventLoop, QSize, QTimer
from PySide6.QtGui import QFont, QFontDatabase
from PySide6.QtWidgets import QApplication

from app.looks.theme import theme
from app.main_window import MainWindow
from app.placement.assessment import Demand, assess
from app.placement.draft import PlacementDraft
from app.settings import Settings
from fleet.control_messages import Progress
from fleet.gateway_messages import Delta, Finished
from fleet.placement import plan
from fleet.views import FleetView

SIZE = QSize(1280, 800)
FONTS = ("Inter", "Segoe UI", "Noto Sans", "DejaVu Sans")

ANSWER = """The sky looks blue because air scatters **short wavelengths** of light much more than long ones.

1. Sunlight is a mix of all colours.
2. Molecules of air scatter light in proportion to 1/λ⁴ (*Rayleigh scattering*): blue five times as much as red.
3. What reaches your eye from all over the sky is that scattered blue.

You can compute the ratio yourself:

```python
blue_nm, red_nm = 450, 680
print(f"{(red_nm / blue_nm) ** 4:.1f} times")
```

At sunset the light's way through the air is so long that the blue is gone before it arrives, and the rest is red."""


def main(folder: Path) -> None:
    application = QApplication(sys.argv[:1])
    families = QFontDatabase.families()
    family = next((name for name in FONTS if name in families), None)
    if family is not None:
        application.setFont(QFont(family, 10))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data_dir:
        for scheme in ("light", "dark"):
            theme().set_choice(scheme)
            window = MainWindow(Settings(Path(data_dir)))
            window.resize(SIZE)
            window.show()
            for name, prepare in _SCENES.items():
                prepare(window)
                settle()
                path = folder / f"{name}-{scheme}.png"
                window.grab().save(str(path))
                print(path)
            window.close_now()
            window.deleteLater()


def settle() -> None:
    """Let layouts and timers come to rest."""
    loop = QEventLoop()
    QTimer.singleShot(300, loop.quit)
    loop.exec()


def fleet(window: MainWindow) -> None:
    window.set_view(example_fleet.fleet_view())
    window.show_page("fleet")


def fleet_empty(window: MainWindow) -> None:
    window.set_view(FleetView())
    window.show_page("fleet")


def placement_empty(window: MainWindow) -> None:
    window.set_view(example_fleet.fleet_view())
    window.show_page("placement")


def placement(window: MainWindow) -> None:
    show_placement(window, Demand(8192, 4), None)


def placement_over(window: MainWindow) -> None:
    show_placement(window, Demand(8192, 4), 24)


def show_placement(window: MainWindow, demand: Demand, cut: int | None) -> None:
    manifest = example_fleet.manifest()
    nodes = example_fleet.placement_nodes()
    page = window.placement_page
    page.set_recent([f"/models/{example_fleet.MODEL}"], f"/models/{example_fleet.MODEL}")
    page.set_demand(demand)
    proposal = plan(manifest, nodes, context_tokens=demand.context_tokens, users=demand.users)
    draft = PlacementDraft.from_placement(proposal, nodes)
    for node in draft.unused:
        draft = draft.with_node(node.id)
    if cut is not None:
        draft = draft.with_boundary(1, 30).with_boundary(0, 10)
    page.set_draft(draft)
    page.show_assessment(assess(manifest, draft, demand))
    page.set_action("Build and deploy", enabled=cut is None)
    window.show_page("placement")


def deploy(window: MainWindow) -> None:
    view = example_fleet.fleet_view()
    window.set_view(with_progress(view, 0.8))
    settle()
    for share in (0.86, 0.93, 1.0):
        settle()
        settle()
        window.set_view(with_progress(view, share))
    window.show_page("deploy")


def with_progress(view: FleetView, share: float) -> FleetView:
    """The view with less received, so that rates can be measured."""
    deployments = []
    for deployment in view.deployments:
        stages = []
        for stage in deployment.stages:
            status = stage.status
            if status is not None and status.progress is not None:
                done = round(status.progress.done_bytes * share)
                progress = Progress(done, status.progress.total_bytes, status.progress.held_bytes)
                status = msgspec.structs.replace(status, progress=progress)
            stages.append(msgspec.structs.replace(stage, status=status))
        deployments.append(msgspec.structs.replace(deployment, stages=tuple(stages)))
    return msgspec.structs.replace(view, deployments=tuple(deployments))


def deploy_empty(window: MainWindow) -> None:
    window.set_view(FleetView(nodes=example_fleet.fleet_view().nodes))
    window.show_page("deploy")


def chat_greeting(window: MainWindow) -> None:
    window.set_view(example_fleet.fleet_view())
    window.show_page("chat")


def chat(window: MainWindow) -> None:
    window.set_view(example_fleet.fleet_view())
    window.show_page("chat")
    page = window.chat_page
    page.ask("Why is the sky blue? Show me how to compute it.")
    answer = page.conversation.turns[-1].answer
    answer.take(Delta(1, ANSWER, tuple(range(214))), answer.asked_s + 0.31)
    answer.take(Finished(1, "stop", 31, 214, 0.31, 4.02), answer.asked_s + 4.33)
    page.refresh()
    page.ask("And on Mars?")
    answer = page.conversation.turns[-1].answer
    answer.take(Delta(2, "On Mars it is the other way round: the fine dust", (1,)), answer.asked_s + 0.29)
    answer.take(Delta(2, " scatters red light forward…", tuple(range(11))), answer.asked_s + 0.5)
    page.refresh()


def chat_error(window: MainWindow) -> None:
    page = window.chat_page
    page.conversation.turns[-1].answer.fail(
        "design-laptop, which holds layers 15 to 29, went away. Its agent is restarting the stage; try again."
    )
    page.refresh()
    page._options_button.setChecked(True)


_SCENES: dict[str, Callable[[MainWindow], None]] = {
    "fleet": fleet,
    "fleet-empty": fleet_empty,
    "placement-empty": placement_empty,
    "placement": placement,
    "placement-over-budget": placement_over,
    "deploy": deploy,
    "deploy-empty": deploy_empty,
    "chat-greeting": chat_greeting,
    "chat": chat,
    "chat-error": chat_error,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "screenshots")
