"""What ``actor_rollout_ref.model.external_lib=mantissa.verl.plugin`` imports in each process that reads the model's
configuration: it registers what a job names. An error here ends the job and is seen, as one in an entry point is not.

Engines are for the processes of verl's worker groups, which have a rank, and take seconds to import: the others, which
sample and grade, go without.
"""

from __future__ import annotations

import os

from mantissa.verl.version import check_version

check_version()

from mantissa.verl import rollout  # noqa: E402 - what is wrong with verl is said first

rollout.register()

if "RANK" in os.environ:
    from mantissa.verl import engine as engine
    from mantissa.verl import fsdp as fsdp
else:
    from mantissa.verl import agents

    agents.register()
