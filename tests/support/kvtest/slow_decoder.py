"""A decoder with eviction that is slow and obvious: what the engine must equal, token for token.

It knows no blocks and no slots. Each (layer, KV head) keeps a list of tokens; a step attends over them, adds what each
one received to its score, and drops the worst. Policies are written out here once more, one at a time, from their
definitions (docs/kv-store.md), not from the numbers of kvorum.kvstore.policies.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from kvorum.kernels.spec import DecoderSpec


@dataclass
class Head:
    """What one (layer, KV head) keeps, in the order of arrival. keys, values: [n, head_dim]; scores: [n]."""

    positions: list[int]
    keys: torch.Tensor
    values: torch.Tensor
    scores: torch.Tensor

    def append(self, positions: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        self.positions += positions
        self.keys = torch.cat((self.keys, keys))
        self.values = torch.cat((self.values, values))
        self.scores = torch.cat((self.scores, torch.zeros(len(positions), dtype=torch.float64)))

    def keep(self, indices: list[int]) -> None:
        self.positions = [self.positions[i] for i in indices]
        self.keys, self.values, self.scores = self.keys[indices], self.values[indices], self.scores[indices]


@dataclass
class SlowPolicy:
    """What a policy keeps; budget in tokens."""

    name: str
    budget: int
    prompt_tokens: int

    def query_counts(self, query: int) -> bool:
        return self.name != "snap_h2o" or query >= self.prompt_tokens - 32

    def is_protected(self, position: int, newest: int) -> bool:
        if self.name in ("h2o", "snap_h2o"):
            return position > newest - self.budget // 2
        if self.name == "h2o_avg":
            return position < 4 or position > newest - self.budget // 4
        if self.name == "sinks":
            return position < 4
        return False

    def worths(self, head: Head, newest: int) -> list[float]:
        scores: list[float] = head.scores.tolist()
        if self.name in ("sliding", "sinks"):
            return [0.0] * len(scores)
        if self.name == "h2o_avg":
            return [score / (newest - position + 1) for score, position in zip(scores, head.positions, strict=True)]
        return scores

    def from_first_to_go(self, head: Head, newest: int, worths: list[float]) -> list[int]:
        """Sort a head's indices: unprotected before protected, then by worth, then by age."""
        ranks = [
            (self.is_protected(position, newest), worth, position)
            for position, worth in zip(head.positions, worths, strict=True)
        ]
        return sorted(range(len(ranks)), key=ranks.__getitem__)


