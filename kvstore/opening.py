"""How a new sequence starts: what must be known of it, and which cached prefix it can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvorum.kvstore.policies import Policy
from kvorum.kvstore.prefix_tree import Node, PrefixTree
from kvorum.kvstore.types import SeqId, SnapshotId, blocks_for


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What the store must know of a new (or recomputed) sequence. tokens: all that will be prefilled."""

    seq_id: SeqId
    tokens: Sequence[int]
    prompt_tokens: int
    policy: Policy
    budget: int | None
    salt: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached chain for a prompt, how many of its blocks can be used, and the scores to start from.

    A sequence that keeps scores copies what it finds, the others share it.
    """

    chain: tuple[Node, ...] = ()
    depth: int = 0
    snapshot: SnapshotId | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The blocks that can be used."""
        return self.chain[: self.depth]


def find_prefix(tree: PrefixTree, request: OpenRequest, *, block_size: int) -> PrefixHit:
    """Return the longest usable cached prefix; at least one token is left to compute."""
    chain = tuple(tree.match(request.tokens[: len(request.tokens) - 1], salt=request.salt))
    policy = request.policy
    if not policy.evicts:
        return PrefixHit(chain, len(chain))
    if policy.observe_last is not None:
        # Queries before the last observe_last of the prompt count nothing, so a hit up to there starts from zero.
        unobserved = max(0, request.prompt_tokens - policy.observe_last) // block_size
        return PrefixHit(chain, min(len(chain), unobserved))
    for node in reversed(chain):
        if policy.decay in node.snapshots:
            return PrefixHit(chain, node.depth, node.snapshots[policy.decay])
    return PrefixHit(chain)


def score_cuts(request: OpenRequest, hit: PrefixHit, *, block_size: int) -> list[int]:
    """Return where to save scores: where this prompt leaves what is cached, and at its own last full block."""
    if request.policy.observe_last is not None:
        return []
    last = (len(request.tokens) - 1) // block_size
    return sorted(depth * block_size for depth in {len(hit.chain), last} if depth > hit.depth)


def blocks_taken(tree: PrefixTree, request: OpenRequest, hit: PrefixHit, *, block_size: int) -> int:
    """Return how many blocks, free or unreferenced, the whole prompt takes."""
    whole = blocks_for(len(request.tokens), block_size)
    if request.policy.evicts:
        return whole
    return whole - sum(not tree.is_unreferenced(node.block_id) for node in hit.nodes)
