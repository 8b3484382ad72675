"""Policy losses, a file each: what is minimised so that tokens with a positive advantage become more probable."""

from typing import Annotated, get_args

from pydantic import Field

from mantissa.algorithms.losses.base import Loss, OfTeacher, PPOClipConfig, Selecting
from mantissa.algorithms.losses.clipped import CISPOConfig, DAPOConfig, DPPOConfig, GMPOConfig, GSPOConfig, SAPOConfig
from mantissa.algorithms.losses.covariance import ClipCovConfig, KLCovConfig
from mantissa.algorithms.losses.custom import CustomLossConfig
from mantissa.algorithms.losses.flowrl import FlowRLConfig, PartitionSettings
from mantissa.algorithms.losses.reinforce import ReinforceConfig
from mantissa.algorithms.losses.reverse_kl import ReverseKLConfig, reverse_kl

# The registry. A new loss is a file here, its class in this line, and an oracle in tests/algorithms.
LossConfig = Annotated[
    ReinforceConfig | PPOClipConfig | DAPOConfig | GSPOConfig | GMPOConfig | SAPOConfig | DPPOConfig | CISPOConfig
    | ClipCovConfig | KLCovConfig | FlowRLConfig | ReverseKLConfig | CustomLossConfig,
    Field(discriminator="kind"),
]  # fmt: skip
LOSSES: dict[str, type[Loss]] = {each.model_fields["kind"].default: each for each in get_args(get_args(LossConfig)[0])}

__all__ = [
    "LOSSES", "CISPOConfig", "ClipCovConfig", "CustomLossConfig", "DAPOConfig", "DPPOConfig", "FlowRLConfig",
    "GMPOConfig", "GSPOConfig", "KLCovConfig", "Loss", "LossConfig", "OfTeacher", "PPOClipConfig",
    "PartitionSettings", "ReinforceConfig", "ReverseKLConfig", "SAPOConfig", "Selecting", "reverse_kl",
]  # fmt: skip
