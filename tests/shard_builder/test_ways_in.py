"""What a model may be given as, and what is said of a model that cannot be used, without the export extra."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from fleet.build_messages import BuildProgress, WeightChoice
from fleet.errors import ModelError
from fleet.manifest import load_manifest
from shard_builder import build, verify
from shard_builder.reporting import Reporter
from shard_builder.sources.gguf import read_head
from shard_builder.sources.gguf_source import LICENCE_NOTE, convert_gguf_file
from shard_builder.sources.kept_models import CONVERT_ANYWAY_VARIABLE, announce_needs, keep
from shard_builder.sources.ways_in import open_source

Writer = Callable[..., Path]

without_extra = pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="the export extra is installed; this is what is said without"
)


def companion_names(folder: Path) -> set[str]:
    return {entry.name for entry in load_manifest(folder).tokenizer}


def test_shards_are_not_cut_again(tiny_model: Writer, tmp_path: Path) -> None:
    build(tiny_model(), tmp_path / "shards", stages=2, check="none")
    with pytest.raises(ModelError, match="holds shards, which are not cut again"):
        build(tmp_path / "shards", tmp_path / "again", stages=3)
    assert not (tmp_path / "again").exists()


def test_licence_template_and_settings_come_along(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model()
    texts = {
        "LICENSE": "Do as you like.",
        "NOTICE.txt": "Mind it.",
        "USE_POLICY.md": "Be kind.",
        "generation_config.json": '{"do_sample": false}',
        "chat_template.jinja": "{{ messages[0].content }}",
    }
    for name, text in (texts | {"README.md": "# Tiny", "NOTICEBOARD.png": "no"}).items():
        (model / name).write_text(text)
    manifest = build(model, tmp_path / "shards", stages=2)
    assert manifest.has_chat_template
    assert companion_names(tmp_path / "shards") >= {*texts, "config.json"}
    assert not companion_names(tmp_path / "shards") & {"README.md", "NOTICEBOARD.png"}
    for name, text in texts.items():
        assert (tmp_path / "shards" / name).read_text() == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}'),
        ("chat_template.json", '{"chat_template": "{{ messages }}"}'),
    ],
)
def test_a_template_in_any_of_its_places_is_found(tiny_model: Writer, name: str, text: str) -> None:
    model = tiny_model()
    assert not open_source(model).has_chat_template
    (model / name).write_text(text)
    assert open_source(model).has_chat_template


def test_a_model_without_a_chat_template_says_so(tiny_model: Writer, tmp_path: Path) -> None:
    manifest = build(tiny_model(), tmp_path / "shards", stages=2)
    assert not manifest.has_chat_template
    assert any("no chat template" in note for note in manifest.notes)


def write_detokenizer(folder: Path, tokens: int, skipped: list[int]) -> None:
    """The part of a detokenizer's graph that says how many tokens there are, and which are special."""
    (folder / "openvino_detokenizer.bin").write_bytes(np.array([7, *skipped], np.int32).tobytes())
    (folder / "openvino_detokenizer.xml").write_text(
        f"""<net name="detokenizer"><layers>
        <layer id="0" name="skipped" type="Const"><data offset="4" size="{4 * len(skipped)}"/></layer>
        <layer id="1" name="sliced" type="Slice"/>
        <layer id="2" name="decoder" type="VocabDecoder">
        <input><port id="0"><dim>-1</dim></port><port id="1"><dim>{tokens}</dim></port><port id="4"/></input></layer>
        </layers><edges><edge from-layer="0" from-port="0" to-layer="1" to-port="0"/>
        <edge from-layer="1" from-port="1" to-layer="2" to-port="4"/></edges></net>"""
    )


