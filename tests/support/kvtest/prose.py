"""English prose that is on every machine: the manual that ships inside Python's standard library."""

from __future__ import annotations

import re
from pydoc_data import topics


def prose() -> str:
    """Return some 500,000 characters of English, markup and tables left out."""
    paragraphs = [
        " ".join(paragraph.split())
        for topic in sorted(topics.topics)
        for paragraph in topics.topics[topic].split("\n\n")
        if re.match(r"[A-Z][a-z]", paragraph.strip()) and not re.search(r"[|=*^`]{2,}|::|\*", paragraph)
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if len(paragraph) > 80)
