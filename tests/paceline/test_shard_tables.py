"""Tables about shards fit a terminal of 80 columns and say what the manifest says."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.manifest import (
    CaseResult,
    CutTensor,
    FileEntry,
    FusionFault,
    KvPrecision,
    Layer,
    Manifest,
    PagedForm,
    Run,
    RunPlace,
    Stage,
    Verification,
    WeightFormat,
)
from paceline.difference_tables import show_difference
from paceline.shard_tables import show_inspection
from paceline.table_words import format_words, number_words, part_words, size_words
from shard_builder.difference import compare
from shard_builder.inspection import inspect_manifest

MIB = 1 << 20


def digest(number: int) -> str:
    return f"{number:064x}"


def manifest(cuts: tuple[int, ...], kv_precision: KvPrecision = "f16", first_run: int = 0) -> Manifest:
    """A model of 48 layers, every fourth of which keeps more in its cache; runs are told apart by ``first_run``."""
    layers = tuple(
        Layer(
            index=index,
            bytes=90 * MIB,
            kv_elements_per_token=1024 if index % 4 else 4096,
            kv_bytes_per_token=2048 if index % 4 else 8192,
            weight_formats=(WeightFormat("u4", 80 * MIB), WeightFormat("f16", 10 * MIB)),
        )
        for index in range(48)
    )
    runs = [Run(digest(index), 90 * MIB, "layer", index, (index,)) for index in range(1, 48)]
    runs.append(Run(digest(first_run + 1000), 90 * MIB, "layer", 0, (0,)))
    runs.append(Run(digest(2000), 500 * MIB, "shared", None, (-1, 48)))
    runs.append(Run(digest(2001), 4096, "shared", None, tuple(range(48))))
    of_layer = {run.layer: run.sha256 for run in runs if run.layer is not None}
    stages = []
    for number, (first, end) in enumerate(zip((0, *cuts), (*cuts, 48), strict=True)):
        places = [RunPlace(of_layer[layer], (layer - first) * 90 * MIB) for layer in range(first, end)]
        places.append(RunPlace(digest(3000 + first), (end - first) * 90 * MIB))
        runs.append(Run(digest(3000 + first), 600, "cut"))
        stages.append(
            Stage(
                stage=number,
                first_layer=first,
                end_layer=end,
                bytes=(end - first) * 90 * MIB + 600,
                graph=FileEntry(f"stage-{number}.xml", MIB, digest(4000 + 100 * first + end)),
                weights=FileEntry(f"stage-{number}.bin", (end - first) * 90 * MIB + 600, digest(5000 + first)),
                runs=tuple(places),
                inputs=("inputs_embeds", "beam_idx"),
                fused_attention=end - first - (1 if number else 0),
                expected_attention=end - first,
                cut_tensors=(CutTensor("model.layers.self_attn.a_long_name_of_a_tensor/add.1.layer11", 4096, "bf16"),)
                if number
                else (),
                fusion_faults=(FusionFault("one Gather", "a/long/name/of/a/node", "it has two"),) if number else (),
            )
        )
    return Manifest(
        manifest_version=1,
        model_id=digest(first_run),
        name="A-Model-With-A-Rather-Long-Name-As-They-Have-12B-Instruct-2512-int4",
        architecture="gemma3_text",
        hidden_size=4096,
        vocabulary_size=262_144,
        context_tokens=131_072,
        kv_precision=kv_precision,
        layers=layers,
        runs=tuple(runs),
        stages=tuple(stages),
        tokenizer=(FileEntry("config.json", 100, digest(6000 + first_run)),),
        stop_token_ids=(1, 106),
        verification=Verification(0.0, 1.0, "CPU", kv_precision, "2026.4.1", cases=(CaseResult("batch of 3", 0.0),)),
        notes=("A note that people should read.",),
        rollback=("trim",),
        paged=PagedForm(False, reason="its window is longer than a block"),
        weight_formats=(WeightFormat("u4", 4000 * MIB), WeightFormat("f16", 800 * MIB)),
        has_chat_template=False,
    )


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, as one line: no line of it was longer than the terminal."""
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    return " ".join(" ".join(lines).replace("│", " ").split())


