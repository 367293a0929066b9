"""What every RPC of a router does beside its own work: it is noted, its key looked up, its error written.

An error is set on the call's context and the method returns: under Serve a raised exception would lose its details.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Protocol
from urllib.parse import unquote

import grpc

from kvorum.cluster import calls
from kvorum.cluster.addresses import is_loopback
from kvorum.cluster.calls import Call
from kvorum.cluster.errors import UnforeseenError, grpc_status_of
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.grpc_messages import GenerateFields
from kvorum.cluster.planning import GenerationRequest, Prompting
from kvorum.cluster.structured import form_of
from kvorum.kvstore.errors import KvorumError, PermissionDeniedError

logger = logging.getLogger(__name__)


class CallContext(Protocol):
    """What grpc.aio's and Serve's contexts have in common."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return what the client sent beside the request."""

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the call's status."""

    def set_details(self, details: str) -> None:
        """Set the status's text."""

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, Any]]) -> None:
        """Set what follows the response."""

    def peer(self) -> str:
        """Return the client's address as gRPC writes it."""
        ...


class GrpcCalls:
    """Opens the calls of one service; protocol is what they are counted as."""

    def __init__(self, frontend: Frontend, protocol: calls.Protocol) -> None:
        self._frontend = frontend
        self._protocol = protocol

    def note(self, grpc_context: CallContext, method: str) -> Call:
        """Return what a call is noted in."""
        texts = ((key, value) for key, value in grpc_context.invocation_metadata() or () if isinstance(value, str))
        return self._frontend.call(self._protocol, method, generates=method == "Generate", headers=dict(texts))

    @contextlib.contextmanager
    def answering(self, grpc_context: CallContext, method: str) -> Iterator[Call]:
        """Note a call; what is raised becomes its status."""
        with self.note(grpc_context, method) as call:
            try:
                yield call
            except Exception as error:
                set_error(grpc_context, error, call, has_begun=False)

    def authenticate(self, grpc_context: CallContext, call: Call) -> str:
        """Return the tenant whose key the call brings."""
        # Serve's gRPC port is open on all interfaces whatever the host: what was not to be reached is not served.
        if is_loopback(self._frontend.config.host) and not is_loopback(_peer_host(grpc_context.peer())):
            raise PermissionDeniedError(
                f"this server takes calls from its own machine only ({self._frontend.config.host})"
            )
        values = [value for key, value in grpc_context.invocation_metadata() or () if key == "authorization"]
        value = values[0] if values else None
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        call.tenant = self._frontend.authenticate(text)
        return call.tenant

    async def plan(
        self, call: Call, fields: GenerateFields, prompt: tuple[int, ...], *, param: str, answer: tuple[int, ...] = ()
    ) -> GenerationRequest:
        """Check what a tenant's call asks for and lay out its sequences.

        param: the field that the prompt came in. answer: what the client has of it already.
        """
        form = form_of(None, fields.structured_outputs)
        prompting = Prompting(
            request_id=call.request_id,
            prompts=(prompt,),
            prompt_param=param,
            max_tokens=fields.max_tokens,
            logprobs=fields.logprobs,
            grammar=await self._frontend.grammar_of(form, tenant=call.tenant),
            answer=answer,
        )
        return self._frontend.plan(fields, prompting, tenant=call.tenant)


def set_error(grpc_context: CallContext, error: Exception, call: Call, *, has_begun: bool) -> None:
    """Write what was raised as the call's status; one that nobody foresaw stays in the log.

    has_begun: whether the client has a part of its answer.
    """
    if not isinstance(error, KvorumError):
        logger.error("call failed", exc_info=error)
        error = UnforeseenError()
    if has_begun:
        call.fail(error)
    else:
        call.refuse(error)
    status = grpc_status_of(error)
    grpc_context.set_code(status.code)
    grpc_context.set_details(status.details)
    grpc_context.set_trailing_metadata(list(status.trailing_metadata or ()))


def _peer_host(peer: str) -> str:
    """Return the host of `ipv4:1.2.3.4:5`, `ipv6:[::1]:5` (the brackets perhaps percent-encoded) or `unix:…`."""
    kind, _, address = unquote(peer).partition(":")
    return "localhost" if kind == "unix" else address.rpartition(":")[0].strip("[]")
