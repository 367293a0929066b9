"""From logits to a token, one sequence at a time; stateless, so that an answer can go on anywhere.

The order is the field's: bias and penalties, stop tokens held back before min_tokens, temperature, top_k, top_p, min_p,
draw. The draw takes its randomness from (seed, index in the answer) alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvorum.workers.plan import Sample, SampleRequest
from kvorum.workers.request import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5


def sample_batch(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[Sample]:
    """Draw a token from each row of logits [num_rows, vocab_size]."""
    is_plain = [_is_plain_greedy(request) for request in requests]
    best = _largest(logits) if any(is_plain) else [0] * len(requests)
    return [
        Sample(token_id) if plain else sample(row, request)
        for token_id, plain, row, request in zip(best, is_plain, logits, requests, strict=True)
    ]


def _largest(logits: torch.Tensor) -> list[int]:
    # numpy's is six times as fast on CPUs.
    best: list[int] = (logits.numpy().argmax(axis=-1) if logits.is_cpu else logits.argmax(dim=-1)).tolist()
    return best


def _is_plain_greedy(request: SampleRequest) -> bool:
    """Say whether nothing but the largest logit matters."""
    params = request.params
    adjusts = params.needs_history or bool(params.logit_bias) or request.index < params.min_tokens
    return params.temperature < GREEDY_BELOW and params.logprobs is None and not adjusts


def sample(logits: torch.Tensor, request: SampleRequest) -> Sample:
    """Draw a token from logits [vocab_size], float32 or wider.

    Log-probabilities are those of the model before temperature and truncation, after bias and penalties.
    """
    params = request.params
    logits = adjust(logits, request)
    if params.temperature < GREEDY_BELOW:
        token_id = int(logits.argmax())
    else:
        probabilities = truncate(logits / params.temperature, params).softmax(dim=-1)
        token_id = draw(probabilities, seed=params.seed, index=request.index)
    return Sample(token_id, None if params.logprobs is None else top_logprobs(logits, token_id, params.logprobs))


def adjust(logits: torch.Tensor, request: SampleRequest) -> torch.Tensor:
    """Apply logit_bias, penalties and min_tokens; returns new logits when anything changes."""
    params = request.params
    if params.needs_history:
        logits = penalise(logits, request)
    if params.logit_bias:
        logits = logits.clone()
        logits[list(params.logit_bias)] += torch.tensor(
            list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device
        )
    if request.index < params.min_tokens:
        held_back = [*params.stop_token_ids, *params.eos_token_ids]
        logits = logits.clone()
        logits[held_back] = -torch.inf
    return logits


def penalise(logits: torch.Tensor, request: SampleRequest) -> torch.Tensor:
    """Apply the repetition penalty (prompt and answer) and the frequency and presence penalties (answer)."""
    params = request.params
    logits = logits.clone()
    seen = torch.tensor(sorted({*request.prompt, *request.answer}), dtype=torch.int64, device=logits.device)
    factor = params.repetition_penalty
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    if request.answer:
        answer = torch.tensor(request.answer, dtype=torch.int64, device=logits.device)
        counts = torch.bincount(answer, minlength=logits.shape[0]).to(logits.dtype)
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return logits


def truncate(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Mask all but the top_k most likely, then the top_p nucleus, then what is below min_p of the best."""
    if 0 < params.top_k < logits.shape[0]:
        threshold = logits.topk(params.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = logits.sort(descending=True, stable=True)
        probabilities = ordered.softmax(dim=-1)
        outside = probabilities.cumsum(dim=-1) - probabilities >= params.top_p
        outside[0] = False
        logits = logits.masked_fill(outside.gather(0, order.argsort()), -torch.inf)
    if params.min_p > 0.0:
        probabilities = logits.softmax(dim=-1)
        logits = logits.masked_fill(probabilities < params.min_p * probabilities.max(), -torch.inf)
    return logits


def draw(probabilities: torch.Tensor, *, seed: int, index: int) -> int:
    """Draw a token by the exponential race (Gumbel's trick), with noise from (seed, index) alone."""
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + index) % 2**63)
    noise = torch.empty(probabilities.shape, dtype=torch.float64).exponential_(generator=generator)
    return int((probabilities.double().cpu() / noise).argmax())


def top_logprobs(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Return the chosen token's log-probability and the `count` most likely tokens', of those that are possible."""
    logprobs = logits.log_softmax(dim=-1)
    values, token_ids = logprobs.topk(min(count, logprobs.shape[0]))
    found = zip(token_ids.tolist(), values.tolist(), strict=True)
    top = tuple((token_id, value) for token_id, value in found if value > -math.inf)
    return TokenLogprobs(logprob=float(logprobs[token_id]), top=top)