def test_an_inspection_says_what_the_manifest_says(capsys: pytest.CaptureFixture[str]) -> None:
    show_inspection(inspect_manifest(manifest(cuts=(12, 30))), as_json=False)
    text = printed(capsys)
    for words in (
        "gemma3_text, 48 layers, hidden size 4,096, vocabulary 262,144, trained for 131,072 tokens",
        "4.7 GiB: u4 83 %, f16 17 %",
        "50 runs of weights with 4.7 GiB are the same wherever this model is cut",
        "1.8 KiB belong to this cut alone",
        "no chat template",
        "rejected tokens are taken back by trimming",
        "may not be served with paged attention: its window is longer than a block",
        "each 90.0 MiB each 8.0 KiB u4 89 %, f16 11 %",
        "shared by",
        "500.0 MiB",
        "1 12 to 29 1.6 GiB 600 bytes 66.0 KiB",
        "17 of 18",
        "predicted for one chat of 4,096 tokens",
        "4,096 bf16",
        "one Gather: it has two",
        "batch of 3 0",
        "largest difference of a logit 0",
        "A note that people should read.",
    ):
        assert words in text


def test_what_only_a_check_finds_out_is_not_told_of_unchecked_shards(capsys: pytest.CaptureFixture[str]) -> None:
    unchecked = msgspec.structs.replace(manifest(cuts=(12,)), verification=None, rollback=(), paged=None)
    show_inspection(inspect_manifest(unchecked), as_json=False)
    text = printed(capsys)
    assert "rollback not tried" in text
    assert "paged not tried" in text
    assert "no way was found" not in text
    assert "of 36" not in text


def test_every_layer_has_a_row_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    inspection = inspect_manifest(manifest(cuts=(12,)))
    show_inspection(inspection, as_json=False)
    assert printed(capsys).count("each 90.0 MiB") == 2
    show_inspection(inspection, as_json=False, every_layer=True)
    text = printed(capsys)
    assert all(f"layer {layer} 90.0 MiB" in text for layer in range(48))


def test_a_difference_of_cuts_says_what_moves(capsys: pytest.CaptureFixture[str]) -> None:
    show_difference(compare(manifest(cuts=(12, 30)), manifest(cuts=(16, 30), kv_precision="u8")), as_json=False)
    text = printed(capsys)
    for words in (
        "same model",
        "cut elsewhere",
        "0 0 to 11 0 to 15 12 to 15 361.0 MiB 1.4 GiB",
        "1 12 to 29 16 to 29 12 to 15 1.0 MiB 1.2 GiB",
        "2 30 to 47 30 to 47 0 bytes 1.6 GiB",
        "fetch 362.0 MiB in all",
        "would fetch 2.0 MiB",
        "graph files differ: 0 to 1.",
        "only in A 1 600 bytes",
        "KV precision f16 u8",
    ):
        assert words in text


def test_a_difference_of_models_names_what_changed(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(manifest(cuts=(12,)), manifest(cuts=(12,), first_run=7))
    assert not found.same_model
    assert not found.same_weights
    assert found.changed_layers == (0,)
    assert found.changed_files == ("config.json",)
    assert found.bytes_only_in_a == found.bytes_only_in_b == 90 * MIB
    show_difference(found, as_json=False)
    text = printed(capsys)
    assert "are different models" in text
    assert "Layers with other weights: 0; the same: 47." in text
    assert "Files that differ: config.json." in text


def test_a_shard_folder_does_not_differ_from_itself() -> None:
    found = compare(manifest(cuts=(12, 30)), manifest(cuts=(12, 30)))
    assert found.same_model
    assert found.values == ()
    assert (found.fetch_bytes, found.fetch_bytes_with_all, found.bytes_only_in_a, found.bytes_only_in_b) == (0, 0, 0, 0)
    assert all(stage.same_graph and not stage.gained_layers and not stage.lost_layers for stage in found.stages)


@given(st.sets(st.integers(0, 60)))
def test_numbers_drawn_together_are_all_named_once(layers: set[int]) -> None:
    named: list[int] = []
    for part in number_words(sorted(layers)).split(", ") if layers else []:
        first, _, last = part.partition(" to ")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(layers)


def test_words_for_sizes_parts_and_formats() -> None:
    assert [size_words(size) for size in (0, 1023, 1024, 90 * MIB, 5 << 30, 3 << 50)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "90.0 MiB",
        "5.0 GiB",
        "3,072.0 TiB",
    ]
    assert part_words((-1, 0, 1, 2), 3) == "embedding, layers 0 to 2"
    assert part_words((2, 3), 3) == "layer 2, head"
    assert part_words((), 3) == "parts that the manifest does not tell"
    assert format_words((WeightFormat("u8", 995), WeightFormat("i64", 4))) == "u8 100 %"
    assert format_words(()) == ""
