"""What kernels read about a sequence: the layout of its int32 record and of its float64 rule.

Field numbers are `tl.constexpr`, so that kernels and the host name the same ones.
"""

from __future__ import annotations

import triton.language as tl

# The row of `victims` that belongs to the sequence.
ROW = tl.constexpr(0)
# Position of its first new token, how many new tokens there are, and where they stand in the step's tokens.
START = tl.constexpr(1)
NUM_TOKENS = tl.constexpr(2)
FIRST_TOKEN = tl.constexpr(3)
# The slot that its first new token takes (unless it replaces a victim), and the slots in use after the step.
FIRST_SLOT = tl.constexpr(4)
NUM_SLOTS = tl.constexpr(5)
REPLACE = tl.constexpr(6)
# Where its block table begins in the step's block tables.
TABLE = tl.constexpr(7)
# Its decode items: the first, and how many; see `decode_attention`.
FIRST_ITEM = tl.constexpr(8)
NUM_ITEMS = tl.constexpr(9)
# Its rule. Without HAS_RULE the others are 0.
HAS_RULE = tl.constexpr(10)
CHOOSE = tl.constexpr(11)
RECENT = tl.constexpr(12)
SINKS = tl.constexpr(13)
BY_AGE = tl.constexpr(14)
PER_LIFETIME = tl.constexpr(15)
OBSERVE_FROM = tl.constexpr(16)
NUM_FIELDS = tl.constexpr(20)

# What the step multiplies old scores by (decay ** num_tokens), log(decay), and 1 - decay.
STEP_DECAY = tl.constexpr(0)
LOG_DECAY = tl.constexpr(1)
DECAY_LOSS = tl.constexpr(2)
NUM_NUMBERS = tl.constexpr(4)

# A decode item: sequence (negative: none), first slot, end slot, index among the sequence's items.
ITEM_FIELDS = tl.constexpr(4)

NO_VICTIM = tl.constexpr(-1)
LAST_POSITION = tl.constexpr(2**31 - 1)
LOG2E = tl.constexpr(1.4426950408889634)
