"""From checked fields and token ids to the sequences that an engine generates.

Pure: what is random (the seed of a request without one) is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvorum.cluster.config import ClusterConfig, budget_from_number
from kvorum.cluster.model import ServedModel
from kvorum.cluster.sampling_fields import MAX_CHOICES, KvorumFields, SamplingFields
from kvorum.cluster.tenants import Tenant, TenantTable
from kvorum.kvstore.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from kvorum.kvstore.policies import parse_policy, resolve_budget
from kvorum.workers.request import EngineRequest, KVParams, RequestId, SamplingParams

# Of an answer whose length the client left open room for so many tokens is reserved; most end sooner.
OPEN_ANSWER_TOKENS = 512
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One client request, ready for an engine: a sequence for each choice of each prompt, in answer order.

    expected_answer_tokens: of each sequence, where the client left its length open.
    """

    request_id: RequestId
    tenant: str
    sequences: tuple[EngineRequest, ...]
    num_prompts: int
    stop: tuple[str, ...]
    skip_special_tokens: bool
    timeout_s: float
    expected_answer_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        choices = len(self.sequences) // self.num_prompts
        return sum(len(sequence.prompt_token_ids) for sequence in self.sequences[::choices])


@dataclass(frozen=True, slots=True)
class Prompting:
    """What a request asks for beside its sampling fields.

    max_tokens: None for default_max_tokens, and if that is None for as many as there is room for. logprobs:
    alternatives beside each token; None reports no log-probabilities. grammar: that the answer must follow, if any.
    answer: tokens of it that the client has already.
    """

    request_id: RequestId
    prompts: tuple[tuple[int, ...], ...]
    prompt_param: str
    max_tokens: int | None
    max_tokens_param: str = "max_tokens"
    default_max_tokens: int | None = None
    logprobs: int | None = None
    grammar: str = ""
    answer: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a request is planned against.

    tenant: whose request it is. pool_tokens: tokens that the largest KV pool holds; an answer whose length the client
    left open, and whose KV cache may not be cut, is planned no longer than that. random_seed: for a request that brings
    none.
    """

    model: ServedModel
    config: ClusterConfig
    tenants: TenantTable
    tenant: str
    pool_tokens: int
    random_seed: int


def plan_generation(fields: SamplingFields, prompting: Prompting, around: Surroundings) -> GenerationRequest:
    """Check what the fields say against the model, and lay out the sequences.

    Raises:
        InvalidRequestError: or one of its children, or ModelNotFoundError.
        PermissionDeniedError: the tenant may not have that.
    """
    config, tenant = around.config, around.tenants[around.tenant]
    check_model(fields.model, around.model)
    num_choices = fields.n or 1
    if num_choices * len(prompting.prompts) > MAX_CHOICES:
        raise InvalidRequestError(f"n: prompts times n may be at most {MAX_CHOICES}", param="n")
    kv = _kv_params(fields.kvorum, config, tenant)
    sequences: list[EngineRequest] = []
    for prompt in prompting.prompts:
        max_tokens = _max_tokens(prompting, len(prompt), kv=kv, around=around)
        if len(prompting.answer) >= max_tokens:
            raise InvalidRequestError(
                f"answer_token_ids: {len(prompting.answer)} are all of the {max_tokens} tokens the answer may have",
                param="answer_token_ids",
            )
        sampling = _sampling_params(fields, prompting, max_tokens=max_tokens, model=around.model)
        for choice in range(num_choices):
            seed = (around.random_seed if fields.seed is None else fields.seed) + choice
            sequences.append(
                EngineRequest(
                    # Clients may choose ids: those of two tenants never meet.
                    request_id=RequestId(f"{around.tenant}/{prompting.request_id}-{len(sequences)}"),
                    prompt_token_ids=prompt,
                    sampling=replace(sampling, seed=seed & _SEED_MASK),
                    answer_token_ids=prompting.answer,
                    kv=kv,
                    priority=tenant.engine_priority(fields.priority or 0),
                    timeout_s=config.request_timeout_s,
                    cache_salt=around.tenants.prefix_salt(around.tenant, fields.cache_salt or ""),
                    terms=around.tenants.terms(around.tenant),
                )
            )
    return GenerationRequest(
        request_id=prompting.request_id,
        tenant=around.tenant,
        sequences=tuple(sequences),
        num_prompts=len(prompting.prompts),
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        skip_special_tokens=fields.skip_special_tokens is not False,
        timeout_s=config.request_timeout_s,
        expected_answer_tokens=OPEN_ANSWER_TOKENS if prompting.max_tokens is None else None,
    )


def check_model(name: str | None, model: ServedModel) -> None:
    """Raise ModelNotFoundError unless the name is the served model's or absent."""
    if name and name != model.name:
        raise ModelNotFoundError(f"model {name[:256]!r} is not served here, only {model.name!r}")


