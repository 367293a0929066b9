"""The errors that kvorum raises on purpose.

KvorumError
├── InvalidRequestError     a field of a request is wrong; names it           (param, code)
│   ├── ContextLengthError  the prompt and its answer exceed max_model_len
│   └── NeverFitsError      would not fit even alone in an empty pool
├── ModelNotFoundError      no such model is served here
├── AuthenticationError     no key or a wrong key
├── PermissionDeniedError   a key that may not do this
├── CapacityError           full now; try again after retry_after_s
│   ├── QuotaError          the tenant has all the blocks that it may have
│   └── RateLimitError      the tenant sends or runs as many requests as it may
├── EngineLostError         the engine died and the request could not go on elsewhere
├── DeadlineError           the request's deadline passed
├── CheckpointError         a model could not be found, read or understood
└── UnsupportedError        a setting that this model, device or machine cannot have; names it

`cluster/errors.py` says which HTTP and gRPC status each one is.
Children that only the control plane raises (a bad setting, a start that fails, an abort) live where they are raised.
"""

from __future__ import annotations


class KvorumError(Exception):
    """Root of every error raised on purpose; its text is fit for users."""


class InvalidRequestError(KvorumError):
    """A field of a request has a value that cannot be served."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """Prompt plus answer are longer than the model's context."""

    code = "context_length_exceeded"


class NeverFitsError(InvalidRequestError):
    """The request needs more blocks than the whole pool has, even at its smallest allowed budget."""

    code = "kv_never_fits"


class ModelNotFoundError(KvorumError):
    """The named model is not served here."""


class AuthenticationError(KvorumError):
    """No API key, or an unknown one."""


class PermissionDeniedError(KvorumError):
    """The API key may not do this."""


class CapacityError(KvorumError):
    """No room now; worth trying again after retry_after_s seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaError(CapacityError):
    """The tenant's ceiling of KV blocks is reached, and its queue is full."""


class RateLimitError(CapacityError):
    """The tenant sends, or runs, as many requests as it may."""


class EngineLostError(KvorumError):
    """The engine that served the request is gone."""


class DeadlineError(KvorumError):
    """The request's deadline passed before it was done."""


class CheckpointError(KvorumError):
    """A model folder, file or hub id could not be found, read or understood."""


class UnsupportedError(KvorumError):
    """A setting of the engine cannot be had with this model, on this device or machine."""
