"""The training text, and the held-out items drawn from the other side of the split."""

import random
from collections.abc import Callable, Iterator

from moecore_jax.training.corpus import arithmetic, facts, functions, transcripts
from moecore_jax.training.corpus.document import Document, is_held_out

DOMAINS = ("math", "code", "qa", "agent")

Mixture = dict[Callable[[random.Random], Document], float]

MIXTURE: Mixture = {
  arithmetic.problem: 0.34,
  arithmetic.drill: 0.13,
  facts.statements: 0.13,
  facts.shuffled_question: 0.15,
  functions.function: 0.13,
  transcripts.transcript: 0.12,
}
"""Share of the training documents that each generator writes, in the first phase."""

SECOND_MIXTURE: Mixture = {
  arithmetic.problem: 0.38,
  arithmetic.drill: 0.20,
  facts.statements: 0.08,
  facts.question: 0.18,
  functions.function: 0.08,
  transcripts.transcript: 0.08,
}
"""The same in the second phase: more arithmetic, and questions in the form of the held-out ones."""

HELD_OUT_SEED = 20_000
PROBLEMS = {
  "math": arithmetic.problem,
  "code": functions.function,
  "qa": facts.question,
  "agent": transcripts.transcript,
}
"""The generator of each domain whose documents may be held out."""


def mixture_at(step: int, restart_step: int) -> Mixture:
  """The mixture of a training step; `restart_step` is the first of the second phase, 0 for none."""
  return SECOND_MIXTURE if 0 < restart_step <= step else MIXTURE


def sample(rng: random.Random, mixture: Mixture = MIXTURE) -> Document:
  """One training document: drawn from the mixture, drawn again while its key is held out."""
  generator = rng.choices(list(mixture), list(mixture.values()))[0]
  while is_held_out((document := generator(rng)).key):
    pass
  return document


def stream(seed: int, step: int, mixture: Mixture = MIXTURE) -> Iterator[Document]:
  """The documents of one training step, endless; a function of its arguments alone."""
  rng = random.Random(f"{seed}/{step}")
  while True:
    yield sample(rng, mixture)


def held_out(domain: str, num_items: int) -> list[Document]:
  """The first `num_items` held-out documents of a domain, with distinct keys."""
  rng = random.Random(f"{HELD_OUT_SEED}/{domain}")
  documents: dict[tuple, Document] = {}
  while len(documents) < num_items:
    document = PROBLEMS[domain](rng)
    if is_held_out(document.key):
      documents.setdefault(document.key, document)
  return list(documents.values())
