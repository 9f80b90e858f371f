"""What people give by mistake: each time a sentence, exit code 1, and nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from fleet.build_messages import BuildProgress
from fleet.data_dir import HOME_VARIABLE
from fleet.errors import ModelError
from fleet.manifest import load_manifest
from shard_builder import build, verify
from tests.shard_builder.conftest import TinyDecoder
from tests.shard_builder.desk import Desk, check_sentence
from tests.shard_builder.test_gguf import small_file, text

Change = Callable[[Path], None]
GRAPH, WEIGHTS = "openvino_model.xml", "openvino_model.bin"


def replace(old: str, new: str, count: int = 1) -> Change:
    """Changes the model's graph file as an editor would."""

    def change(model: Path) -> None:
        graph = (model / GRAPH).read_text()
        assert old in graph
        (model / GRAPH).write_text(graph.replace(old, new, count))

    return change


def cut_short(name: str, keep: float) -> Change:
    def change(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(len(content) * keep)])

    return change


def write(name: str, content: bytes) -> Change:
    return lambda model: (model / name).write_bytes(content) and None


def edit_graph(edit: Callable[[ElementTree.Element], None]) -> Change:
    def change(model: Path) -> None:
        tree = ElementTree.parse(model / GRAPH)
        edit(tree.getroot())
        tree.write(model / GRAPH)

    return change


def first_layer(root: ElementTree.Element, kind: str) -> ElementTree.Element:
    found = root.find(f"layers/layer[@type='{kind}']")
    assert found is not None
    return found


def remove_node(root: ElementTree.Element) -> None:
    layers = root.find("layers")
    assert layers is not None
    layers.remove(first_layer(root, "MatMul"))


def remove_edge(root: ElementTree.Element) -> None:
    edges = root.find("edges")
    assert edges is not None
    edges.remove(edges[len(edges) // 2])


def place_beyond_the_end(root: ElementTree.Element) -> None:
    data = max(root.findall("layers/layer[@type='Const']/data"), key=lambda data: int(data.get("size", "0")))
    data.set("offset", str(1 << 40))


def shrink_a_constant(root: ElementTree.Element) -> None:
    data = max(root.findall("layers/layer[@type='Const']/data"), key=lambda data: int(data.get("size", "0")))
    data.set("size", "4")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(cut_short(WEIGHTS, 0.5), "cannot read", id="weights-halved"),
        pytest.param(cut_short(WEIGHTS, 0.999), "cannot read", id="weights-almost-whole"),
        pytest.param(write(WEIGHTS, b""), "", id="weights-empty"),
        pytest.param(lambda model: (model / WEIGHTS).unlink(), "openvino_model.bin is missing", id="no-weights"),
        pytest.param(write(GRAPH, b""), "cannot read", id="graph-empty"),
        pytest.param(cut_short(GRAPH, 0.5), "cannot read", id="graph-halved"),
        pytest.param(write(GRAPH, b"\xff\xfe\x00not XML"), "cannot read", id="graph-not-xml"),
        pytest.param(write(GRAPH, b"<html><body>404</body></html>"), "cannot read", id="graph-a-web-page"),
        pytest.param(replace('type="MatMul"', 'type="MatNul"'), "cannot read", id="unknown-operation"),
        pytest.param(replace('element_type="f32"', 'element_type="f23"'), "cannot read", id="unknown-type"),
        pytest.param(edit_graph(remove_node), "cannot read", id="node-deleted"),
        pytest.param(edit_graph(remove_edge), "cannot read", id="edge-deleted"),
        pytest.param(edit_graph(place_beyond_the_end), "cannot read", id="constant-beyond-the-end"),
        pytest.param(edit_graph(shrink_a_constant), "cannot read", id="constant-too-small"),
        pytest.param(replace('variable_id="k1"', 'variable_id="k0"', 2), "", id="one-state-for-two-layers"),
        pytest.param(write("config.json", b"{"), "config.json is damaged", id="configuration-broken"),
        pytest.param(write("config.json", b"[" * 200_000), "config.json is damaged", id="configuration-nested"),
        pytest.param(write("config.json", b"[1]"), "config.json is damaged", id="configuration-a-list"),
        pytest.param(write("config.json", b"\xff\xfe"), "config.json is damaged", id="configuration-binary"),
        pytest.param(write("config.json", b" " * (20 << 20)), "config.json", id="configuration-huge"),
        pytest.param(write("openvino_tokenizer.xml", b""), "openvino_tokenizer.xml", id="tokenizer-empty"),
    ],
)
def test_damaged_models(desk: Desk, change: Change, words: str) -> None:
    change(desk.model)
    assert words in desk.build_refused(desk.model)


