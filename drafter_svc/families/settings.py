"""The settings of the families. This module imports no family, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from outrider.process.security.tls import TlsSettings
from outrider.process.settings.config import Device, Dtype, Weights
from outrider.protocol.limits import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from outrider.process.redis.server import RedisServer

INT8: Mapping[Weights, bool | None] = {"auto": None, "int8": True, "dtype": False}
"""Whether weights are in int8, by the setting `weights`; None means int8 where it is faster."""


class FamilySettings(BaseModel):
    """Base of a family's own settings.

    A family's settings become flags, environment variables and YAML keys of a drafter that runs
    this family. The docstring below each setting is its help text.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    reads_states: ClassVar[bool] = False
    """True if the family reads the target's hidden states, and so belongs beside the target."""


class RedisSettings(FamilySettings):
    """Which Redis holds what replicas share, and how its keys are made."""

    groups: ClassVar[Mapping[str, str]] = {"redis": "What replicas share"}

    redis: str | None = None
    """URL of a Redis that holds n-grams or texts for all replicas, such as
    redis://user@host:6379/0; without it pools are in memory. With TLS it begins with rediss, and
    takes options after a ?: ssl_ca_certs=PATH, ssl_certfile=PATH, ssl_keyfile=PATH,
    ssl_check_hostname=false. With TLS, the drafter shows the certificate of tls-cert and trusts the
    authorities of tls-ca, unless the URL names other files."""

    redis_cluster: bool = False
    """Whether the Redis is a cluster. Then the setting redis takes the URLs of several nodes, with
    commas between them. These nodes are asked for the slots."""

    redis_password_file: Path | None = None
    """File with the password of the URL's user; it is read again for each connection."""

    pool_secret_file: Path | None = None
    """File with the secret from which keys in Redis are made: at least 16 bytes, the same for all
    replicas. It must be given with redis."""

    is_public_pool: bool = False
    """Share one pool among all requests of all tenants."""

    def redis_server(self) -> RedisServer | None:
        """Return the Redis to use; None without one.

        Raises OutriderError(INVALID_VALUE) that names the setting at fault.
        """
        if self.redis is None:
            return None
        # This import is not at the top, so that `--help` answers at once.
        from outrider.process.redis.server import RedisServer

        # A process's schema adds the files of TLS to these settings.
        tls = self.tls if isinstance(self, TlsSettings) else None
        return RedisServer.parse(
            self.redis, self.redis_password_file, tls, is_cluster=self.redis_cluster
        )


class PoolSettings(RedisSettings):
    """Settings of the families whose replicas share a pool in Redis."""

    pool_ttl_seconds: int = Field(86_400, ge=1)
    """Age in seconds at which Redis drops an n-gram or a text that was not written again."""


class NgramSettings(PoolSettings):
    """Settings of the family ngram."""

    max_draft_len: int = Field(8, ge=1, le=MAX_DRAFT_TOKENS)
    """The most tokens proposed at once. More tokens help with texts that repeat long parts."""

    max_matching_ngram_size: int = Field(3, ge=1, le=16)
    """Tokens of the longest suffix that is looked up. Longer suffixes guess more surely, and make
    pools larger."""

    pool_entries: int = Field(1_000_000, ge=1)
    """The most n-grams of a pool; in Redis, of each tenant. The least recently used are dropped
    first, in Redis the oldest."""


class SuffixSettings(PoolSettings):
    """Settings of the family suffix."""

    max_cached_requests: int = Field(1000, ge=1, le=100_000)
    """Texts that are kept for each tenant, in memory and in Redis; the oldest are dropped first."""


class GrammarSettings(FamilySettings):
    """Settings of the family grammar."""

    target: str = ""
    """Directory or hub id of the target; the drafter reads its tokenizer. It must be given."""


class ModelSettings(FamilySettings):
    """Settings of the family model."""

    model: str = Field(min_length=1)
    """Directory, GGUF file or hub id of the draft model."""

    dtype: Dtype = "auto"
    """Type of the weights and of the computation; auto takes the checkpoint's."""

    weights: Weights = "auto"
    """How the weights of linear layers are kept. int8, on a CPU only, takes half the memory of
    bfloat16, and computes in bfloat16; dtype keeps them in the type of the computation. auto is
    int8 for bfloat16 models on processors where that is faster: those with AVX512-BF16 and without
    AMX."""

    device: Device = "auto"
    """auto (CUDA when there is any), cpu, cuda or cuda:N."""

    page_count: int | None = Field(None, ge=1)
    """Pages of the KV cache, by default a part of the free memory. Set it where the drafter has too
    few pages for its sequences, or takes memory that other processes need."""

    gpu_memory_share: float = Field(0.1, gt=0, le=1)
    """Share of a GPU's memory that this process takes at most: for the weights, the KV cache and
    the largest forward. Unused with `page_count`."""

    target: str = ""
    """Directory or hub id of the target, if its tokenizer is not the draft model's. The drafter
    reads the target's tokenizer and configuration."""

    trust_remote_code: bool = False
    """Run the checkpoint's own code, for architectures that transformers lacks. That code may do
    all that this process may do."""


class HeadSettings(FamilySettings):
    """Settings of the family head."""

    reads_states: ClassVar[bool] = True

    head: str = Field(min_length=1)
    """Directory of the head: an EAGLE-3, P-EAGLE, EAGLE, DFlash, DSpark, MTP, Medusa or ReDrafter
    checkpoint with safetensors."""

    target: str = Field(min_length=1)
    """Directory or hub id of the target. The drafter reads its configuration and tokenizer, and the
    embeddings and lm_head that the head shares with it."""

    head_states: list[int] = Field(default=[])
    """The target's hidden states that the head reads, if its file is wrong about them: k for the
    input of layer k, from 0 on, and the number of layers for the last layer's output."""

    head_reading: int | None = Field(None, ge=1)
    """Which meaning of the head's file to use, if the file can mean several things: a number of the
    list that `outrider check-head` prints."""

    dtype: Dtype = "auto"
    """Type of the computation; auto is bfloat16, and float32 on a CPU without kernels for it."""

    weights: Weights = "auto"
    """How the weights of linear layers are kept, except the projection's. int8, on a CPU only,
    takes half the memory of bfloat16, and computes in bfloat16; dtype keeps them in the type of the
    computation. auto is int8 for bfloat16 on processors where it is int8 for a draft model too."""

    device: Device = "auto"
    """auto (CUDA when there is any), cpu, cuda or cuda:N."""

    trust_remote_code: bool = False
    """Run the code of the target's configuration, for architectures that transformers lacks. That
    code may do all that this process may do."""

    page_count: int | None = Field(None, ge=1)
    """Pages of 16 tokens of the head's KV cache, by default for 64 full contexts in at most 1 GiB.
    Set it where the drafter has too few pages for its sequences, or takes memory that other
    processes need."""


OF_FAMILIES: Mapping[str, type[FamilySettings]] = {
    "ngram": NgramSettings,
    "suffix": SuffixSettings,
    "grammar": GrammarSettings,
    "model": ModelSettings,
    "head": HeadSettings,
}
"""The settings of Outrider's own families, keyed by name. `--help` reads them without torch."""
