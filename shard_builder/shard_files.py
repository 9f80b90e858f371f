"""Writes a stage's graph file so that it points into the weight file's own layout.

OpenVINO would write all weights again, in an order of its own. Instead every large constant is replaced by a stand-in
(a Parameter of its type and shape) while the graph is written, and the stand-ins are turned into constants in the
written file, each with the offset of its bytes. Every constant has a name of its own meanwhile, because OpenVINO lets
equal constants share their bytes.
"""

from __future__ import annotations

import hashlib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino as ov
from openvino import opset13

from fleet.errors import ModelError
from fleet.manifest import FileEntry
from shard_builder.stream_faults import told_of_streams
from shard_builder.weights import CONSTANT_ALIGNMENT_BYTES, WeightFileLayout, align, constant_bytes

STAND_IN_BYTES = 1024
"""Constants from this size on are not written by OpenVINO."""
_WHOLE_PREFIX = "paceline-constant-"
_CUT_PREFIX = "paceline-cut-"


@dataclass(frozen=True)
class NamedConstants:
    """A stage's constants under names of their own: those of the whole model by node number, and the cut's."""

    names: dict[str, str]
    """The name that stands in the file for the time being, and the one that belongs there."""
    whole: dict[str, int]
    cut: dict[str, Any]


def name_constants(stage: ov.Model, numbers: dict[str, int]) -> NamedConstants:
    """Renames every constant of a stage; ``numbers`` gives the whole model's nodes by their unique name."""
    names: dict[str, str] = {}
    whole: dict[str, int] = {}
    cut: dict[str, Any] = {}
    for operation in stage.get_ordered_ops():
        if operation.get_type_name() != "Constant":
            continue
        number = numbers.get(operation.get_name())
        if number is not None:
            name = f"{_WHOLE_PREFIX}{number}"
            whole[name] = number
            names[name] = operation.get_friendly_name()
        else:
            name = f"{_CUT_PREFIX}{len(cut)}"
            cut[name] = operation
            names[name] = f"cut_constant_{len(cut)}"
        operation.set_friendly_name(name)
    return NamedConstants(names, whole, cut)


def write_graph(
    stage: ov.Model, constants: NamedConstants, layout: WeightFileLayout, graph_file: Path, scratch: Path
) -> bytes:
    """Writes the stage's graph and returns the bytes of the cut's own constants, to be put at ``layout.cut_offset``.

    Raises:
        ModelError: a constant of the written graph cannot be told; nothing else writes such a graph.
        OSError: the disk is full, or cannot be written.
    """
    _put_stand_ins(stage)
    draft = scratch / "draft.xml"
    with told_of_streams(scratch):
        ov.serialize(stage, draft, scratch / "draft.bin")
    small = (scratch / "draft.bin").read_bytes()
    tree = ElementTree.parse(draft)
    cut = bytearray()

    def append_to_cut(data: bytes) -> tuple[int, int]:
        cut.extend(bytes(align(len(cut), CONSTANT_ALIGNMENT_BYTES) - len(cut)))
        cut.extend(data)
        return layout.cut_offset + len(cut) - len(data), len(data)

    for layer in tree.iter("layer"):
        name = layer.get("name", "")
        data = layer.find("data")
        if name in constants.whole:
            place = layout.places[constants.whole[name]]
        elif name in constants.cut:
            place = append_to_cut(constant_bytes(constants.cut[name]).tobytes())
        elif layer.get("type") == "Const" and data is not None:
            # A constant inside the body of a loop or condition: OpenVINO wrote its bytes to the small file.
            start, size = int(data.get("offset", "0")), int(data.get("size", "0"))
            place = append_to_cut(small[start : start + size])
        else:
            continue
        if data is None:
            raise ModelError(f"The graph of a stage has a constant without data ('{constants.names[name]}').")
        layer.set("type", "Const")
        layer.set("version", "opset1")
        layer.set("name", constants.names.get(name, name))
        data.set("offset", str(place[0]))
        data.set("size", str(place[1]))
    tree.write(graph_file, encoding="utf-8", xml_declaration=True)
    return bytes(cut)


def _put_stand_ins(stage: ov.Model) -> None:
    parameters = []
    for operation in stage.get_ordered_ops():
        if operation.get_type_name() != "Constant" or operation.get_byte_size() < STAND_IN_BYTES:
            continue
        parameter = opset13.parameter(operation.get_output_partial_shape(0), operation.get_output_element_type(0))
        parameter.set_friendly_name(operation.get_friendly_name())
        for target in list(operation.output(0).get_target_inputs()):
            target.replace_source_output(parameter.output(0))
        parameters.append(parameter)
    stage.add_parameters(parameters)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in slices."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(path: Path) -> FileEntry:
    """The manifest's entry of a file."""
    return FileEntry(name=path.name, bytes=path.stat().st_size, sha256=file_sha256(path))
