"""A batch in the same order in every run: ``trainer.v1.sampler.custom_sampler`` of verl's trainer.

    trainer.v1.sampler.custom_sampler.path=pkg://mantissa.verl.replay
    trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer

verl names prompts at random and takes rows in the order in which they were finished. The rows of a step are the same in
a second run (``agents.py``), but a sum in another order ends in other bits. Here rows are ordered by prompt, in the
order in which the data loader gave them, and by their number in the group.
"""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class OrderedReplayBuffer(ReplayBuffer):
    """verl's buffer of the synchronous trainer, with the order of rows decided by what they are."""

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
