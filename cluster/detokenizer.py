"""Tokens to text while they arrive: never half a character, never a part of a stop string.

What was sent cannot be taken back, so text is held while it could still change (an unfinished character) or turn out to
be unwanted (the beginning of a stop string). All pieces together are what decoding all tokens at once gives, cut at the
stop string that was complete first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most three replacement characters at the end may become one yet.
_MAX_PENDING = 3
# Tokens of finished text that stay in the window: decoders treat a text's first token unlike the others.
_CONTEXT_TOKENS = 6
_MAX_WINDOW = 64


class IncrementalDetokenizer:
    """Decodes one sequence's tokens as they arrive.

    A window of tokens is decoded again with each arrival: some tokens of context, then those whose text is not final.
    Byte-level tokens may hold parts of a character, which decode to replacement characters until the rest is there.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, context: Sequence[int] = ()) -> None:
        """Start after the tokens of `context`, whose text is not repeated."""
        self._decode = decode
        self._window = list(context[-_CONTEXT_TOKENS:])
        # The window's text as far as it has been sent. A context may end inside a character: then the text that the
        # window turns out to have does not begin with this, and what differs is sent.
        self._sent = decode(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that became final."""
        self._window += token_ids
        text = self._decode(self._window)
        final = _final_part(text)
        piece = self._unsent(final)
        if len(final) == len(text):
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._sent = self._decode(self._window)
        elif piece:
            self._sent = final
        if len(self._window) > _MAX_WINDOW:
            self._shorten_window(text)
        return piece

    def flush(self) -> str:
        """Return what was held back, now that nothing follows."""
        return self._unsent(self._decode(self._window))

    def _unsent(self, text: str) -> str:
        if text.startswith(self._sent):
            return text[len(self._sent) :]
        same = next((i for i, (new, old) in enumerate(zip(text, self._sent, strict=False)) if new != old), len(text))
        return text[same:]

    def _shorten_window(self, text: str) -> None:
        # Text that never becomes final (a model babbling bytes) must not make each step dearer. The window may begin
        # wherever both parts together decode to the same text.
        for cut in range(len(self._window) - 1, 0, -1):
            head = self._decode(self._window[:cut])
            if self._sent.startswith(head) and head + self._decode(self._window[cut:]) == text:
                self._window = self._window[cut:]
                self._sent = self._sent[len(head) :]
                return


class StopFilter:
    """Cuts text at the first stop string and holds back what may become one.

    matched: the stop string that was found, after which nothing follows.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), "an empty stop string would match everywhere"
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """Take more text and return what is safe to send; nothing follows once is_stopped is set."""
        if self.is_stopped:
            return ""
        text = self._held + text
        if found := self._find(text):
            cut, self.matched = found
            self._held = ""
            return text[:cut]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return what was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """Return the stop string that is complete first, and where it begins; the pieces' sizes do not matter."""
        found = [(index + len(stop), index, stop) for stop in self._stop if (index := text.find(stop)) >= 0]
        return min(found)[1:] if found else None


def _final_part(text: str) -> str:
    num_pending = len(text) - len(text.rstrip(REPLACEMENT))
    return text[: len(text) - min(num_pending, _MAX_PENDING)]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of text that is a proper beginning of stop."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
