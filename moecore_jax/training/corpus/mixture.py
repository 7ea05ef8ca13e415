"""The training text, and the held-out items drawn from the other sides of the split."""

import random
from collections.abc import Callable, Iterator

from moecore_jax.training.corpus import arithmetic, facts, functions, transcripts
from moecore_jax.training.corpus.document import Document, Split, split

DOMAINS = ("math", "code", "qa", "agent")

MIXTURE: dict[Callable[[random.Random], Document], float] = {
  arithmetic.problem: 0.33,
  arithmetic.drill: 0.13,
  facts.statements: 0.12,
  facts.question: 0.13,
  facts.lookups: 0.14,
  functions.function: 0.08,
  transcripts.transcript: 0.07,
}
"""Share of the training documents that each generator writes."""

HELD_OUT_SEED = 20_000
PROBLEMS = {
  "math": arithmetic.problem,
  "code": functions.function,
  "qa": facts.question,
  "agent": transcripts.transcript,
}
"""The generator of each domain whose documents may be held out."""


def sample(rng: random.Random) -> Document:
  """One training document: drawn from the mixture, drawn again while its key is held out."""
  generator = rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
  while split((document := generator(rng)).key) != "train":
    pass
  return document


def stream(seed: int, step: int) -> Iterator[Document]:
  """The documents of one training step, endless; a function of its arguments alone."""
  rng = random.Random(f"{seed}/{step}")
  while True:
    yield sample(rng)


def held_out(domain: str, num_items: int, part: Split = "test") -> list[Document]:
  """The first `num_items` documents of a domain in a part of the split, with distinct keys."""
  rng = random.Random(f"{HELD_OUT_SEED}/{domain}")
  documents: dict[tuple, Document] = {}
  while len(documents) < num_items:
    document = PROBLEMS[domain](rng)
    if split(document.key) == part:
      documents.setdefault(document.key, document)
  return list(documents.values())
