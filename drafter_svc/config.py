"""A drafter's settings: flags, OUTRIDER_DRAFTER_* in the environment, or YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from outrider.config import Device, Dtype, ScrapedSettings, Settings
from outrider.messages import MAX_DEPTH


class RedisSettings(Settings):
    """Where the n-grams that replicas share are, and under which keys."""

    redis: str | None = None
    """Family ngram: URL of a Redis that holds n-grams for all replicas; without it pools are in memory. One server:
    redis://user@host:6379/0. Sentinel: redis+sentinel://user@host:26379,host:26379/service. Cluster:
    redis+cluster://user@host:6379,host:6379. With TLS: rediss, rediss+sentinel, rediss+cluster. After a ? may stand
    sentinel_auth=true (the Sentinels ask for the same user and password), and with TLS ssl_certfile=PATH, ssl_keyfile=PATH,
    ssl_check_hostname=false."""

    redis_password_file: Path | None = None
    """Family ngram: file with the password of the URL's user, read again for each connection."""

    redis_ca_file: Path | None = None
    """Family ngram: PEM file with the authorities that may have signed the servers' certificates; the system's unless set."""

    pool_secret_file: Path | None = None
    """Family ngram: file with the secret that keys in Redis are made with, at least 16 bytes, the same for all replicas; redis
    needs it."""

    is_public_pool: bool = False
    """Families ngram and suffix: share one pool among all requests, tenants included."""


class EraseSettings(RedisSettings):
    """What `python -m drafter_svc erase` takes."""

    # A drafter's file may be named in the environment, and has more.
    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFTER_", extra="ignore")

    tenant: str | None = None
    """Whose n-grams are erased, of all namespaces and tokenizers; with is-public-pool instead, those of the public pool."""


class DrafterSettings(RedisSettings, ScrapedSettings):
    """What `python -m drafter_svc` takes."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFTER_")

    verifier: str = "127.0.0.1:50051"
    """host:port of the verifier."""

    uds: Path | None = None
    """The verifier's Unix socket, used instead when it exists on this host."""

    family: Literal["ngram", "suffix", "model"]
    """How to draft."""

    id: str = ""
    """Name among the verifier's drafters; family, host and process id unless set."""

    listen: str = "127.0.0.1:0"
    """host:port of the health service; port 0 takes any."""

    model: str = ""
    """Family model: directory or hub id of the draft model."""

    dtype: Dtype = "auto"
    """Family model: type of the weights; auto is the checkpoint's."""

    device: Device = "auto"
    """Family model: auto (CUDA when there is any), cpu, cuda or cuda:N."""

    page_count: int | None = Field(None, ge=1)
    """Family model: pages of the KV cache; unset sizes it by the memory there is."""

    max_batch_tokens: int = Field(512, ge=1)
    """Family model: tokens in one forward."""

    mask_drafts: bool = True
    """Family model: keep drafts within the request's grammar, so that none is wasted on what is forbidden."""

    max_entries: int = Field(32, ge=1, le=256)
    """Family model: tokens of a sampled guess's distribution that are kept and sent."""

    branches: int = Field(4, ge=0, le=64)
    """Family model: outcomes of a verification that are prepared for while it runs, where the verifier lets drafters run ahead."""

    trust_remote_code: bool = False
    """Family model: run model code that comes with the checkpoint."""

    placement: Literal["local", "cpu", "grace"] = "local"
    """local leaves the process to the system; cpu pins it as told below; grace finds the Grace CPU's cores and memory itself."""

    cores: str | None = None
    """Cores to run on, such as 0-71 or 0,2,4-7."""

    numa_node: int | None = Field(None, ge=0)
    """NUMA node to take memory from."""

    threads: int | None = Field(None, ge=1)
    """Threads that compute; unset takes one for each pinned core, or leaves it to torch."""

    max_draft_len: int = Field(8, ge=1, le=MAX_DEPTH)
    """Family ngram: longest run proposed at once."""

    max_matching_ngram_size: int = Field(3, ge=1, le=16)
    """Family ngram: longest suffix looked up."""

    is_keep_all: bool = True
    """Family ngram: keep every continuation of an n-gram, not one."""

    is_use_oldest: bool = False
    """Family ngram: propose the oldest continuation kept, not the newest."""

    pool_entries: int = Field(1_000_000, ge=1)
    """Family ngram: n-grams a pool holds at most, in Redis each tenant's; the least recently used go first, in Redis the oldest."""

    max_tree_depth: int = Field(64, ge=2, le=128)
    """Family suffix: longest suffix matched, and longest run proposed."""

    max_cached_requests: int = Field(1000, ge=1)
    """Family suffix: texts of a tenant that are remembered; the oldest go first."""

    max_spec_factor: float = Field(1.0, gt=0)
    """Family suffix: longest run, in lengths of the suffix that was matched."""

    min_token_probability: float = Field(0.1, ge=0, le=1)
    """Family suffix: a run ends where the product of its tokens' frequencies falls below this."""

    namespace: str = Field("default", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Family ngram: pools of different namespaces in one Redis are apart; letters, digits, _, . and -."""

    pool_ttl_seconds: int = Field(86_400, ge=1)
    """Family ngram: age at which an unused n-gram leaves Redis."""


def settings_of(family: str) -> list[str]:
    """The settings that have a meaning for a family. A description that begins with families is of a setting of theirs alone."""
    names = []
    for name, info in DrafterSettings.model_fields.items():
        families, colon, _ = (info.description or "").partition(": ")
        if not (colon and families.startswith("Famil")) or family in families.split():
            names.append(name)
    return sorted(names)
