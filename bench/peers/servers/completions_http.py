"""A small server for peers that have none: POST /v1/completions with token ids, streamed, and nothing else.

Standard library only, as it runs in the peers' environments. It does less than a real server (no tokenizer, no
sampling fields), which is in the peer's favour.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# What a generation thread says of a request: how many new tokens there are, None at the end, or what went wrong.
News = int | None | str
Submit = Callable[[list[int], int, Callable[[News], None]], None]


def serve(port: int, submit: Submit) -> None:
    """Answer until the process is stopped; `submit(prompt, max_tokens, tell)` starts a generation."""

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._head(200, "application/json")
            self.wfile.write(json.dumps({"data": [{"id": "model"}]}).encode())

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, news = request["prompt"], queue.SimpleQueue[News]()
            submit(prompt, request["max_tokens"], news.put)
            self._head(200, "text/event-stream")
            count = 0
            while isinstance(new := news.get(), int):
                count += new
                self._event({"choices": [{"index": 0, "text": "x" * new, "finish_reason": None}]})
            if new is not None:
                self._event({"error": {"message": new}})
                return
            self._event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": count}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _head(self, status: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()

        def _event(self, body: object) -> None:
            self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    with Server(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threading.Event().wait()
