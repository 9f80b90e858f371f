"""The drawing of a cut as SVG: the model's layers on the left, the operations of one layer on the right."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 1010
LINE = 17
"""Height of a line of text in a box."""
LONG_LINE = 20
"""Characters from which a line is written smaller."""
PADDING = 5
GAP = 24
COMPUTED_COLUMNS, CACHE_COLUMN, COLUMN = (1, 2, 4), 3, 152
BOX_WIDTH = 134
STRIP_LEFT, STRIP_WIDTH = 48, 110
GRAPH_LEFT, TOP = 236, 150
LAYER_HEIGHT, LAYER_GAP, CUT_GAP = 16, 5, 9

STYLE = """
svg { color-scheme: light dark; }
text { font: 12px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #1f2328; }
.title { font-size: 17px; font-weight: 600; }
.small { fill: #59636e; }
.long { font-size: 10px; }
.strong { font-weight: 600; }
.cut { fill: #cf222e; font-weight: 600; }
.paper { fill: #ffffff; }
.plain { fill: #f6f8fa; stroke: #818b98; }
.dominator { fill: #ddf4ff; stroke: #0969da; stroke-width: 2; }
.state { fill: #fff8c5; stroke: #9a6700; }
.edge { fill: none; stroke: #818b98; stroke-width: 1.3; }
.spine { fill: none; stroke: #0969da; stroke-width: 2.5; }
.knife { stroke: #cf222e; stroke-width: 2; stroke-dasharray: 7 4; }
.lens { fill: #0969da; opacity: 0.08; }
"""
DARK = """
text { fill: #f0f6fc; }
.small { fill: #9198a1; }
.cut { fill: #ff7b72; }
.paper { fill: #0d1117; }
.plain { fill: #151b23; stroke: #656c76; }
.dominator { fill: #0c2d6b; stroke: #4493f8; }
.state { fill: #3b2300; stroke: #d29922; }
.edge { stroke: #656c76; }
.spine { stroke: #4493f8; }
.knife { stroke: #ff7b72; }
.lens { fill: #4493f8; opacity: 0.14; }
"""


@dataclass(frozen=True)
class Box:
    """Operations that follow each other; ``kind`` is the class of its looks, ``inputs`` the boxes that it reads."""

    lines: tuple[str, ...]
    kind: str
    inputs: tuple[int, ...]

    @property
    def height(self) -> int:
        return LINE * len(self.lines) + 2 * PADDING


@dataclass(frozen=True)
class CutFacts:
    """Counts and sizes that the drawing tells."""

    name: str
    operations: int
    data_operations: int
    dominators: int
    layers: int
    layer: int
    layer_bytes: int
    hidden_size: int
    rebuilt_shapes: int


@dataclass
class Place:
    """A box's column and vertical extent."""

    column: int
    top: int
    bottom: int

    @property
    def middle(self) -> float:
        return GRAPH_LEFT + self.column * COLUMN + BOX_WIDTH / 2


def place_boxes(boxes: Sequence[Box]) -> list[Place]:
    """Each box below all that it reads, in the free column that is nearest to theirs.

    Dominators have the column 0 and caches one of their own.
    """
    placed: list[Place] = []
    for box in boxes:
        sources = [placed[number] for number in box.inputs]
        if box.kind == "dominator":
            top = max((place.bottom for place in placed), default=TOP - GAP) + GAP
            placed.append(Place(0, top, top + box.height))
            continue
        columns = [CACHE_COLUMN]
        if box.kind != "state":
            computed = [placed[number].column for number in box.inputs if boxes[number].kind != "state"]
            wished = sum(computed) / len(computed)
            columns = sorted(COMPUTED_COLUMNS, key=lambda column: abs(column - wished))
        start = max((place.bottom + GAP for place in sources), default=0)
        top = start or (placed[-1].bottom if placed else TOP) - box.height
        while not (free := [column for column in columns if _is_free(placed, column, top, top + box.height)]):
            top += LINE
        placed.append(Place(free[0], top, top + box.height))
    return placed


def _is_free(placed: Sequence[Place], column: int, top: int, bottom: int) -> bool:
    beside = (place for place in placed if place.column == column)
    return not any(place.top < bottom + GAP / 2 and top < place.bottom + GAP / 2 for place in beside)


def draw(facts: CutFacts, boxes: Sequence[Box]) -> bytes:
    """The SVG file, which follows the reader's light or dark setting."""
    places = place_boxes(boxes)
    strip_bottom = _layer_top(facts.layers, facts) + 20
    height = max(strip_bottom, max(place.bottom for place in places)) + 60
    root = ElementTree.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", width=str(WIDTH), height=str(height)
    )
    title = ElementTree.SubElement(root, "title")
    title.text = f"{facts.name} cut before layer {facts.layer}"
    style = ElementTree.SubElement(root, "style")
    style.text = STYLE + "@media (prefers-color-scheme: dark) {" + DARK + "}\n"
    _rectangle(root, "paper", 0, 0, WIDTH, height, 12)
    _draw_heading(root, facts)
    _draw_lens(root, facts, places)
    _draw_strip(root, facts)
    _draw_edges(root, boxes, places)
    for box, place in zip(boxes, places, strict=True):
        left = place.middle - BOX_WIDTH / 2
        _rectangle(root, box.kind, left, place.top, BOX_WIDTH, box.height, 5)
        for number, line in enumerate(box.lines):
            kind = "long" if len(line) > LONG_LINE else ""
            _text(root, place.middle, place.top + PADDING + LINE * number + 13, line, kind, anchor="middle")
    _draw_notes(root, facts, places)
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="utf-8") + b"\n"


def _draw_heading(root: ElementTree.Element, facts: CutFacts) -> None:
    _text(root, 30, 40, f"{facts.name}, cut before layer {facts.layer}", "title")
    _text(
        root,
        30,
        64,
        f"{facts.operations:,} operations; {facts.data_operations:,} depend on the tokens; the residual stream flows "
        f"through each of {facts.dominators} of them, its dominators.",
        "small",
    )
    for left, kind, words in (
        (GRAPH_LEFT, "dominator", "dominator"),
        (GRAPH_LEFT + 120, "state", "KV cache: read, reordered by beam_idx, stored"),
        (GRAPH_LEFT + 420, "plain", "operations with one way in and one way out"),
    ):
        _rectangle(root, kind, left, 92, 18, 14, 3)
        _text(root, left + 25, 104, words, "small")


def _draw_strip(root: ElementTree.Element, facts: CutFacts) -> None:
    """The whole model, and which stage gets what."""
    _text(root, STRIP_LEFT + STRIP_WIDTH / 2, TOP - 32, "input_ids, embedding", anchor="middle")
    for layer in range(facts.layers):
        kind = "dominator" if layer == facts.layer else "plain"
        _rectangle(root, kind, STRIP_LEFT, _layer_top(layer, facts), STRIP_WIDTH, LAYER_HEIGHT, 4)
        if layer in (0, facts.layer - 1, facts.layer, facts.layers - 1):
            words = f"layer {layer}"
            _text(root, STRIP_LEFT + STRIP_WIDTH / 2, _layer_top(layer, facts) + 12, words, anchor="middle")
    end = _layer_top(facts.layers, facts)
    _text(root, STRIP_LEFT + STRIP_WIDTH / 2, end + 18, "head, logits", anchor="middle")
    cut = _layer_top(facts.layer, facts) - (LAYER_GAP + CUT_GAP) / 2
    _line(root, "knife", STRIP_LEFT - 14, cut, STRIP_LEFT + STRIP_WIDTH + 14, cut)
    for top, bottom, stage in ((_layer_top(0, facts), cut, 0), (cut, end, 1)):
        middle = (top + bottom) / 2
        upright = _text(root, 22, middle, f"stage {stage}", "strong", anchor="middle")
        upright.set("transform", f"rotate(-90 22 {middle:g})")


def _layer_top(layer: int, facts: CutFacts) -> int:
    return TOP - 20 + layer * (LAYER_HEIGHT + LAYER_GAP) + (CUT_GAP if layer >= facts.layer else 0)


def _draw_lens(root: ElementTree.Element, facts: CutFacts, places: Sequence[Place]) -> None:
    """From the layer in the strip to the layer in the large."""
    top, bottom = places[0].top - 14, max(place.bottom for place in places) + 14
    left, right = GRAPH_LEFT - 24, WIDTH - 16
    start, small = STRIP_LEFT + STRIP_WIDTH, _layer_top(facts.layer, facts)
    corners = [
        (start, small), (left, top), (right, top), (right, bottom), (left, bottom), (start, small + LAYER_HEIGHT)
    ]  # fmt: skip
    points = " ".join(f"{x:g},{y:g}" for x, y in corners)
    ElementTree.SubElement(root, "polygon", {"class": "lens", "points": points})


def _draw_edges(root: ElementTree.Element, boxes: Sequence[Box], places: Sequence[Place]) -> None:
    for box, place in zip(boxes, places, strict=True):
        for number in box.inputs:
            source = places[number]
            spine = source.column == place.column == 0
            bend = min(40.0, (place.top - source.bottom) / 2)
            end_x, end_y = place.middle, float(place.top)
            before_x, before_y = end_x, end_y - bend
            if source.column == 0 < place.column:  # from the side, so that it does not run behind other boxes
                end_x, end_y = place.middle - BOX_WIDTH / 2, (place.top + place.bottom) / 2
                before_x, before_y, bend = source.middle, end_y, 10
            path = (
                f"M{source.middle:g},{source.bottom} C{source.middle:g},{source.bottom + bend:g} "
                f"{before_x:g},{before_y:g} {end_x:g},{end_y:g}"
            )
            ElementTree.SubElement(root, "path", {"class": "spine" if spine else "edge", "d": path})


def _draw_notes(root: ElementTree.Element, facts: CutFacts, places: Sequence[Place]) -> None:
    dominators = [place for place in places if place.column == 0]
    first, last = dominators[0], dominators[-1]
    cut = first.bottom + GAP / 2
    _line(root, "knife", GRAPH_LEFT - 14, cut, GRAPH_LEFT + BOX_WIDTH + 14, cut)
    _text(root, GRAPH_LEFT + BOX_WIDTH + 22, first.top + 16, "the tensor that crosses the cut:", "cut")
    _text(
        root,
        GRAPH_LEFT + BOX_WIDTH + 22,
        first.top + 33,
        f"f32 [batch, tokens, {facts.hidden_size}], hidden_states of stage 0, inputs_embeds of stage 1",
        "cut",
    )
    for place in dominators[1:-1]:
        words = "a dominator inside the layer: no cache hangs on it"
        _text(root, GRAPH_LEFT + BOX_WIDTH + 22, place.top + 17, words, "small")
    words = f"enters layer {facts.layer + 1}: the next place for a cut"
    _text(root, GRAPH_LEFT + BOX_WIDTH + 22, last.top + 17, words, "small")
    _text(
        root,
        30,
        last.bottom + 40,
        f"Layer {facts.layer} is {facts.layer_bytes:,} bytes of weights, the same wherever the model is cut. "
        f"{facts.rebuilt_shapes} ShapeOf in stage 1 read tensors of stage 0: they are rebuilt from its own inputs.",
        "small",
    )


def _rectangle(root: ElementTree.Element, kind: str, x: float, y: float, width: float, height: float, r: int) -> None:
    numbers = {"x": x, "y": y, "width": width, "height": height, "rx": r}
    ElementTree.SubElement(root, "rect", {"class": kind} | {key: f"{value:g}" for key, value in numbers.items()})


def _line(root: ElementTree.Element, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
    numbers = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    ElementTree.SubElement(root, "line", {"class": kind} | {key: f"{value:g}" for key, value in numbers.items()})


def _text(
    root: ElementTree.Element, x: float, y: float, words: str, kind: str = "", anchor: str = "start"
) -> ElementTree.Element:
    attributes = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor} | ({"class": kind} if kind else {})
    element = ElementTree.SubElement(root, "text", attributes)
    element.text = words
    return element
