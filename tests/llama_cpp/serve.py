"""llama.cpp's HTTP server in a separate process; it prints its URL, and serves until killed."""

from __future__ import annotations

import argparse
import threading

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key")
    parser.add_argument("--alias")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each slot")
    parser.add_argument("--slots", type=int, default=4)
    arguments = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.n_parallel = arguments.slots
    params.n_ctx = arguments.context * arguments.slots
    params.cpuparams.n_threads = 1
    params.port = arguments.port
    params.verbosity = -1
    if arguments.key:
        params.api_keys = [arguments.key]
    if arguments.alias:
        params.model_alias = {arguments.alias}
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
