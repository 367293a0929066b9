#!/bin/sh
# GuideLLM against a running server: 16 completions, 4 at a time.
# MODEL_PATH: a folder with the model's tokenizer.
set -eu
guidellm run --help
