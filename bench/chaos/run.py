"""Starts torment.py, which says what this is; `python -P` finds no modules beside a script by itself."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder, never the repository's root: it hides other packages.
    sys.path.insert(0, str(Path(__file__).parent))

    from torment import main

    sys.exit(main())