def other_model(**ports: str) -> Change:
    """A graph with the given inputs and output, of which nothing keeps a state."""

    def change(model: Path) -> None:
        names = ports["inputs"].split()
        inputs = [ops.parameter([-1, -1], np.int64, name) for name in names]
        for parameter, name in zip(inputs, names, strict=True):
            parameter.output(0).get_tensor().set_names({name})
        hidden = ops.gather(ops.constant(np.ones((9, 4), np.float32)), inputs[0], ops.constant(np.int64(0)))
        for parameter in inputs[1:]:
            hidden = ops.add(hidden, ops.unsqueeze(ops.convert(parameter, "f32"), ops.constant([2])))
        result = ops.result(hidden)
        result.output(0).get_tensor().set_names({ports["output"]})
        ov.serialize(ov.Model([result], inputs, "other"), model / GRAPH, model / WEIGHTS)

    return change


def rename_graph(name: str) -> Change:
    return lambda model: (model / GRAPH).rename(model / name) and None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(other_model(inputs="pixel_values", output="logits"), "no input 'input_ids'", id="vision"),
        pytest.param(
            other_model(inputs="input_ids attention_mask", output="last_hidden_state"), "embedding", id="embedding"
        ),
        pytest.param(other_model(inputs="input_ids attention_mask", output="logits"), "state", id="no-states"),
        pytest.param(
            other_model(inputs="input_ids encoder_hidden_states", output="logits"), "", id="decoder-of-a-translator"
        ),
        pytest.param(rename_graph("openvino_encoder_model.xml"), "of another kind", id="encoder-decoder"),
        pytest.param(rename_graph("openvino_language_model.xml"), "of another kind", id="parts-of-a-vision-model"),
    ],
)
def test_other_kinds_of_models(desk: Desk, change: Change, words: str) -> None:
    change(desk.model)
    assert words in desk.build_refused(desk.model)


def huge(tensors: int = 0, entries: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"GGUF", id="magic-alone"),
        pytest.param(small_file()[:-1], id="cut-short"),
        pytest.param(huge(tensors=2**63), id="endless-tensors"),
        pytest.param(huge(entries=2**63), id="endless-metadata"),
        pytest.param(huge(entries=1) + struct.pack("<Q", 2**62), id="endless-key"),
        pytest.param(huge(entries=1) + text("a") + struct.pack("<IIQ", 9, 0, 2**60), id="endless-array"),
        pytest.param(huge(tensors=1) + text("w") + struct.pack("<I4QIQ", 4, *[2**63] * 4, 0, 0), id="endless-tensor"),
        pytest.param(huge(entries=1) + text("general.alignment") + struct.pack("<II", 4, 0), id="no-alignment"),
        pytest.param(b"GGUF" + struct.pack("<IQQ", 99, 0, 0), id="unknown-version"),
        pytest.param(huge(), id="nothing-in-it"),
        pytest.param(b"PK\3\4" + bytes(100), id="not-gguf"),
    ],
)
def test_gguf_files(desk: Desk, content: bytes) -> None:
    (desk.folder / "model.gguf").write_bytes(content)
    assert "model.gguf" in desk.build_refused(desk.folder / "model.gguf")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--stages", 4), "has 3 layers"),
        (("--stages", 10**6), "has 3 layers"),
        (("--cuts", "2,1"), "must rise"),
        (("--cuts", "1,1"), "must rise"),
        (("--cuts", "3"), "must rise"),
        (("--cuts", "1,99999999999999999999"), "must rise"),
    ],
    ids=str,
)
def test_cuts_that_the_model_does_not_have(desk: Desk, options: tuple[object, ...], words: str) -> None:
    assert words in desk.build_refused(desk.model, *options)


