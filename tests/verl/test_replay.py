"""The plugin's sampler inside verl's own loop: what it keeps, and that it ends where verl's would not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mantissa.base.errors import MantissaError

pytestmark = pytest.mark.verl


class Groups:
    """verl's queue without Ray: groups that were asked for are finished at the next look, and differ or not."""

    def __init__(self, differ: list[bool], most: int) -> None:
        from mantissa.verl.replay import OrderedReplayBuffer

        self.differ, self.asked, self.cleared = differ, 0, set[str]()
        self.buffer = OrderedReplayBuffer(
            trainer_mode="sync",
            trainer_config={},
            max_off_policy_threshold=8,
            max_off_policy_strategy="drop",
            sampler_kwargs={"filter_groups_metric": "acc", "train_batch_size": 4, "max_generation_batches": most},
            poll_interval=0.0,
            refill_fn=self.refill,
        )
        self.refill(4)
        self.buffer._sync_metadata_from_transfer_queue = self.look
        self.buffer._dapo_filtered_keys = self.alike
        self.buffer._clear_groups = self.clear
        self.buffer._materialize_batch = lambda partition, uids, snapshot: sorted(uids)

    def refill(self, groups: int) -> None:
        self.asked += groups

    def look(self) -> None:
        there = {str(number) for number in range(self.asked)} - self.cleared
        self.buffer.finished_keys["train"] = there
        self.buffer.partitions["train"] = {f"{uid}_0_0": {} for uid in there}

    def alike(self, partition: str) -> tuple[set[str], Counter[float]]:
        found = {uid for uid in self.buffer.finished_keys[partition] if not self.differ[int(uid) % len(self.differ)]}
        return found, Counter({0.0: len(found)})

    def clear(self, partition: str, uids: set[str]) -> None:
        self.cleared |= uids
        self.buffer.finished_keys[partition] -= uids

    def sample(self) -> Any:
        return self.buffer.sample(1, "train", 4)[0]


def test_groups_without_a_difference_are_sampled_again_until_the_batch_is_full() -> None:
    groups = Groups([True, False], most=10)
    assert groups.sample() == ["0", "2", "4", "6"]


@pytest.mark.parametrize("most", [1, 3])
def test_a_policy_that_never_succeeds_is_told_of_after_so_many_batches(most: int) -> None:
    groups = Groups([False], most)
    with pytest.raises(MantissaError, match="the policy always fails, or always succeeds") as told:
        groups.sample()
    assert 4 * most <= groups.asked <= 4 * most + 4
    assert "so 0 of 4 are left to learn from" in str(told.value)


def test_without_its_keys_it_filters_nothing() -> None:
    from mantissa.verl.replay import OrderedReplayBuffer

    plain = OrderedReplayBuffer(
        trainer_mode="sync", trainer_config={}, max_off_policy_threshold=8, max_off_policy_strategy="drop",
        sampler_kwargs={}, refill_fn=print,
    )  # fmt: skip
    assert (plain.filter_groups_metric, plain.most) == (None, 0)