class SlowDecoder:
    """One sequence, all layers."""

    def __init__(self, spec: DecoderSpec, weights: dict[str, torch.Tensor]) -> None:
        self.spec = spec
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        empty = torch.empty(0, spec.head_dim, dtype=torch.float64)
        self.heads = [
            [Head([], empty, empty, empty[:, 0]) for _ in range(spec.num_kv_heads)] for _ in range(spec.num_layers)
        ]
        self.num_tokens = 0

    def run(self, tokens: list[int], policy: SlowPolicy | None, *, evict: bool) -> torch.Tensor:
        """Feed tokens, a whole prompt or one; returns the last one's logits [1, vocab]."""
        spec = self.spec
        positions = list(range(self.num_tokens, self.num_tokens + len(tokens)))
        self.num_tokens += len(tokens)
        hidden = self.weights["embed"][tokens]
        for layer in range(spec.num_layers):
            normed = self.norm(hidden, f"layers.{layer}.attn_norm")
            q, k, v = (normed @ self.weights[f"layers.{layer}.{name}"].T for name in "qkv")
            q = self.rope(q.view(-1, spec.num_heads, spec.head_dim), layer, positions)
            k = self.rope(k.view(-1, spec.num_kv_heads, spec.head_dim), layer, positions)
            v = v.view(-1, spec.num_kv_heads, spec.head_dim)
            outputs = torch.empty(len(tokens), spec.num_heads, spec.head_dim, dtype=torch.float64)
            for index, head in enumerate(self.heads[layer]):
                group = slice(index * spec.group_size, (index + 1) * spec.group_size)
                head.append(positions, k[:, index], v[:, index])
                outputs[:, group] = self.attend(q[:, group], positions, head, layer, policy)
                if evict and policy is not None and len(head.positions) > policy.budget:
                    order = policy.from_first_to_go(head, positions[-1], policy.worths(head, positions[-1]))
                    head.keep(sorted(order[1:]))
            hidden = hidden + outputs.flatten(1) @ self.weights[f"layers.{layer}.o"].T
            normed = self.norm(hidden, f"layers.{layer}.mlp_norm")
            gate, up = (normed @ self.weights[f"layers.{layer}.{name}"].T for name in ("gate", "up"))
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ self.weights[f"layers.{layer}.down"].T
        head_weight = self.weights.get("lm_head", self.weights["embed"])
        return self.norm(hidden[-1:], "final_norm") @ head_weight.T

    def attend(
        self, q: torch.Tensor, positions: list[int], head: Head, layer: int, policy: SlowPolicy | None
    ) -> torch.Tensor:
        """q: [num_tokens, group, head_dim]; scores grow by what each kept token received."""
        logits = torch.einsum("tgd,nd->tgn", q, head.keys) * self.spec.attention_scale
        queries, where = torch.tensor(positions)[:, None], torch.tensor(head.positions)[None]
        hidden = where > queries
        window = self.spec.layers[layer].sliding_window
        if window is not None:
            hidden |= where <= queries - window
        probabilities = logits.masked_fill(hidden[:, None], -torch.inf).softmax(dim=-1)
        counts = torch.tensor([policy is None or policy.query_counts(p) for p in positions], dtype=torch.float64)
        head.scores = head.scores + torch.einsum("tgn,t->n", probabilities, counts)
        return torch.einsum("tgn,nd->tgd", probabilities, head.values)

    def cut(self, policy: SlowPolicy, *, prompt_done: bool) -> None:
        """Cut every head to the budget."""
        newest = self.num_tokens - 1
        for layer in self.heads:
            for head in layer:
                worths = policy.worths(head, newest)
                if policy.name == "snap_h2o" and prompt_done:
                    worths = [max(worths[max(0, i - 2) : i + 3]) for i in range(len(worths))]
                head.keep(sorted(policy.from_first_to_go(head, newest, worths)[-policy.budget :]))

    def fork(self) -> SlowDecoder:
        """Return a copy that goes its own way."""
        other = copy.copy(self)
        other.heads = [[Head(list(h.positions), h.keys, h.values, h.scores) for h in layer] for layer in self.heads]
        return other

    def kept(self) -> list[list[list[int]]]:
        """Positions kept in each layer and head, ascending."""
        return [[sorted(head.positions) for head in layer] for layer in self.heads]

    def norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        return hidden / (hidden.pow(2).mean(-1, keepdim=True) + self.spec.rms_norm_eps).sqrt() * self.weights[name]

    def rope(self, heads: torch.Tensor, layer: int, positions: list[int]) -> torch.Tensor:
        """Rotate pairs (i, i + head_dim / 2) of heads [num_tokens, num_heads, head_dim] by position * inv_freq[i]."""
        inv_freq = torch.tensor(self.spec.layers[layer].rope.inv_freq, dtype=torch.float64)
        angles = torch.tensor(positions, dtype=torch.float64)[:, None, None] * inv_freq
        cos, sin = angles.cos(), angles.sin()
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def slow_run(
    spec: DecoderSpec,
    weights: dict[str, torch.Tensor],
    prompt: list[int],
    policy: SlowPolicy | None,
    *,
    steps: int,
    chunk: int = 10**9,
) -> tuple[list[int], list[list[list[list[int]]]]]:
    """Generate greedily; returns the tokens and, after each decode step, the positions kept in each layer and head.

    chunk: cut to the budget after each so many tokens of the prompt.
    """
    decoder = SlowDecoder(spec, weights)
    for start in range(0, len(prompt), chunk):
        logits = decoder.run(prompt[start : start + chunk], policy, evict=False)
        if policy is not None:
            decoder.cut(policy, prompt_done=start + chunk >= len(prompt))
    return slow_decode(decoder, logits, policy, steps=steps)


def slow_decode(
    decoder: SlowDecoder, logits: torch.Tensor, policy: SlowPolicy | None, *, steps: int
) -> tuple[list[int], list[list[list[list[int]]]]]:
    """Go on greedily from the prompt's last logits; returns what slow_run does."""
    tokens = [int(logits[-1].argmax())]
    kept = []
    for _ in range(steps):
        logits = decoder.run([tokens[-1]], policy, evict=True)
        tokens.append(int(logits[-1].argmax()))
        kept.append(decoder.kept())
    return tokens, kept