@pytest.mark.parametrize("cuts", ["0", "-1", "1,-2", "", ",", "1;2", "1.5"])
def test_cuts_that_no_model_has_are_wrong_usage(desk: Desk, cuts: str) -> None:
    before = desk.contents()
    assert desk.run("build", desk.model, "-o", desk.folder / "shards", "--cuts", cuts).exit_code == 2
    assert desk.contents() == before


def test_outputs_that_would_replace_something_else(desk: Desk) -> None:
    file = desk.folder / "file"
    file.write_text("kept")
    for output in (file, desk.model, desk.folder):
        assert "is not a shard folder" in desk.refused("build", desk.model, "-o", output, "--stages", 2)
    assert "cannot be written" in desk.refused("build", desk.model, "-o", file / "shards", "--stages", 2)
    shards = desk.folder / "shards"
    assert desk.run("build", desk.model, "-o", shards, "--stages", 2).exit_code == 0
    inner = shutil.copytree(desk.model, shards / "model")
    assert "lies inside" in desk.refused("build", inner, "-o", shards, "--stages", 2)


@pytest.mark.parametrize("name", ["two words", "Übergröße", "模型", "a'b\"c", "model.v2.1", "-o"])
def test_models_under_unusual_names(desk: Desk, name: str) -> None:
    model = desk.model.rename(desk.folder / name)
    result = desk.run("build", model, "-o", model / "shards", "--stages", 2, "--json")
    assert result.exit_code == 0, result.stderr
    assert load_manifest(model / "shards").name == name
    assert desk.run("verify", model / "shards").exit_code == 0


def test_a_model_behind_symbolic_links(desk: Desk) -> None:
    elsewhere = desk.folder / "blobs"
    elsewhere.mkdir()
    for number, path in enumerate(sorted(desk.model.iterdir())):
        path.rename(elsewhere / str(number))
        path.symlink_to(elsewhere / str(number))
    link = desk.folder / "link"
    link.symlink_to(desk.model, target_is_directory=True)
    assert desk.run("build", link, "-o", desk.folder / "shards", "--stages", 2).exit_code == 0
    (desk.model / WEIGHTS).unlink()
    (desk.model / WEIGHTS).symlink_to(desk.folder / "nowhere")
    assert "bin file cannot be found" in desk.build_refused(link)


@pytest.mark.skipif(sys.platform == "win32", reason="names of files are text on Windows")
def test_a_name_that_is_not_text(desk: Desk) -> None:
    model = desk.model.rename(desk.folder / os.fsdecode(b"mod\xe8l"))
    command = [sys.executable, "-m", "paceline", "shard", "build", model, "-o", desk.folder / "shards", "--stages", "2"]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=100)
    assert (result.returncode, result.stdout) == (1, "")
    check_sentence(result.stderr)
    assert {path.name for path in desk.folder.iterdir()} == {model.name, "temporary"}


def swap_constants(root: ElementTree.Element) -> None:
    """Two weights of one form change places."""
    places: dict[tuple[str, ...], list[ElementTree.Element]] = {}
    for data in root.findall("layers/layer[@type='Const']/data"):
        if int(data.get("size", "0")) > 256:
            places.setdefault((data.get("size", ""), data.get("shape", "")), []).append(data)
    one, other = next(found for found in places.values() if len(found) > 1)[:2]
    one_place, other_place = one.get("offset", ""), other.get("offset", "")
    one.set("offset", other_place)
    other.set("offset", one_place)


