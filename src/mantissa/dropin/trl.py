"""Log-probs of both sides out of TRL's GRPO trainer, for ``mantissa doctor``: TRL's own logs hold none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.doctor.record import write_batch


def record_logps(trainer: Any, folder: Path | str) -> None:
    """Have ``trainer`` (trl.GRPOTrainer) write every batch that it scores into ``folder``, in the plain schema.

    Call it before ``trainer.train()``; then ``mantissa doctor FOLDER``. The sampler's log-probs are those that vLLM
    (or a ``rollout_func``) delivered, the learner's those of the model before its update. Training is not changed.

    Raises ``MantissaError`` at the first batch where nothing delivers the sampler's log-probs.
    """
    original, folder, batches = trainer._generate_and_score_completions, Path(folder), [0]

    def recorded(inputs: Any) -> Any:
        output = original(inputs)
        sampled = output.get("sampling_per_token_logps")
        if sampled is None:
            raise MantissaError(
                "record_logps: this trainer's sampler delivers no log-probs; expected use_vllm=True, or a rollout_func "
                "that returns logprobs (transformers' generate samples and scores with one model: there is no gap)"
            )
        learner = output.get("old_per_token_logps")
        if learner is None:
            learner = _scored(trainer, output)
        args = trainer.args
        settings = {"framework": "trl", "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k or 0}
        prompts = [
            row[real.bool()].tolist() for row, real in zip(output["prompt_ids"], output["prompt_mask"], strict=True)
        ]
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        batches[0] += 1
        name = f"step-{trainer.state.global_step}-{batches[0]}-rank-{trainer.accelerator.process_index}.jsonl"
        write_batch(folder / name, prompts, output["completion_ids"], mask, sampled, learner, settings)
        return output

    trainer._generate_and_score_completions = recorded


def _scored(trainer: Any, output: Any) -> Any:
    """The learner's log-probs where this batch's training would take them from its own forward."""
    import torch

    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    with torch.no_grad():
        size = trainer.args.per_device_train_batch_size
        return trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, output["completion_ids"].size(1), batch_size=size
        )[0]
