"""Mantissa inside verl: a plugin for verl 0.9, which changes no line of verl.

A verl user installs ``mantissa-rl[verl]`` and adds two overrides to a job,

    actor_rollout_ref.model.external_lib=mantissa.verl.plugin  actor_rollout_ref.actor.strategy=mantissa_fsdp2

or ``actor.strategy=mantissa rollout.name=mantissa``, whose log-probs are equal.

| module | what it gives verl |
|---|---|
| ``platform`` | the platform ``cpu`` (``VERL_PLATFORM=cpu``); verl finds it by the entry point group ``verl.plugins`` |
| ``plugin`` | what ``model.external_lib`` imports: it registers the engines |
| ``fsdp`` | ``strategy=mantissa_fsdp2``: verl's own FSDP2 engine; and, on a CPU, verl's ``fsdp2`` itself |
| ``engine`` | ``actor.strategy=mantissa``: Mantissa's own learner; with |
| | its keys and learning rates (``options``), refusals, rows (``batch``), ``checkpoint`` |
| ``rollout`` | ``rollout.name=mantissa``: the native engine as verl's server; with the server itself (``serving``), |
| | the key of each request's draws, and what travels beside the weights (``wire``); and |
| | ``rollout.checkpoint_engine.backend=mantissa_ray``: weights to standalone servers by Ray alone |
| ``gate`` | ``+trainer.gate=stop``: the doctor inside each of verl's trainers, which ``hooks`` have it find |
| ``sync`` | with it: whether each server has the learner's weights after a sync |
| ``kept`` | ``+trainer.certify=N``: the batch of a step as each side saw it, for ``mantissa certify`` |
| ``replay`` | a custom sampler for verl's trainer: rows in the same order in every run |
| ``version`` | which versions of verl this is for |

Importing this package imports neither verl nor torch.
"""