def test_another_models_tokenizer_is_refused(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model()  # with 61 tokens
    write_detokenizer(model, 61, [0])
    build(model, tmp_path / "right", stages=2)
    write_detokenizer(model, 63, [0, 61, 62])  # special tokens that no text becomes
    build(model, tmp_path / "special", stages=2)
    write_detokenizer(model, 63, [0, 61])
    with pytest.raises(ModelError, match=r"is another model's: it has 63 tokens, and .* knows 61"):
        build(model, tmp_path / "wrong", stages=2)
    assert not (tmp_path / "wrong").exists()


def write_checkpoint(folder: Path, configuration: dict[str, Any] | None = None) -> Path:
    """A checkpoint folder with one small tensor."""
    folder.mkdir()
    content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} if configuration is None else configuration
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text("{}")
    head = json.dumps({"weight": {"dtype": "F16", "shape": [4, 4], "data_offsets": [0, 32]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * 32)
    return folder


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5Model"]}, "a model with an encoder"),
        ({"model_type": "llava", "vision_config": {}, "architectures": ["LlavaModel"]}, "for pictures and text"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "holds a BertModel, which is not a language model"),
        ({"transformers_version": "5"}, "names no model_type"),
    ],
)
def test_checkpoints_of_other_kinds_are_refused(tmp_path: Path, configuration: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(write_checkpoint(tmp_path / "model", configuration), tmp_path / "shards", stages=2)


def test_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()

    def refusal() -> str:
        with pytest.raises(ModelError) as caught:
            open_source(folder, tmp_path / "work")
        return str(caught.value)

    weights.write_bytes(whole[:-1])
    assert "is cut short" in refusal()
    weights.write_bytes(b"\xff" * 20)
    assert "its head is damaged" in refusal()
    weights.unlink()
    assert "no weights" in refusal()
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"weight": "model-1.safetensors"}}')
    assert "model-1.safetensors is missing" in refusal()
    index.write_text("[]")
    assert "is damaged" in refusal()
    weights.write_bytes(whole)
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in refusal()


def write_gguf_of(architecture: str, path: Path) -> Path:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("general.architecture") + struct.pack("<I", 8)
    path.write_bytes(head + text(architecture) + b"\0" * 64)
    return path


@without_extra
def test_what_needs_the_export_extra_says_how_to_get_it(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model()
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("openvino_model.xml", "openvino_model.bin", "config.json"):
        (bare / name).write_bytes((model / name).read_bytes())
    (bare / "tokenizer.json").write_text("{}")
    for given, weights in [
        (write_checkpoint(tmp_path / "checkpoint"), None),
        (write_gguf_of("gemma2", tmp_path / "model.gguf"), None),
        (bare, None),
        (model, WeightChoice("int4")),
    ]:
        with pytest.raises(ModelError, match=r"needs the export extra .* pip install 'paceline\[export\]'"):
            open_source(given, tmp_path / "work", weights=weights)


def test_weights_in_f16_are_made_and_checked_again_from_the_record(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model()
    work = tmp_path / "work"
    manifest = build(model, tmp_path / "shards", stages=2, weights=WeightChoice("fp16"), work_folder=work)
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0
    assert manifest.weight_formats[0].element_type == "f16"
    assert json.loads((tmp_path / "shards" / "source.json").read_bytes())["weights"]["format"] == "fp16"
    assert verify(tmp_path / "shards", kv_precision="f32", work_folder=work).max_abs_diff == 0.0
    assert len(list(work.iterdir())) == 1


def test_compressed_weights_are_not_compressed_again(
    smollm2_gguf: Path, converted_models: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="are quantised already"):
        open_source(smollm2_gguf, converted_models, weights=WeightChoice("int4"))
    folder = open_source(smollm2_gguf, converted_models).folder
    with pytest.raises(ModelError, match="are compressed already"):
        open_source(folder, tmp_path, weights=WeightChoice("int8"))
    assert open_source(folder, tmp_path, target_device="NPU").folder == folder
    assert "license" in (folder / LICENCE_NOTE).read_text()


class Memory(NamedTuple):
    available: int


def test_a_conversion_says_what_it_needs_and_is_refused_where_there_is_less(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[BuildProgress] = []
    reporter = Reporter(heard.append, None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(123_456_789))
    with pytest.raises(ModelError, match=r"needs about [\d,]+ bytes of memory, and 123,456,789 are available"):
        convert_gguf_file(smollm2_gguf, read_head(smollm2_gguf), tmp_path, reporter)
    assert "GB of memory (0.1 GB are available) and 0.2 GB of disk" in heard[-1].remark
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(CONVERT_ANYWAY_VARIABLE, "1")
    announce_needs(reporter, "It", 10**12, 10**9)


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    dead = next(number for number in range(100_000, 4_000_000) if not psutil.pid_exists(number))
    (tmp_path / f".converting-{dead}-abc").mkdir()
    (tmp_path / "kept").mkdir()
    made = keep(tmp_path / "new", 0, "Converting", lambda scratch: (scratch / "file").touch())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "new"]
    assert [path.name for path in made.iterdir()] == ["file"]
    with pytest.raises(ModelError, match="needs about 1,000,000,000,000,000 bytes on the disk"):
        keep(tmp_path / "more", 10**15, "Converting", lambda _: None)