def transpose_a_product(root: ElementTree.Element) -> None:
    """A product of square matrices reads its weights the other way round."""
    for layer in root.findall("layers/layer[@type='MatMul']"):
        dims = [[dim.text for dim in port] for port in layer.findall("input/port")]
        data = layer.find("data")
        if data is not None and dims[1][0] == dims[1][1]:
            data.set("transpose_b", "false")
            return
    raise AssertionError("the model has no such product")


def put_other_weights(model: Path) -> None:
    content = np.frombuffer((model / WEIGHTS).read_bytes(), dtype=np.uint8).copy()
    content[64:4096:4] ^= 1
    (model / WEIGHTS).write_bytes(content.tobytes())


@pytest.mark.parametrize(
    "change", [edit_graph(swap_constants), edit_graph(transpose_a_product), put_other_weights],
    ids=["constants-swapped", "attribute-changed", "weights-of-the-same-size"],
)  # fmt: skip
def test_an_edited_model_is_another_model(desk: Desk, change: Change) -> None:
    shards = desk.folder / "shards"
    whole = build(desk.model, shards, stages=2)
    edited = shutil.copytree(desk.model, desk.folder / "edited")
    change(edited)
    assert build(edited, desk.folder / "others", stages=2, check="none").model_id != whole.model_id
    with pytest.raises(ModelError, match="is not the model that"):
        verify(shards, reference=edited)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("stage-1.xml", lambda path: path.write_text(path.read_text().replace("MatMul", "MatNul", 1))),
        ("stage-1.xml", lambda path: path.write_text(re.sub(r'offset="\d+"', 'offset="0"', path.read_text(), count=1))),
        ("stage-0.bin", lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ("stage-0.bin", lambda path: path.write_bytes(b"\1" + path.read_bytes()[1:])),
        ("stage-0.bin", lambda path: path.unlink()),
        ("openvino_tokenizer.xml", lambda path: path.write_text(path.read_text() + " ")),
        (
            "manifest.json",
            lambda path: path.write_text(path.read_text().replace('"first_layer": 2', '"first_layer": 1')),
        ),
        ("manifest.json", lambda path: path.write_text(path.read_text()[:-20])),
        ("manifest.json", lambda path: path.write_bytes(b"[" * 100_000)),
        ("manifest.json", lambda path: path.write_bytes(b"\xff")),
    ],
)
def test_edited_shards(desk: Desk, name: str, change: Callable[[Path], object]) -> None:
    shards = desk.folder / "shards"
    build(desk.model, shards, stages=2, check="none")
    change(shards / name)
    assert name in desk.refused("verify", shards)
    if name == "manifest.json":
        assert name in desk.refused("inspect", shards)
        assert name in desk.refused("diff", shards, shards)


def test_a_graph_that_changes_during_the_build(desk: Desk) -> None:
    before = desk.contents()

    def edit(progress: BuildProgress) -> None:
        if progress.phase == "write":
            edit_graph(transpose_a_product)(desk.model)

    with pytest.raises(ModelError, match="changed while it was being cut"):
        build(desk.model, desk.folder / "shards", stages=3, progress=edit)
    assert desk.contents() == before


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that everybody may enter and write to, other than those of tests."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("hidden", [".", WEIGHTS])
def test_files_that_may_not_be_read(public_folder: Path, hidden: str) -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only the superuser of Linux can give up the right to read everything")
    model = TinyDecoder().write(public_folder / "model")
    (model / hidden).chmod(0)
    command = [sys.executable, "-m", "paceline", "shard", "build", model, "-o", public_folder / "shards", "--stages=2"]
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    home = {HOME_VARIABLE: str(public_folder / "home"), "HOME": str(public_folder)}
    result = subprocess.run([*nobody, *command], capture_output=True, text=True, timeout=100, env=os.environ | home)
    assert (result.returncode, result.stdout) == (1, "")
    check_sentence(result.stderr)
    assert str(model) in result.stderr
    assert {path.name for path in public_folder.iterdir()} == {"model"}