def _sampling_params(
    fields: SamplingFields, prompting: Prompting, *, max_tokens: int, model: ServedModel
) -> SamplingParams:
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens: {min_tokens} is more than the {max_tokens} tokens the answer may have", param="min_tokens"
        )
    if prompting.grammar:
        # A grammar says where the answer ends; what would keep it from ending there leaves nothing to draw.
        for name, is_given in (("min_tokens", min_tokens), ("ignore_eos", fields.ignore_eos)):
            if is_given:
                raise InvalidRequestError(f"{name}: cannot be combined with a structured answer", param=name)
    logit_bias = dict(fields.logit_bias or {})
    model.check_token_ids(tuple(logit_bias), param="logit_bias")
    stop_token_ids = tuple(fields.stop_token_ids or ())
    model.check_token_ids(stop_token_ids, param="stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(fields.temperature, 1.0),
        top_k=max(0, fields.top_k or 0),
        top_p=_or(fields.top_p, 1.0),
        min_p=_or(fields.min_p, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        logprobs=prompting.logprobs,
        logit_bias=logit_bias,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        eos_token_ids=model.eos_token_ids,
        ignore_eos=bool(fields.ignore_eos),
        grammar=prompting.grammar,
    )


def _max_tokens(prompting: Prompting, num_prompt_tokens: int, *, kv: KVParams, around: Surroundings) -> int:
    param, limit = prompting.prompt_param, around.model.max_model_len
    if num_prompt_tokens == 0:
        raise InvalidRequestError(f"{param}: must have at least one token", param=param)
    room = limit - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"{param} has {num_prompt_tokens} tokens, which leaves no room for an answer within {limit}", param=param
        )
    if prompting.max_tokens is None:
        if kv.kv_budget is None and not parse_policy(kv.policy).evicts:
            room = max(1, min(room, around.pool_tokens - num_prompt_tokens))
        return min(room, prompting.default_max_tokens or room)
    if prompting.max_tokens > room:
        raise ContextLengthError(
            f"{prompting.max_tokens_param}: {num_prompt_tokens} prompt tokens and {prompting.max_tokens} tokens of "
            f"answer are more than the model's {limit}",
            param=prompting.max_tokens_param,
        )
    return prompting.max_tokens


def _kv_params(fields: KvorumFields | None, config: ClusterConfig, tenant: Tenant) -> KVParams:
    """Return what the request asks for, else what its tenant has as a default, else what the cluster has."""
    fields = fields or KvorumFields()
    if tenant.default_policy is not None:
        default_policy, default_budget = tenant.default_policy, tenant.default_kv_budget
    else:
        default_policy, default_budget = config.default_policy, config.default_kv_budget
        if not tenant.allows(default_policy):
            default_policy = "full"
    policy_name = fields.policy or default_policy
    tenant.check_policy(policy_name)
    policy = parse_policy(policy_name)
    budget = budget_from_number(fields.kv_budget)
    if fields.kv_budget is None and policy.evicts:
        budget = budget_from_number(default_budget)
    # Whether the budget is one is found out here; how many tokens it is only the engine needs to know.
    resolve_budget(policy, budget, context_tokens=1)
    floor = max(fields.min_retained_mass or 0.0, tenant.min_retained_mass)
    return KVParams(policy=policy_name, kv_budget=budget, min_retained_mass=floor)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
