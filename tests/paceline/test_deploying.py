"""Which node gets which stage of shards that are already cut."""

from pathlib import Path

import msgspec
import pytest

from fleet.errors import PlacementError
from fleet.manifest import Manifest, load_manifest
from fleet.node import NodeId
from fleet.placement import Placement, PlacementNode
from paceline.deploying import Demand, choose_placement, read_plan

GIGABYTE = 10**9
DEMAND = Demand(context_tokens=1024, users=1, kv_precision="f16")


@pytest.fixture
def manifest(smollm2_two_stages: Path) -> Manifest:
    return load_manifest(smollm2_two_stages)


def node(name: str, budget_bytes: int = 8 * GIGABYTE) -> PlacementNode:
    return PlacementNode(NodeId(name.encode().hex().ljust(16, "0")), name, "CPU", budget_bytes)


def names(placement: Placement) -> list[str]:
    return [stage.node_name for stage in placement.stages]


def test_nodes_are_taken_in_their_order_where_that_fits(manifest: Manifest) -> None:
    assert names(choose_placement(manifest, [node("a"), node("b"), node("c")], DEMAND)) == ["a", "b"]


def test_the_largest_nodes_are_taken_where_the_order_does_not_fit(manifest: Manifest) -> None:
    nodes = [node("small", 1000), node("b"), node("c")]
    assert set(names(choose_placement(manifest, nodes, DEMAND))) == {"b", "c"}


def test_named_nodes_are_taken_in_the_named_order_by_name_or_id(manifest: Manifest) -> None:
    nodes = [node("a"), node("b")]
    assert names(choose_placement(manifest, nodes, DEMAND, "b, a")) == ["b", "a"]
    assert names(choose_placement(manifest, nodes, DEMAND, f"{nodes[1].id},a")) == ["b", "a"]


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("a", "--nodes names 1"),
        ("a,b,a", "--nodes names 3"),
        ("a,nobody", "called 'nobody'; there are: a"),
        ("a,twin", "Several nodes are called 'twin'"),
        ("a,a", "named twice"),
        ("a,", "called ''"),
    ],
)
def test_wrong_names_are_told(manifest: Manifest, wanted: str, sentence: str) -> None:
    twins = [PlacementNode(NodeId(digit * 16), "twin", "CPU", GIGABYTE) for digit in "12"]
    with pytest.raises(PlacementError, match=sentence):
        choose_placement(manifest, [node("a"), node("b"), *twins], DEMAND, wanted)


def test_too_few_nodes_and_too_little_memory_are_told(manifest: Manifest) -> None:
    with pytest.raises(PlacementError, match=r"2 stages .* there are 1: a"):
        choose_placement(manifest, [node("a")], DEMAND)
    with pytest.raises(PlacementError, match=r"a needs .* too much"):
        choose_placement(manifest, [node("a", 1000), node("b", 1000)], DEMAND)


def test_a_precision_that_needs_more_than_there_is_does_not_fit(manifest: Manifest) -> None:
    narrow = choose_placement(manifest, [node("a"), node("b")], DEMAND)
    nodes = [node(stage.node_name, stage.needed_bytes) for stage in narrow.stages]
    choose_placement(manifest, nodes, DEMAND)
    with pytest.raises(PlacementError, match="KV cache"):
        choose_placement(manifest, nodes, msgspec.structs.replace(DEMAND, kv_precision="f32"))


def test_a_plan_is_read_back_with_the_budgets_of_now(manifest: Manifest, tmp_path: Path) -> None:
    nodes = [node("a"), node("b")]
    plan = tmp_path / "plan.json"
    planned = choose_placement(manifest, nodes, DEMAND, "b,a")
    plan.write_bytes(msgspec.json.encode(planned))
    assert read_plan(plan, manifest, nodes, "f16") == planned
    with pytest.raises(PlacementError, match="b needs"):
        read_plan(plan, manifest, [node("a"), node("b", 1000)], "f16")
    with pytest.raises(PlacementError, match="uses b, which does not answer"):
        read_plan(plan, manifest, nodes[:1], "f16")


def test_plans_that_do_not_belong_to_the_shards_are_refused(manifest: Manifest, tmp_path: Path) -> None:
    nodes = [node("a"), node("b")]
    placement = choose_placement(manifest, nodes, DEMAND)
    first, second = placement.stages
    moved = (msgspec.structs.replace(first, end_layer=10), msgspec.structs.replace(second, first_layer=10))
    for changed, sentence in (
        (msgspec.structs.replace(placement, stages=moved), "--cuts 10"),
        (msgspec.structs.replace(placement, stages=(first,)), "--stages 1"),
        (msgspec.structs.replace(placement, model_id="other"), "another model"),
    ):
        plan = tmp_path / "plan.json"
        plan.write_bytes(msgspec.json.encode(changed))
        with pytest.raises(PlacementError, match=sentence):
            read_plan(plan, manifest, nodes, "f16")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"stages": 3}'])
def test_files_that_are_no_plan_are_refused(manifest: Manifest, tmp_path: Path, content: bytes) -> None:
    plan = tmp_path / "plan.json"
    plan.write_bytes(content)
    with pytest.raises(PlacementError, match="is not a plan"):
        read_plan(plan, manifest, [node("a"), node("b")], "f16")
    with pytest.raises(PlacementError, match="cannot be read"):
        read_plan(tmp_path / "none", manifest, [node("a")], "f16")


def test_nodes_that_get_no_stage_are_left_out_with_the_reason(manifest: Manifest) -> None:
    left_out = choose_placement(manifest, [node("a"), node("b"), node("c")], DEMAND).left_out
    assert [(one.node_name, "2 stages" in one.reason) for one in left_out] == [("c", True)]
