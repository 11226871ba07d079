"""Who is placed where: the same for the same nodes, and an error that says what is missing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncstack.errors import UsageError
from syncstack.fleet.placement import NodeInfo, choose, node_info


def made(name: str, host: str, *roles: str) -> NodeInfo:
    return NodeInfo(name=name, host=host, free=frozenset(roles))


APART = [made("t", "a", "trainer", "driver"), made("e1", "b", "engine"), made("e0", "a", "engine")]


def test_apart_each_has_a_node_of_its_own() -> None:
    found = choose(APART, "disagg", 2)
    assert (found.trainer, found.engines) == ("t", ("e0", "e1"))


def test_together_they_are_on_one_machine() -> None:
    found = choose([*APART, made("t2", "b", "trainer")], "colocated", 1)
    assert (found.trainer, found.engines) == ("t", ("e0",))
    with pytest.raises(UsageError, match=r"no place for a trainer and 2 engines, colocated .*all on one machine"):
        choose(APART, "colocated", 2)


def test_one_container_may_hold_both_when_they_are_together() -> None:
    both = [made("x", "a", "trainer", "engine")]
    assert choose(both, "colocated", 1).engines == ("x",)
    with pytest.raises(UsageError, match="each of them another"):
        choose(both, "disagg", 1)


def test_a_machine_that_does_not_say_which_it_is_has_nobody_beside_it() -> None:
    with pytest.raises(UsageError):
        choose([made("t", "", "trainer"), made("e", "", "engine")], "colocated", 1)


def test_the_trainer_can_be_told_where_to_be() -> None:
    nodes = [*APART, made("a-first", "a", "trainer")]
    assert choose(nodes, "disagg", 2).trainer == "a-first"
    assert choose(nodes, "disagg", 2, "t").trainer == "t"
    with pytest.raises(UsageError):
        choose(nodes, "disagg", 2, "elsewhere")


def test_what_is_missing_is_said() -> None:
    with pytest.raises(UsageError, match=r"observed: e0: engine; e1: engine; t: taken"):
        choose([made("t", "a"), *APART[1:]], "disagg", 2)
    with pytest.raises(UsageError, match="observed: no node"):
        choose([], "disagg", 1)
    with pytest.raises(UsageError, match="two nodes have one name .*observed: e0"):
        choose([*APART, made("e0", "c", "engine")], "disagg", 1)


@given(
    st.lists(
        st.builds(
            NodeInfo,
            name=st.text("abcdef", min_size=1, max_size=2),
            host=st.sampled_from(["", "h1", "h2"]),
            free=st.frozensets(st.sampled_from(["trainer", "engine", "driver"])),
        ),
        max_size=8,
        unique_by=lambda node: node.name,
    ),
    st.sampled_from(["colocated", "disagg"]),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_what_is_chosen_fits_and_does_not_depend_on_order(
    nodes: list[NodeInfo], layout: str, engines: int, order: random.Random
) -> None:
    by_name = {node.name: node for node in nodes}
    shuffled = order.sample(nodes, len(nodes))
    try:
        found = choose(nodes, layout, engines)  # type: ignore[arg-type]
    except UsageError:
        with pytest.raises(UsageError):
            choose(shuffled, layout, engines)  # type: ignore[arg-type]
        return
    assert choose(shuffled, layout, engines) == found  # type: ignore[arg-type]
    assert len(set(found.engines)) == engines
    assert "trainer" in by_name[found.trainer].free
    assert all("engine" in by_name[name].free for name in found.engines)
    if layout == "colocated":
        assert {by_name[name].host for name in found.engines} == {by_name[found.trainer].host}
    else:
        assert found.trainer not in found.engines


def test_a_node_is_ours_by_its_labels() -> None:
    labels = {"ray.io/node-id": "1", "x/name": "e0", "x/host": "h"}
    assert node_info(labels, "x/", ["engine", "CPU", "memory"]) == made("e0", "h", "engine")
    assert node_info({"ray.io/node-id": "1"}, "x/", ["engine"]) is None
