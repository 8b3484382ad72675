"""A batch in the same order in every run, and a bound on dynamic sampling: a custom sampler of verl's trainer.

    trainer.v1.sampler.custom_sampler.path=pkg://mantissa.verl.replay
    trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer

verl names prompts at random and takes rows in the order in which they were finished. The rows of a step are the same in
a second run (``rollout.py``), but a sum in another order ends in other bits. Here rows are ordered by prompt, in the
order in which the data loader gave them, and by their number in the group.

verl hands a custom sampler no metric to filter groups by, so ``trainer.v1.sampler.sampler_kwargs`` holds it, with
``train_batch_size`` and ``max_generation_batches``: verl's own buffer samples for ever where no group differs.
"""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from mantissa.base.errors import MantissaError


class OrderedReplayBuffer(ReplayBuffer):
    """verl's buffer of the synchronous trainer, with the order of rows decided by what they are."""

    def __init__(self, **given: Any) -> None:
        asked = dict(given.get("sampler_kwargs") or {})
        self.most = int(asked.get("max_generation_batches") or 0) * int(asked.get("train_batch_size") or 0)
        self.dropped: dict[int, int] = {}  # groups without a difference, by step
        if "filter_groups_metric" in asked:
            given |= {
                "filter_groups_metric": str(asked["filter_groups_metric"]),
                "train_batch_size": int(asked["train_batch_size"]),
                "gen_batch_size": 1,
            }
        super().__init__(**given)

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        """As verl, until as many groups were sampled for one step as ``max_generation_batches`` has. Raises then."""
        evicted, stale, alike, metrics = super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)
        if partition_id == "val":
            return evicted, stale, alike, metrics
        dropped = self.dropped.get(global_steps, 0) + alike
        self.dropped = {global_steps: dropped}
        kept = len(self._sampleable_terminal_keys(partition_id, eviction_reasons))
        batch = self.train_batch_size
        if self.most and batch is not None and kept < batch and dropped + kept >= self.most:
            raise MantissaError(
                f"rollout.dynamic: {dropped + kept} prompts were sampled for step {global_steps}, and in {dropped} of "
                f"them all answers earned the same {self.filter_groups_metric}, so {kept} of {batch} are left to learn "
                "from: the policy always fails, or always succeeds; raise rollout.dynamic.max_generation_batches, or "
                "give it problems that it solves now and then"
            )
        return evicted, stale, alike, metrics

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: Any) -> Any:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        data = tq.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=["index", "prompts"])
        indices, prompts = list(data["index"]), data["prompts"].unbind()

        def key(row: int) -> tuple[str, list[int], int, int]:
            _, session, number = batch.keys[row].rsplit("_", 2)
            return str(indices[row]), prompts[row].tolist(), int(session), int(number)

        order = sorted(range(len(batch.keys)), key=key)
        keys, tags = ([values[row] for row in order] for values in (batch.keys, batch.tags))
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags)
