"""What ``actor_rollout_ref.model.external_lib=mantissa.verl.plugin`` imports in each process that reads the model's
configuration: it registers what a job names. An error here ends the job and is seen, as one in an entry point is not.
"""

from __future__ import annotations

from mantissa.verl.version import check_version, plugin_points

check_version()

with plugin_points():  # what is wrong with verl is said first
    from mantissa.verl import engine as engine
    from mantissa.verl import fsdp as fsdp
    from mantissa.verl import hooks, rollout

    hooks.register()
    rollout.register()
