"""A decoder with eviction that is slow and obvious: what the engine must equal, token for token.

It knows no blocks and no slots. Each (layer, KV head) keeps a list of entries; a step attends over them, adds what each
one received to its score, and drops the worst. Policies are written out here once more, one at a time, from their
definitions (docs/kv-store.md), not from the numbers of kvorum.kvstore.policies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvorum.kernels.spec import DecoderSpec


@dataclass
class Entry:
    """One kept token in one (layer, KV head)."""

    position: int
    key: torch.Tensor
    value: torch.Tensor
    score: float = 0.0


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

    def worth(self, entry: Entry, newest: int) -> float:
        if self.name in ("sliding", "sinks"):
            return 0.0
        if self.name == "h2o_avg":
            return entry.score / (newest - entry.position + 1)
        return entry.score

    def rank(self, entry: Entry, newest: int, worth: float | None = None) -> tuple[bool, float, int]:
        value = self.worth(entry, newest) if worth is None else worth
        return self.is_protected(entry.position, newest), value, entry.position


class SlowDecoder:
    """One sequence, all layers."""

    def __init__(self, spec: DecoderSpec, weights: dict[str, torch.Tensor]) -> None:
        self.spec = spec
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.heads: list[list[list[Entry]]] = [[[] for _ in range(spec.num_kv_heads)] for _ in range(spec.num_layers)]
        self.num_tokens = 0

    def run(self, tokens: list[int], policy: SlowPolicy | None, *, evict: bool) -> torch.Tensor:
        """Feed tokens, a whole prompt or one; returns the logits [num_tokens, vocab]."""
        spec = self.spec
        positions = list(range(self.num_tokens, self.num_tokens + len(tokens)))
        self.num_tokens += len(tokens)
        hidden = self.weights["embed"][tokens]
        for layer in range(spec.num_layers):
            normed = self.norm(hidden, f"layers.{layer}.attn_norm")
            q, k, v = (normed @ self.weights[f"layers.{layer}.{name}"].T for name in "qkv")
            q = torch.stack(
                [
                    self.rope(row, layer, p)
                    for row, p in zip(q.view(-1, spec.num_heads, spec.head_dim), positions, strict=True)
                ]
            )
            k = torch.stack(
                [
                    self.rope(row, layer, p)
                    for row, p in zip(k.view(-1, spec.num_kv_heads, spec.head_dim), positions, strict=True)
                ]
            )
            v = v.view(-1, spec.num_kv_heads, spec.head_dim)
            outputs = torch.empty(len(tokens), spec.num_heads, spec.head_dim, dtype=torch.float64)
            for head in range(spec.num_kv_heads):
                group = slice(head * spec.group_size, (head + 1) * spec.group_size)
                entries = self.heads[layer][head]
                entries += [Entry(p, k[i, head], v[i, head]) for i, p in enumerate(positions)]
                outputs[:, group] = self.attend(q[:, group], positions, entries, layer, policy)
                if evict and policy is not None and len(entries) > policy.budget:
                    entries.remove(min(entries, key=lambda e: policy.rank(e, positions[-1])))
            hidden = hidden + outputs.flatten(1) @ self.weights[f"layers.{layer}.o"].T
            normed = self.norm(hidden, f"layers.{layer}.mlp_norm")
            gate, up = (normed @ self.weights[f"layers.{layer}.{name}"].T for name in ("gate", "up"))
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ self.weights[f"layers.{layer}.down"].T
        head_weight = self.weights.get("lm_head", self.weights["embed"])
        return self.norm(hidden, "final_norm") @ head_weight.T

    def attend(
        self, q: torch.Tensor, positions: list[int], entries: list[Entry], layer: int, policy: SlowPolicy | None
    ) -> torch.Tensor:
        """q: [num_tokens, group, head_dim]; scores grow by what each entry received."""
        keys = torch.stack([e.key for e in entries])
        values = torch.stack([e.value for e in entries])
        where = torch.tensor([e.position for e in entries])
        logits = torch.einsum("tgd,nd->tgn", q, keys) * self.spec.attention_scale
        queries = torch.tensor(positions)[:, None]
        hidden = where[None] > queries
        window = self.spec.layers[layer].sliding_window
        if window is not None:
            hidden |= where[None] <= queries - window
        probabilities = logits.masked_fill(hidden[:, None], -torch.inf).softmax(dim=-1)
        counts = torch.tensor([policy is None or policy.query_counts(p) for p in positions], dtype=torch.float64)
        received = torch.einsum("tgn,t->n", probabilities, counts).tolist()
        for entry, mass in zip(entries, received, strict=True):
            entry.score += mass
        return torch.einsum("tgn,nd->tgd", probabilities, values)

    def cut(self, policy: SlowPolicy, *, prompt_done: bool) -> None:
        """Cut every head to the budget."""
        newest = self.num_tokens - 1
        for layer in self.heads:
            for entries in layer:
                worths = [policy.worth(e, newest) for e in entries]
                if policy.name == "snap_h2o" and prompt_done:
                    worths = [max(worths[max(0, i - 2) : i + 3]) for i in range(len(worths))]
                ranked = sorted(
                    zip(entries, worths, strict=True), key=lambda pair: policy.rank(pair[0], newest, pair[1])
                )
                entries[:] = sorted((e for e, _ in ranked[-policy.budget :]), key=lambda e: e.position)

    def kept(self) -> list[list[list[int]]]:
        """Positions kept in each layer and head, ascending."""
        return [[sorted(e.position for e in entries) for entries in layer] for layer in self.heads]

    def norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        return hidden / (hidden.pow(2).mean(-1, keepdim=True) + self.spec.rms_norm_eps).sqrt() * self.weights[name]

    def rope(self, heads: torch.Tensor, layer: int, position: int) -> torch.Tensor:
        """Rotate pairs (i, i + head_dim / 2) by position * inv_freq[i]."""
        inv_freq = torch.tensor(self.spec.layers[layer].rope.inv_freq, dtype=torch.float64)
        cos, sin = (position * inv_freq).cos(), (position * inv_freq).sin()
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
    tokens, kept = [int(logits[-1].argmax())], []
    for _ in range(steps):
        logits = decoder.run([tokens[-1]], policy, evict=True)
        tokens.append(int(logits[-1].argmax()))
        kept.append(decoder.kept())
    return tokens, kept
