"""Tells graphs apart: two models may have the same weights and compute other things with them."""

from __future__ import annotations

import hashlib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from fleet.errors import ModelError

_IGNORED_ELEMENTS = {"rt_info"}
_IGNORED_ATTRIBUTES = {"name"}
"""What people call a node or the model. Names of tensors count: a model is fed by them."""
_PLACE = {"offset", "size"}
"""Where a constant lies in the weight file; its bytes are told apart by the runs."""


def graph_digest(graph_file: Path) -> str:
    """SHA-256 of a graph's operations, attributes, shapes and edges, read from the file.

    Not from the model that OpenVINO makes of it, which may change with OpenVINO's version.

    Raises:
        ModelError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        _feed(digest, ElementTree.parse(graph_file).getroot())
    except OSError as error:
        raise ModelError(f"{graph_file} cannot be read: {error.strerror}.") from None
    except ElementTree.ParseError:
        raise ModelError(f"{graph_file} is damaged: it is not XML.") from None
    return digest.hexdigest()


def _feed(digest: hashlib._Hash, element: ElementTree.Element) -> None:
    ignored = _IGNORED_ATTRIBUTES | (_PLACE if element.tag == "data" and "offset" in element.attrib else set())
    attributes = sorted((key, value) for key, value in element.attrib.items() if key not in ignored)
    digest.update(repr((element.tag, attributes, (element.text or "").strip())).encode())
    for child in element:
        if child.tag not in _IGNORED_ELEMENTS:
            _feed(digest, child)
    digest.update(b"end")
