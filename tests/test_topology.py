"""Partitions of ranks into compute groups: complete, balanced, and clear about what is wrong."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import DecoupledDiLoCo, SoftSync
from lightning_omni.topology import Topology, check_groups

varied = settings(deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

sizes = st.integers(1, 64).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@varied
@given(sizes)
def test_even_groups_differ_in_size_by_at_most_one(size: tuple[int, int]) -> None:
    world_size, groups = size
    lengths = [len(members) for members in Topology.even(world_size, groups).groups]
    assert len(lengths) == groups
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@varied
@given(sizes)
def test_every_rank_is_in_exactly_one_group(size: tuple[int, int]) -> None:
    topology = Topology.even(*size)
    assert topology.ranks == tuple(range(size[0]))
    for rank in topology.ranks:
        assert [group for group, members in enumerate(topology.groups) if rank in members] == [topology.group_of(rank)]


@varied
@given(st.sets(st.integers(0, 1000), min_size=1, max_size=40), st.data())
def test_any_set_of_ranks_can_be_split(ranks: set[int], data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, len(ranks)))
    topology = Topology.of(ranks, groups)
    assert topology.ranks == tuple(sorted(ranks))
    assert [rank for members in topology.groups for rank in members] == sorted(ranks), "groups are contiguous"


@varied
@given(sizes)
def test_the_leader_is_the_first_rank_of_its_group(size: tuple[int, int]) -> None:
    topology = Topology.even(*size)
    for group in topology.alive:
        assert topology.leader(group) == min(topology.members(group))


@varied
@given(sizes, st.data())
def test_an_evicted_group_keeps_the_numbers_of_the_others(size: tuple[int, int], data: st.DataObject) -> None:
    topology = Topology.even(size[0] + 1, size[1] + 1)
    dead = data.draw(st.sampled_from(topology.alive))
    rest = topology.without(dead)
    assert rest.members(dead) == ()
    assert rest.alive == tuple(group for group in topology.alive if group != dead)
    for rank in rest.ranks:
        assert rest.group_of(rank) == topology.group_of(rank)
        assert rest.leader(rest.group_of(rank)) == topology.leader(topology.group_of(rank))
    for rank in topology.members(dead):
        with pytest.raises(KeyError, match=f"rank {rank} is in no group"):
            rest.group_of(rank)


def test_the_last_group_cannot_be_evicted() -> None:
    with pytest.raises(ConfigurationError, match="at least one rank"):
        Topology.even(3, 1).without(0)


@varied
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any))
def test_by_node_puts_the_ranks_of_a_node_together(ranks_per_node: list[int]) -> None:
    topology = Topology.by_node(ranks_per_node)
    assert [len(members) for members in topology.groups] == [size for size in ranks_per_node if size]
    assert [rank for members in topology.groups for rank in members] == list(range(sum(ranks_per_node)))


speeds = st.dictionaries(st.integers(0, 100), st.floats(1e-3, 1e6), min_size=1, max_size=40)


@varied
@given(speeds, st.data())
def test_by_speed_puts_like_with_like(speeds: dict[int, float], data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, len(speeds)))
    topology = Topology.by_speed(speeds, groups)
    assert topology.ranks == tuple(sorted(speeds))
    lengths = [len(members) for members in topology.groups]
    assert max(lengths) - min(lengths) <= 1
    assert all(list(members) == sorted(members) for members in topology.groups)
    for faster, slower in pairwise(topology.groups):
        assert min(speeds[rank] for rank in faster) >= max(speeds[rank] for rank in slower)


@varied
@given(sizes)
def test_equal_speeds_are_grouped_in_the_order_of_ranks(size: tuple[int, int]) -> None:
    assert Topology.by_speed([3.0] * size[0], size[1]) == Topology.even(*size)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rank_without_a_speed_is_named(speed: float) -> None:
    with pytest.raises(ConfigurationError, match="that of rank 1 is"):
        Topology.by_speed([1.0, speed], 1)


def test_one_group_is_synchronous_also_when_the_others_were_evicted() -> None:
    assert Topology.even(4, 1).is_synchronous
    assert not Topology.even(4, 2).is_synchronous
    assert Topology.even(4, 2).without(0).is_synchronous


def test_a_rank_in_two_groups_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="exactly one group"):
        Topology(((0, 1), (1, 2)))


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_neighbours_stay_together_and_groups_differ_by_no_more_than_them(
    pieces: int, together: int, data: st.DataObject
) -> None:
    groups = data.draw(st.integers(1, pieces))
    speeds = data.draw(st.lists(st.floats(0.1, 10), min_size=pieces * together, max_size=pieces * together))
    for topology in (Topology.even(pieces * together, groups, together), Topology.by_speed(speeds, groups, together)):
        sizes = [len(members) for members in topology.groups]
        assert max(sizes) - min(sizes) in (0, together)
        for members in topology.groups:
            assert members == tuple(sorted(members))
            starts = members[::together]
            assert all(start % together == 0 for start in starts)
            assert members == tuple(start + place for start in starts for place in range(together))


@pytest.mark.parametrize(
    ("ranks", "groups", "says"),
    [
        (5, 1, "5 ranks, of which 2 hold a model together: pass FSDP\\(shards="),
        (4, 3, "groups=3, but 2 ranks hold a model"),
    ],
)
def test_ranks_that_cannot_stay_together_are_refused(ranks: int, groups: int, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Topology.even(ranks, groups, together=2)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (0, "groups=0: at least one"),
        (-2, "groups=-2"),
        (5, "groups=5, but there are only 4 ranks"),
        (True, "groups=True"),
    ],
)
def test_an_impossible_number_of_groups_is_named(groups: int, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check_groups(groups, 4)
    with pytest.raises(ConfigurationError, match="groups="):
        Topology.even(4, groups)


def test_messages_speak_of_one_rank_and_one_group_in_the_singular() -> None:
    with pytest.raises(ConfigurationError, match=r"there is only 1 rank, .*; pass groups=1 or more devices"):
        check_groups(2, 1)
    with pytest.raises(ConfigurationError, match=r"there is only 1 group: .*; pass n=1 or more groups"):
        SoftSync(n=2).check(1)
    with pytest.raises(ConfigurationError, match=r"there is only 1 group; pass 1, or None"):
        DecoupledDiLoCo(quorum=2).check(1)


@pytest.mark.parametrize("groups", [2.0, "2", None])
def test_groups_of_another_type_are_refused(groups: object) -> None:
    with pytest.raises(ConfigurationError, match="pass a whole number"):
        check_groups(groups, 4)  # type: ignore[arg-type]


def test_topologies_are_equal_by_value_and_hashable() -> None:
    assert Topology.even(5, 2) == Topology(((0, 1, 2), (3, 4)))
    assert len({Topology.even(5, 2), Topology.by_node([3, 2])}) == 1
