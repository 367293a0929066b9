"""OpenVINO GenAI's ContinuousBatchingPipeline behind completions_http; runs in its own environment."""

from __future__ import annotations

import argparse
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from completions_http import News, serve

BLOCK = 32


class Stepper:
    """Owns the pipeline: takes requests in, steps, and tells each request of its new tokens."""

    def __init__(self, pipeline: genai.ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._inbox: queue.SimpleQueue[tuple[list[int], int, Callable[[News], None]]] = queue.SimpleQueue()
        self._running: dict[int, tuple[Any, Callable[[News], None]]] = {}
        self._next_id = 0

    def submit(self, prompt: list[int], max_tokens: int, tell: Callable[[News], None]) -> None:
        """Queue a request; called from any thread."""
        self._inbox.put((prompt, max_tokens, tell))

    def run(self) -> None:
        """Step as long as there is work, then wait for more."""
        while True:
            self._take_in()
            self._pipeline.step()
            for request_id, (handle, tell) in list(self._running.items()):
                while handle.can_read():
                    tell(sum(len(output.generated_ids) for output in handle.read().values()))
                status = handle.get_status()
                if status != genai.GenerationStatus.RUNNING:
                    tell(None if status == genai.GenerationStatus.FINISHED else str(status))
                    del self._running[request_id]

    def _take_in(self) -> None:
        while not self._running or not self._inbox.empty():
            prompt, max_tokens, tell = self._inbox.get()
            config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
            tensor = openvino.Tensor(np.array([prompt], dtype=np.int64))
            self._running[self._next_id] = (self._pipeline.add_request(self._next_id, tensor, config), tell)
            self._next_id += 1


def main() -> None:
    """Load, then step in a thread beside the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-blocks", type=int, required=True, help=f"blocks of {BLOCK} tokens")
    parser.add_argument("--kv-precision", required=True)
    parser.add_argument("--keep-tokens", type=int, help="evict down to so many tokens of each sequence")
    args = parser.parse_args()

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = 16
    scheduler.enable_prefix_caching = True
    scheduler.num_kv_blocks = args.kv_blocks
    if args.keep_tokens:
        scheduler.use_cache_eviction = True
        scheduler.enable_prefix_caching = False
        kept, recent = args.keep_tokens // BLOCK * BLOCK, args.keep_tokens // 2 // BLOCK * BLOCK
        scheduler.cache_eviction_config = genai.CacheEvictionConfig(BLOCK, recent, kept, genai.AggregationMode.NORM_SUM)
    properties = {"KV_CACHE_PRECISION": args.kv_precision}
    stepper = Stepper(genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties))
    threading.Thread(target=serve, args=(args.port, stepper.submit), daemon=True).start()
    stepper.run()


if __name__ == "__main__":
    main()
