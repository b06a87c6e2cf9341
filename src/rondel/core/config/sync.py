"""[sync]: how new weights reach the engines."""

from __future__ import annotations

from pydantic import Field, field_validator

from rondel.core.config.section import ConfigSection
from rondel.core.registry import suggest_name

TRANSPORTS = ("auto", "tensor", "ipc", "tcp", "disk", "distributed", "delta")


class SyncConfig(ConfigSection):
    kind: str = Field(
        "auto",
        description="how weights reach the engines: auto, tensor, ipc, tcp, disk, distributed, delta, or a transport of "
        'yours as "module:name"; "auto" is tensor in one process, where nothing is copied; between processes the '
        "fastest by measurement, and another one after a fault; see docs/sync.md",
    )
    probe: bool = Field(True, description="score a fixed prompt on both sides after every update")

    @field_validator("kind")
    @classmethod
    def _require_known_kind(cls, given: str) -> str:
        if given not in TRANSPORTS and ":" not in given:
            raise ValueError(
                f"'{given}' is no transport.{suggest_name(given, list(TRANSPORTS))} Known: {', '.join(TRANSPORTS)}; or "
                f"your own as 'module:name'"
            )
        return given
