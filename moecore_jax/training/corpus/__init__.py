"""The demo model's text: four seeded generators, and a split that keeps items out of training.

Every sentence is invented here. Each domain has its own words and layout, so that a router can tell
them apart: `math` (arithmetic.py), `code` (functions.py), `qa` (facts.py) and `agent`
(transcripts.py). `stream` mixes them into the training text; `held_out` draws the items that become
the bundled workloads.
"""

from moecore_jax.training.corpus.document import Document, Part, Split, split
from moecore_jax.training.corpus.mixture import (
  DOMAINS,
  MIXTURE,
  held_out,
  sample,
  stream,
)

__all__ = [
  "DOMAINS",
  "MIXTURE",
  "Document",
  "Part",
  "Split",
  "held_out",
  "sample",
  "split",
  "stream",
]
