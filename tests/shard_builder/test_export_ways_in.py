"""Builds from a checkpoint, in every weight format, and from GGUF files of other kinds. Needs the ``export`` extra."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import openvino_genai
import pytest

from fleet.build_messages import BuildProgress, WeightChoice
from fleet.errors import ModelError
from fleet.manifest import Manifest, load_manifest
from shard_builder import build
from shard_builder.sources.formats import list_formats
from shard_builder.sources.ways_in import open_source

pytestmark = [
    pytest.mark.export,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the export extra (torch) is not installed"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``checkpoint`` and ``starcoder.gguf``."""
    folder = tmp_path_factory.mktemp("made")
    program = Path(__file__).with_name("make_checkpoint.py")
    run = subprocess.run([sys.executable, str(program), str(folder)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def work_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


def check_exact(manifest: Manifest) -> None:
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0
    for stage in manifest.stages:
        assert stage.fused_attention == stage.expected_attention == stage.end_layer - stage.first_layer


def test_a_checkpoint_is_built_with_all_that_belongs_to_it(made: Path, work_folder: Path, tmp_path: Path) -> None:
    heard: list[BuildProgress] = []
    manifest = build(made / "checkpoint", tmp_path / "shards", stages=2, work_folder=work_folder, progress=heard.append)
    check_exact(manifest)
    assert (manifest.name, manifest.architecture) == ("checkpoint", "llama")
    assert manifest.stop_token_ids == (1,)
    assert manifest.has_chat_template
    assert manifest.weight_formats[0].element_type == "f16"
    assert {"LICENSE", "generation_config.json", "chat_template.jinja"} <= {one.name for one in manifest.tokenizer}
    assert any("Exporting checkpoint needs about" in one.remark for one in heard)
    tokenizer = openvino_genai.Tokenizer(tmp_path / "shards")
    tokens = tokenizer.encode("The riders").input_ids.data[0]
    assert tokenizer.decode(list(tokens)) == "The riders"
    chat = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True) == "<start>Hello<end>"


@pytest.mark.parametrize(
    "choice",
    [
        WeightChoice("int8"),
        WeightChoice("int4", group_size=128),
        WeightChoice("int4", group_size=-1, symmetric=True),
    ],
)
def test_weights_take_what_was_forecast(made: Path, work_folder: Path, tmp_path: Path, choice: WeightChoice) -> None:
    forecast = next(cost.bytes for cost in list_formats(made / "checkpoint").formats if cost.choice == choice)
    source = open_source(made / "checkpoint", work_folder, weights=choice)
    assert (source.folder / "openvino_model.bin").stat().st_size == pytest.approx(forecast, rel=0.03)
    exported = open_source(made / "checkpoint", work_folder).folder
    of_graph = next(cost.bytes for cost in list_formats(exported).formats if cost.choice == choice)
    assert of_graph == pytest.approx(forecast, rel=0.01)
    check_exact(build(made / "checkpoint", tmp_path / "shards", stages=2, weights=choice, work_folder=work_folder))
    assert "LICENSE" in {entry.name for entry in load_manifest(tmp_path / "shards").tokenizer}
    with pytest.raises(ModelError, match="compressed already"):
        open_source(source.folder, work_folder, weights=choice)


def test_a_gguf_file_that_the_reader_does_not_know_goes_through_transformers(
    made: Path, work_folder: Path, tmp_path: Path
) -> None:
    manifest = build(made / "starcoder.gguf", tmp_path / "shards", stages=2, work_folder=work_folder)
    check_exact(manifest)
    assert manifest.architecture == "starcoder2"
    assert manifest.has_chat_template
    assert "LICENSE-in-GGUF.txt" in {entry.name for entry in manifest.tokenizer}


def test_a_tokenizer_is_converted_for_a_model_that_lacks_one(made: Path, work_folder: Path, tmp_path: Path) -> None:
    exported = open_source(made / "checkpoint", work_folder).folder
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("openvino_model.xml", "openvino_model.bin", "config.json"):
        (bare / name).write_bytes((exported / name).read_bytes())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (bare / name).write_bytes((made / "checkpoint" / name).read_bytes())
    before = {path.name for path in bare.iterdir()}
    source = open_source(bare, work_folder)
    assert source.folder == bare
    assert {path.name for path in bare.iterdir()} == before
    names = [path.name for path in source.companions]
    assert names[:2] == ["openvino_tokenizer.xml", "openvino_tokenizer.bin"]
    assert len(names) == len(set(names))


def test_code_that_a_checkpoint_brings_along_is_not_run(made: Path, work_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "strange"
    folder.mkdir()
    for path in (made / "checkpoint").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(
        '{"model_type": "strange", "auto_map": {"AutoConfig": "strange.Strange", "AutoModelForCausalLM": "strange.M"}}'
    )
    (folder / "strange.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ModelError, match="needs code of its own"):
        open_source(folder, work_folder)
    assert not (tmp_path / "ran").exists()
