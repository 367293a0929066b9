"""Tenants: who may ask, for how much, and with what quality at least.

A tenant is known by its API keys, of which only SHA-256 hashes are configured: keys are long random strings, so a slow
hash would add nothing. Nothing a client sends beside its key says who it is.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from kvorum.cluster.manager.types import TenantLimits
from kvorum.kvstore.errors import AuthenticationError, InvalidRequestError, PermissionDeniedError
from kvorum.kvstore.policies import MIN_BUDGET_TOKENS, parse_policy, resolve_budget
from kvorum.workers.governance import LeaseTerms
from kvorum.workers.request import TENANT_PRIORITY_STEP, lowest_priority

KEY_PREFIX = "kv-"
# The only tenant while none is configured.
DEFAULT_TENANT = "default"

TenantName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
KeyHash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Blocks = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)]


class Tenant(BaseModel):
    """One tenant's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_key_sha256: tuple[KeyHash, ...] = Field(default=(), description="SHA-256 hashes of its API keys, in hex.")
    weight: float = Field(default=1.0, gt=0, description="Its share of service and of KV blocks against others'.")
    floor: Blocks = Field(
        default=0, description="KV blocks that it is sure of; at most 1.0 with a point is a fraction of the cluster's."
    )
    ceiling: Blocks | None = Field(default=None, description="KV blocks that it has at most; default: no limit.")
    max_running: int | None = Field(default=None, ge=1, description="Requests that it may run at once.")
    max_waiting: int = Field(default=256, ge=0, description="Requests of it that may wait for room.")
    max_requests_per_minute: int | None = Field(default=None, ge=1, description="Requests that it may send a minute.")
    priority: int = Field(default=0, ge=-100, le=100, description="Lower runs earlier, before any request's own.")
    default_policy: str | None = Field(default=None, description="Policy of requests that name none.")
    default_kv_budget: int | float | None = Field(default=None, description="KV budget of requests that name none.")
    allowed_policies: tuple[str, ...] | None = Field(default=None, description="Policies that it may ask for; any.")
    min_retained_mass: float = Field(default=0.0, ge=0, le=1, description="Quality floor of all its requests.")
    min_kv_tokens: int = Field(
        default=128, ge=MIN_BUDGET_TOKENS, description="No request of it is shrunk below this many tokens."
    )
    prefix_group: TenantName | None = Field(
        default=None, description="Tenants of one group share cached prefixes; default: it shares with nobody."
    )
    is_operator: bool = Field(default=False, description="Whether its keys may see the whole cluster's state.")

    @field_validator("floor", "ceiling", mode="before")
    @classmethod
    def _check_blocks(cls, value: object) -> object:
        # A bool is an int, and 2.0 is neither a count nor a fraction.
        if isinstance(value, bool) or (isinstance(value, float) and value > 1):
            raise ValueError("must be a whole number of blocks, or a fraction up to 1.0")
        return value

    @model_validator(mode="after")
    def _check_policies(self) -> Self:
        names = [*(self.allowed_policies or ()), *([self.default_policy] if self.default_policy else [])]
        try:
            for name in names:
                parse_policy(name)
            if self.default_policy is not None:
                resolve_budget(parse_policy(self.default_policy), self.default_kv_budget, context_tokens=1)
        except InvalidRequestError as error:
            raise ValueError(str(error)) from error
        if not self.allows(self.default_policy or "full"):
            raise ValueError(f"default_policy: {self.default_policy or 'full'} is not one of allowed_policies")
        return self

    def allows(self, policy: str) -> bool:
        """Say whether its requests may name a policy; options behind its name do not matter."""
        return self.allowed_policies is None or parse_policy(policy).name in self.allowed_policies

    def check_policy(self, policy: str) -> None:
        """Raise PermissionDeniedError for a policy that it may not ask for."""
        if not self.allows(policy):
            allowed = ", ".join(self.allowed_policies or ())
            raise PermissionDeniedError(f"kvorum.policy: {policy!r} is not allowed to this tenant, only {allowed}")

    def engine_priority(self, requested: int) -> int:
        """Return what engines order by: no request gets past another tenant's by naming a priority of its own."""
        lowest = lowest_priority(self.priority)
        highest = lowest_priority(self.priority - 1) + 1
        return max(highest, min(lowest, self.priority * TENANT_PRIORITY_STEP + requested))

    def limits(self, name: str) -> TenantLimits:
        """Return what the cache manager must know of it."""
        return TenantLimits(
            name=name,
            weight=self.weight,
            floor=self.floor,
            ceiling=self.ceiling,
            max_running=self.max_running,
            max_requests_per_minute=self.max_requests_per_minute,
            max_waiting=self.max_waiting,
        )


class TenantTable:
    """All tenants of a cluster; looked up by key in constant time a key."""

    def __init__(self, tenants: Mapping[str, Tenant], *, api_key: str | None = None) -> None:
        """api_key: the one key that is needed where no tenants are configured; None needs none.

        tells_apart: whether tenants are configured.
        """
        self._tenants = dict(tenants) or {DEFAULT_TENANT: Tenant(is_operator=True)}
        self.tells_apart = bool(tenants)
        self._needs_key = bool(tenants) or api_key is not None
        self._by_hash = {digest: name for name, tenant in tenants.items() for digest in tenant.api_key_sha256}
        if api_key is not None and not tenants:
            self._by_hash[hash_key(api_key)] = DEFAULT_TENANT

    @classmethod
    def closed(cls) -> TenantTable:
        """Return a table that lets nobody in, for as long as the tenants are not known."""
        table = cls({})
        table._needs_key = True
        return table

    def __getitem__(self, name: str) -> Tenant:
        """Return a tenant by its name."""
        return self._tenants[name]

    @property
    def names(self) -> Collection[str]:
        """The names of all."""
        return self._tenants.keys()

    def limits(self) -> tuple[TenantLimits, ...]:
        """Return what the cache manager must know of all."""
        return tuple(tenant.limits(name) for name, tenant in self._tenants.items())

    def authenticate(self, authorization: str | None) -> str:
        """Return the name of the tenant whose key an Authorization header or metadata entry brings.

        Raises:
            AuthenticationError: a key is needed and this is none.
        """
        if not self._needs_key:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        # Whoever measures how long this look-up takes learns something of a hash, from which no key follows.
        name = self._by_hash.get(hash_key(key.strip())) if scheme.lower() == "bearer" else None
        if name is None:
            raise AuthenticationError("a valid key is needed: Authorization: Bearer <key>")
        return name

    def check_operator(self, name: str) -> None:
        """Raise PermissionDeniedError for a tenant that is no operator."""
        if not self._tenants[name].is_operator:
            raise PermissionDeniedError("only an operator's key may see the cluster's state")

    def prefix_salt(self, name: str, cache_salt: str) -> str:
        """Return the salt under which a tenant's prefixes are cached: no other tenant can hit them, or time them."""
        group = self._tenants[name].prefix_group
        owner = f"group/{group}" if group else f"tenant/{name}"
        return f"{owner}\0{cache_salt}"

    def terms(self, name: str) -> LeaseTerms:
        """Return what each sequence of a tenant's requests brings to its engine, before it has a lease."""
        tenant = self._tenants[name]
        return LeaseTerms(tenant=name, weight=tenant.weight, least_tokens=tenant.min_kv_tokens)


def hash_key(key: str) -> str:
    """Return what is configured for a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """Return a new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(32)
