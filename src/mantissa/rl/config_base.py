"""What every section of the configuration is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Base of every section: frozen, and unknown keys are fatal."""

    model_config = ConfigDict(frozen=True, extra="forbid")
