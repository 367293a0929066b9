"""llama.cpp's own HTTP server, from the wheel xllamacpp; runs in its own environment."""

from __future__ import annotations

import argparse
import threading

import xllamacpp


def main() -> None:
    """Start the server with the settings that `llama-server -t -np -c` would set, and wait."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--parallel", type=int, required=True, help="slots")
    parser.add_argument("--ctx-size", type=int, required=True, help="tokens of all slots together")
    parser.add_argument("--kv-unified", action="store_true", help="one pool for all slots instead of a part for each")
    args = parser.parse_args()

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.n_parallel = args.parallel
    params.n_ctx = args.ctx_size
    params.kv_unified = args.kv_unified
    params.fit_params = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
