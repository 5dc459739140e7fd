"""Parts of the server's settings: what a request may ask for, and who may call."""

from __future__ import annotations

from typing import Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator


class Section(BaseModel):
    """Base of every section of the settings: fixed, and no key that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: object, info: ValidationInfo) -> object:
        # Pydantic takes true for 1: `threads: yes` would be one thread.
        wanted = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and bool not in (wanted, *get_args(wanted)):
            raise ValueError(f"{str(value).lower()} is neither a number nor a text; YAML reads yes, no, on, off so")
        return value


TEXT_REQUEST_BYTES = 16 * 2**20
"""A million ids and every stop string that there may be take less."""


class RequestLimits(Section):
    """What one request, or one client, may ask for."""

    max_request_bytes: int | None = Field(
        None,
        ge=4096,
        le=2**31 - 1,
        description="Largest request; null: 16 MiB, and max_message_bytes for a model that takes images. Buckets of "
        "UpdateWeights go by max_message_bytes.",
    )
    max_prompt_tokens: int = Field(
        1048576, ge=1, description="Most ids of a prompt or scored sequence; the context length limits them further."
    )
    max_prompt_bytes: int = Field(1048576, ge=1, description="Longest text prompt, in bytes of UTF-8.")
    max_sequences: int = Field(4096, ge=1, description="Most sequences of one Score call.")
    max_stop_strings: int = Field(64, ge=0, description="Most stop strings of a request.")
    max_stop_bytes: int = Field(1024, ge=1, description="Longest stop string, in bytes of UTF-8.")
    max_listed_ids: int = Field(262144, ge=0, description="Most stop ids, and most barred ids, of a request.")
    max_concurrent_rpcs: int = Field(4096, ge=1, description="Most calls at a time; more are told to come back.")
    max_concurrent_rpcs_per_client: int | None = Field(
        None, ge=1, description="Most calls of one client at a time; null: all but an eighth of max_concurrent_rpcs."
    )
    max_call_s: float = Field(86400, gt=0, description="Seconds after which a call is ended, whatever it waits for.")
    receive_timeout_s: float = Field(60, gt=0, description="Seconds within which a call's first message must be here.")
    stream_buffer_bytes: int = Field(
        67108864,
        ge=65536,
        description="Most bytes of one stream that wait for its reader for over a second; then the call is ended.",
    )
    stream_buffers_bytes: int = Field(
        1073741824,
        ge=65536,
        description="Most bytes of all streams that wait; then the slowest reader's call is ended.",
    )

    @property
    def request_bytes(self) -> int:
        """``max_request_bytes``, resolved for a model of text."""
        return TEXT_REQUEST_BYTES if self.max_request_bytes is None else self.max_request_bytes

    @property
    def calls_per_client(self) -> int:
        """``max_concurrent_rpcs_per_client``, resolved."""
        if self.max_concurrent_rpcs_per_client is not None:
            return self.max_concurrent_rpcs_per_client
        return max(1, self.max_concurrent_rpcs - self.max_concurrent_rpcs // 8)


class AccessSettings(Section):
    """TLS, tokens and what is written down about calls."""

    tls_certificate: str | None = Field(None, description="PEM file of the server's certificate chain; null: no TLS.")
    tls_key: str | None = Field(None, description="PEM file of its private key.")
    tls_client_ca: str | None = Field(
        None, description="PEM file of authorities; clients must then show a certificate of theirs (mutual TLS)."
    )
    tokens: str | None = Field(
        None, description="File of bearer tokens by `zerodrift token`; read again when it changes. Null: no tokens."
    )
    allow_insecure: bool = Field(False, description="Allow a host other than loopback without TLS.")
    audit_log: str | None = Field(
        None, description="JSON lines: control calls and refused callers. Null: in the service's log."
    )
    log_requests: bool = Field(False, description="Also log every other call: sizes and outcome, not contents.")
    log_prompts: bool = Field(False, description="Also log prompts. They may hold personal data.")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together; set both, or neither")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca asks for client certificates, which needs tls_certificate and tls_key")
        if self.log_prompts and not self.log_requests:
            raise ValueError("log_prompts adds to log_requests; set server.log_requests=true as well")
        return self
