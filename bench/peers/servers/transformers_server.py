"""transformers' continuous batching behind completions_http; runs in its own environment.

Its own `transformers serve` takes only text and cannot ignore the end of a sequence, so it cannot be given the same
work.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable

import torch
from completions_http import News, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager


class Batcher:
    """Owns the manager's results: each is told to the request it belongs to."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self._manager = manager
        self._running: dict[str, tuple[int, Callable[[News], None]]] = {}
        self._lock = threading.Lock()

    def submit(self, prompt: list[int], max_tokens: int, tell: Callable[[News], None]) -> None:
        """Hand a request to the manager; called from any thread."""
        with self._lock:
            request_id = self._manager.add_request(prompt, max_new_tokens=max_tokens, streaming=True, eos_token_id=-1)
            if request_id is None:
                tell("the manager takes no more requests")
            else:
                self._running[request_id] = (0, tell)

    def run(self) -> None:
        """Pass results on."""
        while True:
            result = self._manager.get_result(timeout=1.0)
            if result is None:
                continue
            with self._lock:
                told, tell = self._running[result.request_id]
                count = len(result.generated_tokens)
                self._running[result.request_id] = (count, tell)
            if count > told:
                tell(count - told)
            if result.is_finished():
                tell(result.error)


def main() -> None:
    """Load, then pass results on beside the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-tokens", type=int, required=True)
    parser.add_argument("--page-size", type=int, default=32)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    config = ContinuousBatchingConfig(
        page_size=args.page_size, num_blocks=args.kv_tokens // args.page_size, max_batch_tokens=2048
    )
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1), continuous_batching_config=config
    )
    manager.start()
    batcher = Batcher(manager)
    threading.Thread(target=batcher.run, daemon=True).start()
    serve(args.port, batcher.submit)


if __name__ == "__main__":
    main()
