"""What an engine can never serve, found before a request is queued."""

from __future__ import annotations

from dataclasses import dataclass

from kvorum.kvstore.errors import ContextLengthError, InvalidRequestError, NeverFitsError
from kvorum.kvstore.policies import MIN_BUDGET_TOKENS, parse_policy, resolve_budget, smallest_footprint
from kvorum.workers.request import EngineRequest


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """An engine's bounds on a single request."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError (or a child) when a request can never be served."""
        sampling = request.sampling
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        self._check_token_ids(request)
        if not 0.0 <= request.kv.min_retained_mass <= 1.0:
            raise InvalidRequestError("min_retained_mass must be in 0..1", param="kvorum.min_retained_mass")
        if sampling.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {sampling.max_tokens}", param="max_tokens")
        if len(request.answer_token_ids) >= sampling.max_tokens:
            raise InvalidRequestError("the answer is as long as max_tokens already", param="answer_token_ids")
        self._check_size(request)

    def _check_token_ids(self, request: EngineRequest) -> None:
        last = self.vocab_size - 1
        bad = next((token for token in request.prompt_token_ids if not 0 <= token <= last), None)
        if bad is not None:
            raise InvalidRequestError(f"token id {bad} is not in 0..{last}", param="prompt")
        others = {
            "logit_bias": request.sampling.logit_bias,
            "stop_token_ids": request.sampling.stop_token_ids,
            "answer_token_ids": request.answer_token_ids,
        }
        for name, token_ids in others.items():
            if any(not 0 <= token <= last for token in token_ids):
                raise InvalidRequestError(f"{name}: token ids must be in 0..{last}", param=name)

    def _check_size(self, request: EngineRequest) -> None:
        prompt, max_tokens = request.prompt_token_ids, request.sampling.max_tokens
        context = len(prompt) + max_tokens
        if context > self.max_model_len:
            raise ContextLengthError(
                f"prompt ({len(prompt)} tokens) plus max_tokens ({max_tokens}) exceed the model's context of "
                f"{self.max_model_len} tokens",
                param="max_tokens" if len(prompt) < self.max_model_len else "prompt",
            )
        policy = parse_policy(request.kv.policy)
        budget = resolve_budget(policy, request.kv.kv_budget, context_tokens=context)
        if budget is None and policy.evicts:
            budget = max(MIN_BUDGET_TOKENS, request.terms.least_tokens)
        needed = smallest_footprint(
            budget,
            context_tokens=context,
            min_retained_mass=request.kv.min_retained_mass,
            block_size=self.block_size,
        )
        if needed > self.num_blocks:
            raise NeverFitsError(
                f"the request alone needs {needed} KV blocks, the pool has {self.num_blocks}", param="prompt"
            )
