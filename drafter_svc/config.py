"""The settings that all drafters have: flags, OUTRIDER_DRAFTER_* in the environment, or YAML.

The settings of each family are in `drafter_svc.families.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import ClassVar, Self, cast

from pydantic import Field, create_model, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from drafter_svc.families.registry import BUILT_IN, find_family
from drafter_svc.families.settings import OF_FAMILIES, RedisSettings
from outrider.process.network.addresses import check_address, is_name
from outrider.process.security.tls import TlsSettings
from outrider.process.settings.config import FileSettings, ScrapedSettings


class EraseSettings(RedisSettings, TlsSettings, FileSettings):
    """Delete the n-grams and texts of one tenant, or of the public pool, from Redis."""

    # The environment may name a drafter's configuration file. That file may have settings that
    # `erase` does not have.
    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFTER_", extra="ignore")

    tenant: str | None = None
    """Tenant whose n-grams and texts are erased, for all tokenizers.

    To erase the public pool, give is-public-pool instead.
    """


class DrafterSettings(TlsSettings, ScrapedSettings):
    """Draft for verifiers. --family NAME --help also lists the settings of the family.

    Each setting may also come from the environment (OUTRIDER_DRAFTER_FAMILY) or a YAML file
    (--config).
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFTER_")

    groups: ClassVar[Mapping[str, str]] = {
        "family": "Drafter",
        "verifier": "Verifiers",
        "id": "Drafter",
        "cores": "Cores and memory",
    }

    family: str = Field(
        description=f"How to draft: {', '.join(BUILT_IN)}, a family of an installed package, or"
        " package.module:Class."
    )

    verifier: list[str] = Field(["127.0.0.1:50051"], min_length=1)
    """host:port of the verifier, or dns:NAME:PORT for all addresses that NAME has at the time. For
    several verifiers, separate them by commas or give the setting several times; the family is
    loaded once and drafts for all of them."""

    uds: list[Path] = Field(default_factory=list)
    """Unix socket of the verifier, used instead of the address if it accepts connections. For
    several verifiers, give one socket for each, in the same order."""

    id: str = ""
    """Name of this drafter in requests, metrics and logs; by default its family, host and process
    id. With TLS, the certificate's common name and a slash are put before it."""

    cores: str | None = None
    """Cores to run on, such as 0-71 or 0,2,4-7; grace for the cores and the memory of a Grace CPU.
    Unless cores or numa-node is set, the system places the process."""

    numa_node: int | None = Field(None, ge=0)
    """NUMA node to take memory from.

    Unless cores is set, the drafter runs on the cores of this node.
    """

    threads: int | None = Field(None, ge=1)
    """Number of computing threads; unless set, one thread for each pinned core, or torch's choice
    if the process is not pinned."""

    @field_validator("verifier")
    @classmethod
    def _split_at_commas(cls, texts: list[str]) -> list[str]:
        addresses = [address.strip() for text in texts for address in text.split(",")]
        if not all(addresses):
            raise ValueError("must name host:port, with nothing empty between commas")
        if twice := {address for address in addresses if addresses.count(address) > 1}:
            raise ValueError(f"names {min(twice)} more than once")
        for address in addresses:
            check_address(address)
        return addresses

    @model_validator(mode="after")
    def _check_one_socket_each(self) -> Self:
        if self.uds and len(self.uds) != len(self.verifier):
            counts = f"not {len(self.uds)} for {len(self.verifier)}"
            needed = "must name one socket for each verifier, in the same order"
            raise ValueError(f"uds: {needed}, {counts}")
        if self.uds and any(map(is_name, self.verifier)):
            raise ValueError("uds: takes no dns:NAME:PORT, whose verifiers come and go")
        return self


class FamilyChoice(FileSettings):
    """Reads only the setting `family`, before all other settings, which depend on the family."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFTER_", extra="ignore")

    family: str = ""


@cache
def settings_schema(family: str) -> type[DrafterSettings]:
    """Return a class with the settings of one family, then the settings that all drafters have.

    Raises OutriderError(INVALID_VALUE) if the family does not exist or cannot be imported.
    """
    own = OF_FAMILIES.get(family) or find_family(family).settings
    schema = create_model("DrafterSettings", __base__=(own, DrafterSettings), __doc__=own.__doc__)
    return cast(type[DrafterSettings], schema)


def required_setting(schema: type[DrafterSettings]) -> str | None:
    """Return the first setting besides `family` that has no default; None if all have a default."""
    required = [
        name
        for name, info in schema.model_fields.items()
        if info.is_required() and name != "family"
    ]
    return next(iter(required), None)
