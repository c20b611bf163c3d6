"""What the operator of a server may set, by environment variables that begin with COG_RWKV_."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from model.errors import RwkvError

PREFIX = "COG_RWKV_"
EMBEDDED_WEIGHTS = Path(__file__).resolve().parent.parent / "weights"


class SettingsError(RwkvError, ValueError):
    """A setting that cannot be used; the message names the environment variable."""

    code = "E130"


class Settings(BaseSettings):
    """One object, read once at setup. The field ``max_batch`` is the variable COG_RWKV_MAX_BATCH, and so on."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="ignore")

    weights: str = Field(
        default=str(EMBEDDED_WEIGHTS), min_length=1, description="Checkpoint: a file, a directory or a URL."
    )
    cache: Path | None = Field(default=None, description="Folder for downloaded checkpoints.")
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N.")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto", description="Dtype of the matrices."
    )
    state_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32", description="Dtype of the recurrent states; 16 bits lose precision over long texts."
    )
    host_embedding: bool = Field(
        default=False, description="Whether the embedding stays in pinned host memory and a GPU reads its rows there."
    )
    kernels: Literal["plain", "tuned"] = Field(
        default="tuned",
        description="On a GPU, tuned: whole steps in one call, by CUDA graphs; plain: operator by operator.",
    )
    max_batch: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Most rows of the state pool: sequences that run at once; by default 512 on CUDA, 64 on the CPU.",
    )
    max_queue: int = Field(default=512, ge=0, le=1000000, description="Most requests that wait for a row.")
    memory_reserve: int | None = Field(
        default=None,
        ge=0,
        description="MiB kept free of states, for the steps; by default 2048 on CUDA, 256 on the CPU.",
    )
    prefix_cache: int | None = Field(
        default=None,
        ge=0,
        description="MiB for states of prompts that have been read; 0 turns that off; by default from free memory.",
    )
    prefix_cache_host: int = Field(
        default=0, ge=0, description="MiB of pinned host memory for those that find no room there, beside a GPU."
    )
    prefill_chunk: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Tokens of a prompt read in one step; by default 512 on CUDA, 64 on the CPU.",
    )
    start_token: bool = Field(default=True, description="Whether a new context starts with id 0.")
    text_interval: float = Field(
        default=0.02, ge=0.0, le=1.0, description="Seconds between the pieces of a streamed reply."
    )
    log_interval: float = Field(
        default=60.0, ge=0.0, le=86400.0, description="Seconds between lines with the counters in the log; 0: no lines."
    )
    log_text: bool = Field(default=False, description="Whether the log shows prompts and replies.")

    session_database: Path | None = Field(default=None, description="SQLite file that keeps sessions over restarts.")
    session_durable: bool = Field(default=False, description="Whether a turn ends only once its state is on disk.")
    session_device: int | None = Field(default=None, ge=0, description="MiB of a GPU's memory for states of sessions.")
    session_host: int | None = Field(default=None, ge=0, description="MiB of host memory for states of sessions.")
    session_disk: int = Field(default=65536, ge=0, description="MiB of states in the database.")
    session_limit: int = Field(default=10000, ge=1, description="Most sessions; the longest unused are deleted.")
    session_ttl: float = Field(
        default=604800.0, gt=0, allow_inf_nan=False, description="Seconds without use after which one is deleted."
    )
    session_wait: float = Field(default=10.0, ge=0, le=3600, description="Seconds to wait for a session in use.")

    @classmethod
    def read(cls, weights: str | None = None) -> "Settings":
        """The settings of this process; ``weights`` (not empty) goes before COG_RWKV_WEIGHTS.

        Raises SettingsError, with one clause for each variable that cannot be used.
        """
        overrides: dict[str, Any] = {"weights": str(weights)} if weights else {}
        try:
            return cls(**overrides)
        except ValidationError as error:
            raise SettingsError("; ".join(_line(detail) for detail in error.errors())) from None

    def chunk(self, device_type: str) -> int:
        """Tokens of a prompt read in one step on a device of this type ("cpu", "cuda")."""
        return self.prefill_chunk or (512 if device_type == "cuda" else 64)

    def grid(self, device_type: str) -> int:
        """Tokens by which prompts are cut beside running replies. On the CPU a cut never shows in a number."""
        return 16 if device_type == "cuda" else 1

    def rows(self, device_type: str) -> int:
        """Sequences that run at once, where the memory allows."""
        return self.max_batch or (512 if device_type == "cuda" else 64)

    def reserve(self, device_type: str) -> int:
        """Bytes that no state is to take."""
        default = 2048 if device_type == "cuda" else 256
        return (default if self.memory_reserve is None else self.memory_reserve) * 2**20


def _line(detail: ErrorDetails) -> str:
    name, message = str(detail["loc"][0]), detail["msg"]
    if detail["type"] == "string_pattern_mismatch":  # pydantic would show the pattern
        message = f"must be {str(Settings.model_fields[name].description).rstrip('.')}"
    return f"{PREFIX}{name.upper()}: {message}, got {detail['input']!r}"
