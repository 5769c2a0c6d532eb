"""A drafter's settings: flags, OUTRIDER_DRAFTER_* in the environment, or YAML. Those of each family are with the family."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, Self, cast

from pydantic import Field, create_model, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from drafter_svc.families.base import FamilySettings
from drafter_svc.families.registry import find_family
from outrider.process.config import ScrapedSettings, Settings


class RedisSettings(FamilySettings):
    """Where the n-grams that replicas share are, and under which keys."""

    redis: str | None = None
    """URL of a Redis that holds n-grams for all replicas; without it pools are in memory. One server:
    redis://user@host:6379/0. Sentinel: redis+sentinel://user@host:26379,host:26379/service. Cluster:
    redis+cluster://user@host:6379,host:6379. With TLS: rediss, rediss+sentinel, rediss+cluster. After a ? may stand
    sentinel_auth=true (the Sentinels ask for the same user and password), and with TLS ssl_certfile=PATH, ssl_keyfile=PATH,
    ssl_check_hostname=false."""

    redis_password_file: Path | None = None
    """File with the password of the URL's user, read again for each connection."""

    redis_ca_file: Path | None = None
    """PEM file with the authorities that may have signed the servers' certificates; the system's unless set."""

    pool_secret_file: Path | None = None
    """File with the secret that keys in Redis are made with, at least 16 bytes, the same for all replicas; redis needs it."""

    is_public_pool: bool = False
    """Share one pool among all requests, tenants included."""


class EraseSettings(RedisSettings, Settings):
    """What `python -m drafter_svc erase` takes."""

    # A drafter's file may be named in the environment, and has more.
    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFTER_", extra="ignore")

    tenant: str | None = None
    """Whose n-grams are erased, of all namespaces and tokenizers; with is-public-pool instead, those of the public pool."""


class DrafterSettings(ScrapedSettings):
    """What `python -m drafter_svc` takes, whatever the family. Name one to see its own settings: --family NAME --help."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFTER_")

    family: str
    """How to draft: ngram, suffix, model, what installed packages add, or package.module:Class."""

    verifier: list[str] = Field(["127.0.0.1:50051"], min_length=1)
    """host:port of the verifier, or of several, with commas between them or one by one: what drafts is loaded once and drafts for
    all of them."""

    uds: list[Path] = Field(default_factory=list)
    """The verifier's Unix socket, used instead when it exists on this host; for several verifiers one each, in the same order."""

    id: str = ""
    """Name among the verifier's drafters; family, host and process id unless set."""

    listen: str = "127.0.0.1:0"
    """host:port of the health service; port 0 takes any."""

    placement: Literal["local", "cpu", "grace"] = "local"
    """local leaves the process to the system; cpu pins it as told below; grace finds the Grace CPU's cores and memory itself."""

    cores: str | None = None
    """Cores to run on, such as 0-71 or 0,2,4-7."""

    numa_node: int | None = Field(None, ge=0)
    """NUMA node to take memory from."""

    threads: int | None = Field(None, ge=1)
    """Threads that compute; unset takes one for each pinned core, or leaves it to torch."""

    @field_validator("verifier")
    @classmethod
    def _one_by_one(cls, texts: list[str]) -> list[str]:
        addresses = [address.strip() for text in texts for address in text.split(",")]
        if not all(addresses):
            raise ValueError("must name host:port, and nothing empty between commas")
        if twice := {address for address in addresses if addresses.count(address) > 1}:
            raise ValueError(f"names {min(twice)} more than once")
        return addresses

    @model_validator(mode="after")
    def _socket_for_each(self) -> Self:
        if self.uds and len(self.uds) != len(self.verifier):
            counts = f"not {len(self.uds)} for {len(self.verifier)}"
            raise ValueError(
                f"uds: must name one socket for each verifier, in the same order, {counts}"
            )
        return self


class FamilyChoice(Settings):
    """The family alone, of all that flags, environment and file say."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFTER_", extra="ignore")

    family: str = ""


@cache
def settings_schema(family: str) -> type[DrafterSettings]:
    """What a drafter of a family takes: the family's settings and those of every drafter.

    Raises OutriderError(INVALID_VALUE) for a family that cannot be had.
    """
    chosen = find_family(family)
    schema = create_model(
        "DrafterSettings",
        __base__=(chosen.settings, DrafterSettings),
        __doc__=chosen.settings.__doc__,
    )
    return cast(type[DrafterSettings], schema)


def required_setting(schema: type[DrafterSettings]) -> str | None:
    """The one setting that must be given besides the family, if there is one."""
    required = [
        name
        for name, info in schema.model_fields.items()
        if info.is_required() and name != "family"
    ]
    return required[0] if required else None
