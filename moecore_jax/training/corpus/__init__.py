"""The demo model's text: four seeded generators, and a split that keeps items out of training.

Every sentence is invented here. Each domain has its own words and layout, so that a router can tell
them apart: `math` (arithmetic.py), `code` (functions.py), `qa` (facts.py) and `agent`
(transcripts.py). `stream` mixes them into the training text; `held_out` draws the items that become
the bundled workloads.
"""

from moecore_jax.training.corpus.document import Document, Part, is_held_out
from moecore_jax.training.corpus.mixture import (
  DOMAINS,
  MIXTURE,
  SECOND_MIXTURE,
  Mixture,
  held_out,
  mixture_at,
  sample,
  stream,
)

__all__ = [
  "DOMAINS",
  "MIXTURE",
  "SECOND_MIXTURE",
  "Document",
  "Mixture",
  "Part",
  "held_out",
  "is_held_out",
  "mixture_at",
  "sample",
  "stream",
]
