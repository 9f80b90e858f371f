"""Cuts tiny decoders with the traits that exporters give them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.build_messages import BuildProgress
from fleet.errors import CancelledError, ModelError
from fleet.manifest import RUN_ALIGNMENT_BYTES, Manifest, load_manifest
from shard_builder import build, inspect, verify
from shard_builder.check.reference import exact_properties
from shard_builder.cut import parts
from tests.shard_builder.conftest import TinyDecoder

Writer = Callable[..., Path]


@pytest.mark.parametrize(
    "traits",
    [
        {},
        {"gather": False},
        {"initialised": False},
        {"gather": False, "initialised": False},
        {"tied": False},
        {"hidden_type": "f16"},
        {"per_layer_inputs": True},
        {"shared_cache": True},
        {"shared_cache": True, "per_layer_inputs": True, "gather": False},
        {"explicit_ports": True, "gather": False},
        {"explicit_ports": True, "per_layer_inputs": True},
        {"extra_input": "token_type_ids", "extra_input_is_read": True},
    ],
    ids=str,
)
def test_shards_give_the_whole_models_logits(tiny_model: Writer, tmp_path: Path, traits: dict[str, object]) -> None:
    manifest = build(tiny_model(**traits), tmp_path / "shards", stages=3, kv_precision="f32")
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0
    assert manifest.verification.greedy_match == 1.0
    assert [(stage.fused_attention, stage.expected_attention) for stage in manifest.stages] == [(1, 1)] * 3
    assert load_manifest(tmp_path / "shards") == manifest


def test_what_runs_beside_the_stream_crosses_with_it(
    tiny_model: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "HEAVY_CONSTANT_BYTES", 512)
    model = tiny_model(layers=4, shared_cache=True, per_layer_inputs=True)
    manifest = build(model, tmp_path / "shards", cuts=[1, 2], kv_precision="f32")
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0
    for stage in manifest.stages[1:]:
        # The stream, the token table's row that every layer scales, and the new key and value of the first layer.
        assert [tensor.width for tensor in stage.cut_tensors] == [16, 16, 16, 16]
        assert (stage.input_width, stage.cut_tensors[0].element_type) == (64, "f32")
    assert [layer.borrowed_caches for layer in manifest.layers] == [(), (), (), (0,)]
    assert any("keeps copies of them" in note for note in manifest.notes)
    embedding = {run.sha256 for run in manifest.runs if -1 in run.parts and run.kind == "embedding"}
    assert embedding
    assert not embedding & {place.sha256 for stage in manifest.stages[1:] for place in stage.runs}


@settings(max_examples=4)
@given(
    cuts=st.sets(st.integers(1, 3), min_size=1),
    traits=st.fixed_dictionaries(
        {
            "shared_cache": st.booleans(),
            "per_layer_inputs": st.booleans(),
            "gather": st.booleans(),
            "explicit_ports": st.booleans(),
            "tied": st.booleans(),
        }
    ),
)
def test_any_traits_cut_anywhere_give_the_whole_models_logits(
    tmp_path_factory: pytest.TempPathFactory, cuts: set[int], traits: dict[str, bool]
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    model = TinyDecoder(layers=4, **traits).write(folder / "model")
    manifest = build(model, folder / "shards", cuts=sorted(cuts), kv_precision="f32")
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0


def test_the_manifest_describes_the_model(tiny_model: Writer, tmp_path: Path) -> None:
    manifest = build(tiny_model(), tmp_path / "shards", cuts=[2], kv_precision="u8")
    assert (manifest.architecture, manifest.hidden_size, manifest.vocabulary_size) == ("tiny", 16, 61)
    assert (manifest.context_tokens, manifest.stop_token_ids) == (256, (2,))
    assert [(layer.kv_elements_per_token, layer.kv_bytes_per_token) for layer in manifest.layers] == [(32, 32)] * 3
    assert manifest.cuts == (2,)
    assert [stage.inputs for stage in manifest.stages] == [
        ("input_ids", "attention_mask", "position_ids", "beam_idx"),
        ("inputs_embeds", "attention_mask", "beam_idx", "sampled_positions"),
    ]


def test_shards_keep_runtime_options_and_name_their_ports(tiny_model: Writer, tmp_path: Path) -> None:
    build(tiny_model(), tmp_path / "shards", stages=2)
    core = ov.Core()
    first, last = (core.read_model(tmp_path / "shards" / f"stage-{stage}.xml") for stage in (0, 1))
    for shard in (first, last):
        assert shard.get_rt_info(["runtime_options", "ACTIVATIONS_SCALE_FACTOR"]).astype(str) == "8.0"
    assert first.output("hidden_states").get_element_type() == ov.Type.f32
    assert last.input("inputs_embeds").get_partial_shape() == ov.PartialShape([-1, -1, 16])
    assert last.output("logits").get_partial_shape()[2] == 61


def run(folder: Path, manifest: Manifest, feed: dict[str, NDArray[Any]], positions: list[int]) -> NDArray[Any]:
    """The logits of one call of the shards, one after the other."""
    flowing: dict[str, NDArray[Any]] = {}
    output = np.empty(0)
    for stage in manifest.stages:
        compiled = ov.compile_model(folder / stage.graph.name, "CPU", exact_properties("CPU", "f32"))
        everything = feed | flowing | {"sampled_positions": np.array(positions)}
        output = np.array(compiled({name: everything[name] for name in stage.inputs})[0])
        flowing = {"inputs_embeds": output}
    return output


def test_batches_with_padding_and_chosen_positions_come_out_the_same(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model()
    manifest = build(model, tmp_path / "shards", stages=3)
    mask = np.ones((3, 6), dtype=np.int64)
    mask[1, :2] = 0
    feed = {
        "input_ids": np.random.default_rng(3).integers(0, 61, (3, 6)),
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0),
        "beam_idx": np.arange(3, dtype=np.int32),
    }
    whole = ov.compile_model(model / "openvino_model.xml", "CPU", exact_properties("CPU", "f32"))
    expected = np.array(whole(feed)["logits"])
    np.testing.assert_array_equal(run(tmp_path / "shards", manifest, feed, list(range(6))), expected)
    np.testing.assert_allclose(run(tmp_path / "shards", manifest, feed, [5, 2]), expected[:, [5, 2]], atol=1e-6)


def test_runs_are_the_same_bytes_wherever_the_model_is_cut(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model(layers=4)
    manifests = []
    for number, cuts in enumerate([[1], [3], [1, 2, 3]]):
        folder = tmp_path / f"shards-{number}"
        manifest = build(model, folder, cuts=cuts)
        manifests.append(manifest)
        for stage in manifest.stages:
            content = (folder / stage.weights.name).read_bytes()
            for place in stage.runs:
                assert place.offset % RUN_ALIGNMENT_BYTES == 0
                piece = content[place.offset : place.offset + manifest.run(place.sha256).bytes]
                assert hashlib.sha256(piece).hexdigest() == place.sha256
    assert len({manifest.model_id for manifest in manifests}) == 1
    kept = [{run for run in manifest.runs if run.kind != "cut"} for manifest in manifests]
    assert kept[0] == kept[1] == kept[2]
    assert {run.layer for run in kept[0] if run.kind == "layer"} == {0, 1, 2, 3}
    assert all(run.bytes < 4096 for manifest in manifests for run in manifest.runs if run.kind == "cut")


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        ({"states": False}, "keeps no state between calls"),
        ({"last_position_only": True}, "not one row per token"),
        ({"input_name": "pixel_values"}, "no input 'input_ids'"),
        ({"extra_input": "cache_position"}, "has an input 'cache_position'"),
        ({"extra_input": "past_key_values.0.key"}, "export it with states"),
    ],
    ids=str,
)
def test_models_that_cannot_be_cut_are_refused(
    tiny_model: Writer, tmp_path: Path, traits: dict[str, object], message: str
) -> None:
    refuse(tiny_model(**traits), tmp_path, message)


def refuse(model: Path, tmp_path: Path, message: str, **options: Any) -> None:
    """Building fails with the message, and nothing is left behind."""
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ModelError) as caught:
        build(model, tmp_path / "shards", work_folder=tmp_path, **({"stages": 2} | options))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 4}, "has 3 layers, so it cannot be cut into 4 stages"),
        ({"stages": None, "cuts": [2, 1]}, "must rise"),
        ({"stages": None, "cuts": [0]}, "must rise"),
        ({"stages": None, "cuts": [3]}, "must rise"),
        ({"stages": None}, "either how many stages"),
        ({"cuts": [1]}, "either how many stages"),
    ],
    ids=str,
)
def test_cuts_that_the_model_does_not_have_are_refused(
    tiny_model: Writer, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    refuse(tiny_model(), tmp_path, message, **options)


def test_a_model_of_one_layer_is_one_stage(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model(layers=1)
    refuse(model, tmp_path, "The model has one layer, so it cannot be cut into 2 stages.")
    manifest = build(model, tmp_path / "shards", stages=1, kv_precision="f32")
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0
    assert [(stage.fused_attention, stage.expected_attention) for stage in manifest.stages] == [(1, 1)]


def test_damaged_models_are_refused(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model()
    graph, weights = model / "openvino_model.xml", model / "openvino_model.bin"
    content, text = weights.read_bytes(), graph.read_text()
    weights.write_bytes(content[: len(content) // 2])
    refuse(model, tmp_path, "OpenVINO cannot read")
    weights.write_bytes(content)
    graph.write_text(text[: len(text) // 2])
    refuse(model, tmp_path, "OpenVINO cannot read")
    graph.write_text(text.replace('type="MatMul"', 'type="MatNul"'))
    refuse(model, tmp_path, "OpenVINO cannot read")
    graph.write_text(text)
    (model / "config.json").write_text("{")
    refuse(model, tmp_path, "config.json is damaged")
    (model / "config.json").unlink()
    (model / "openvino_tokenizer.xml").write_text("<net>")
    refuse(model, tmp_path, "openvino_tokenizer.xml is damaged")
    (model / "openvino_tokenizer.xml").unlink()
    refuse(model, tmp_path, "openvino_tokenizer.xml is missing")
    graph.rename(model / "openvino_vision_embeddings_model.xml")
    refuse(model, tmp_path, "belongs to a model of another kind")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", tmp_path, "There is no model at")
    (tmp_path / "text").write_text("hello")
    refuse(tmp_path / "text", tmp_path, "is not a model")


def test_places_that_cannot_be_written_are_named(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model()
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"):
        build(model, tmp_path / "file" / "shards", stages=2)
    with pytest.raises(ModelError, match="exists and is not a shard folder"):
        build(model, tmp_path / "file", stages=2)
    with pytest.raises(ModelError, match="exists and is not a shard folder"):
        build(model, model, stages=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]


@pytest.fixture
def stranger() -> Callable[[], AbstractContextManager[None]]:
    """A context in which this process may not read what its user has made private."""
    if sys.platform == "win32" or os.geteuid() != 0:
        pytest.skip("only the superuser can become somebody else")

    @contextmanager
    def become() -> Iterator[None]:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return become


def test_what_may_not_be_read_is_named(
    tiny_model: Writer, tmp_path: Path, stranger: Callable[[], AbstractContextManager[None]]
) -> None:
    model = tiny_model()
    model.chmod(0o700)
    for act in (
        lambda: build(model, tmp_path / "shards", stages=2),
        lambda: inspect(model),
        lambda: verify(model),
    ):
        with stranger(), pytest.raises(ModelError, match="cannot be read: Permission denied"):
            act()


def test_a_full_disk_is_noticed_before(tiny_model: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    model = tiny_model()
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    refuse(model, tmp_path, "which has 1,000 free")


def test_progress_rises_and_cancelling_at_any_time_leaves_nothing(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model()
    reports: list[BuildProgress] = []
    build(model, tmp_path / "whole", stages=2, progress=reports.append)
    assert all(one.fraction <= two.fraction for one, two in itertools.pairwise(reports))
    assert (reports[0].fraction, reports[-1].fraction) == (0.0, 1.0)
    assert list(dict.fromkeys(report.phase for report in reports)) == ["convert", "analyse", "write", "verify"]
    written = [report for report in reports if report.phase == "write"]
    assert written[-1].bytes_done == written[-1].bytes_total > 0
    for stop in {"convert", "analyse", "write", "verify"}:
        seen: list[str] = []

        def note(report: BuildProgress, seen: list[str] = seen) -> None:
            seen.append(report.phase)

        with pytest.raises(CancelledError):
            build(model, tmp_path / "shards", stages=2, progress=note, cancelled=lambda s=stop, n=seen: s in n)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "whole"]


def test_a_shard_folder_is_replaced_by_a_new_build(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model()
    build(model, tmp_path / "shards", stages=3)
    build(model, tmp_path / "shards", stages=2)
    assert not (tmp_path / "shards" / "stage-2.xml").exists()
    assert len(load_manifest(tmp_path / "shards").stages) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "shards"]


def test_verify_keeps_a_reference_and_finds_what_changed(tiny_model: Writer, tmp_path: Path) -> None:
    model, shards, reference = tiny_model(), tmp_path / "shards", tmp_path / "reference"
    build(model, shards, stages=2)
    check = verify(shards, kv_precision="f32", reference=reference)
    assert (check.max_abs_diff, check.greedy_match) == (0.0, 1.0)
    assert [(stage.fused, stage.expected) for stage in check.fused_attention] == [(2, 2), (1, 1)]
    model.rename(tmp_path / "elsewhere")
    assert verify(shards, kv_precision="f32", reference=reference).max_abs_diff == 0.0
    assert verify(shards, reference=tmp_path / "elsewhere").max_abs_diff == 0.0
    with pytest.raises(ModelError, match="with a f32 KV cache"):
        verify(shards, kv_precision="f16", reference=reference)
    with pytest.raises(ModelError, match="not on this PC any more"):
        verify(shards)
    with pytest.raises(ModelError, match="no device 'TPU'"):
        verify(shards, device="TPU", reference=reference)
    logits = min(reference.glob("logits-*.npy"))
    stored = np.load(logits)
    stored[0, 0] += 1
    np.save(logits, stored)
    assert verify(shards, kv_precision="f32", reference=reference).max_abs_diff == pytest.approx(1, abs=1e-4)
    logits.write_bytes(b"")
    with pytest.raises(ModelError, match="missing or damaged"):
        verify(shards, kv_precision="f32", reference=reference)
    weights = shards / "stage-1.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(ModelError, match=r"stage-1\.bin is damaged"):
        verify(shards, reference=reference)


def test_another_models_reference_is_refused(tmp_path: Path, tiny_model: Writer) -> None:
    one = tiny_model()
    build(one, tmp_path / "shards", stages=2)
    other = one.rename(tmp_path / "other")
    tiny_model(layers=4)
    build(tmp_path / "model", tmp_path / "shards-4", stages=2)
    verify(tmp_path / "shards-4", reference=tmp_path / "reference")
    with pytest.raises(ModelError, match="belongs to another model"):
        verify(tmp_path / "shards", reference=tmp_path / "reference")
    with pytest.raises(ModelError, match="is not the model that"):
        verify(tmp_path / "shards-4", reference=other)


def test_inspect_tells_the_same_before_and_after_the_cut(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model()
    build(model, tmp_path / "shards", stages=2)
    before, after = inspect(model), inspect(tmp_path / "shards")
    assert before.layers == after.layers
    assert (before.stages, before.verification, before.model_id) == ((), None, "")
    assert (before.embedding_bytes, before.head_bytes) == (after.embedding_bytes, after.head_bytes)
    assert before.embedding_bytes > 61 * 16 * 4
    assert [(stage.first_layer, stage.end_layer) for stage in after.stages] == [(0, 2), (2, 3)]
    for stage in after.stages:
        for file in stage.files:
            assert (tmp_path / "shards" / file.name).stat().st_size == file.bytes
    text = (tmp_path / "shards" / "manifest.json").read_text()
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps(json.loads(text) | {"manifest_version": 9}))
    with pytest.raises(ModelError, match="not a shard manifest that this version reads"):
        inspect(tmp_path / "shards")
