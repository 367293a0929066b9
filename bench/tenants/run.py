"""Starts neighbours.py, which says what this is; `python -P` finds no modules beside a script by itself."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder and its neighbour's tools, never the repository's root: it hides other packages.
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "peers")]

    from neighbours import main

    sys.exit(main())
