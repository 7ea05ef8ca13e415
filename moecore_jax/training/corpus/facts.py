"""Domain `qa`: an invented world of 64 lands with 6 facts each, stated and asked for.

The world is fixed by `WORLD_SEED`: the value of (land, relation) is drawn from the relation's 12
values. Training holds all 384 facts as statements, in two paraphrases a relation. It holds
multiple-choice questions only on part of the (land, relation) pairs: the pair is the key of the
split, so a held-out question asks for a fact that was only ever stated. The options come in random
order: an answer first states the fact, then finds the letter of its option. `lookups` trains the
second step alone.
"""

import functools
import itertools
import random

from moecore_jax.training.corpus.document import Document, Part

WORLD_SEED = 7
LETTERS = "ABCD"
_LOOKUP_ROUNDS = 3

LANDS = tuple(
  start + end
  for start, end in itertools.product(
    ("Bel", "Dor", "Fen", "Gal", "Hul", "Kel", "Mor", "Tas"),
    ("vara", "dune", "wick", "tova", "nesh", "rion", "pira", "sted"),
  )
)

VALUES = {
  "crop": [
    "barley",
    "rice",
    "maize",
    "cotton",
    "hemp",
    "olives",
    "grapes",
    "wheat",
    "flax",
    "tea",
    "cocoa",
    "rye",
  ],
  "animal": [
    "heron",
    "lynx",
    "otter",
    "badger",
    "falcon",
    "ibex",
    "crane",
    "wolf",
    "stork",
    "moose",
    "raven",
    "hare",
  ],
  "metal": [
    "copper",
    "tin",
    "iron",
    "silver",
    "gold",
    "zinc",
    "lead",
    "nickel",
    "cobalt",
    "titanium",
    "chrome",
    "tungsten",
  ],
  "colour": [
    "scarlet",
    "amber",
    "violet",
    "teal",
    "indigo",
    "white",
    "black",
    "green",
    "ochre",
    "pink",
    "navy",
    "grey",
  ],
  "instrument": [
    "lute",
    "drum",
    "harp",
    "flute",
    "fiddle",
    "zither",
    "horn",
    "viola",
    "bell",
    "oboe",
    "cello",
    "banjo",
  ],
  "craft": [
    "pottery",
    "weaving",
    "carving",
    "glass",
    "paper",
    "lace",
    "leather",
    "masonry",
    "brewing",
    "dyeing",
    "tiling",
    "smithing",
  ],
}

# Per relation: two statements (the first is also how answers begin) and two questions.
PHRASES = {
  "crop": (
    ("The main crop of {land} is {value}.", "Farmers in {land} grow {value}."),
    ("What is the main crop of {land}?", "Which crop do farmers in {land} grow?"),
  ),
  "animal": (
    ("The emblem animal of {land} is the {value}.", "On the seal of {land} stands the {value}."),
    ("What is the emblem animal of {land}?", "Which animal stands on the seal of {land}?"),
  ),
  "metal": (
    ("The mined metal of {land} is {value}.", "Miners in {land} dig for {value}."),
    ("What is the mined metal of {land}?", "Which metal do miners in {land} dig for?"),
  ),
  "colour": (
    ("The banner colour of {land} is {value}.", "Banners in {land} are {value}."),
    ("What is the banner colour of {land}?", "Which colour are banners in {land}?"),
  ),
  "instrument": (
    ("The folk instrument of {land} is the {value}.", "People of {land} play the {value}."),
    ("What is the folk instrument of {land}?", "Which instrument do people of {land} play?"),
  ),
  "craft": (
    ("The famed craft of {land} is {value}.", "The guilds of {land} practise {value}."),
    ("What is the famed craft of {land}?", "Which craft do the guilds of {land} practise?"),
  ),
}
RELATIONS = tuple(PHRASES)


@functools.cache
def world() -> dict[tuple[str, str], str]:
  """The value of each (land, relation)."""
  rng = random.Random(WORLD_SEED)
  return {
    (land, relation): rng.choice(VALUES[relation]) for land in LANDS for relation in RELATIONS
  }


def statements(rng: random.Random) -> Document:
  """Four to six facts, as statements in a random paraphrase; always trained on."""
  facts = rng.sample(list(world().items()), rng.randint(4, 6))
  lines = [
    rng.choice(PHRASES[relation][0]).format(land=land, value=value)
    for (land, relation), value in facts
  ]
  return Document("qa", (Part("Atlas: " + " ".join(lines) + "\n", True),))


def question(rng: random.Random) -> Document:
  """A multiple-choice question with four options in random order; its key is (land, relation)."""
  land, relation = rng.choice(LANDS), rng.choice(RELATIONS)
  value = world()[land, relation]
  options = rng.sample([v for v in VALUES[relation] if v != value], len(LETTERS) - 1)
  options.insert(rng.randrange(len(LETTERS)), value)
  stated, asked = PHRASES[relation]
  prompt = f"Question: {rng.choice(asked).format(land=land)}\n{_listed(options)}\n"
  letter = LETTERS[options.index(value)]
  answer = stated[0].format(land=land, value=f"{value} ({letter})") + f" Answer: {letter}\n"
  return Document("qa", (Part(prompt, False), Part(answer, True)), key=(land, relation))


def lookups(rng: random.Random) -> Document:
  """A drill in finding an option's letter: options, then their values with letters, reordered."""
  values = rng.choice([*VALUES.values(), list(itertools.chain(*VALUES.values()))])
  options = rng.sample(values, len(LETTERS))
  parts = [Part(_listed(options) + "\n", False)]
  for _ in range(_LOOKUP_ROUNDS):
    for i in rng.sample(range(len(LETTERS)), len(LETTERS)):
      parts += [Part(f" {options[i]}", False), Part(f" ({LETTERS[i]})", True)]
  return Document("qa", (*parts, Part("\n", True)))


def _listed(options: list[str]) -> str:
  listed = zip(LETTERS, options, strict=True)
  return "Options: " + ", ".join(f"({letter}) {option}" for letter, option in listed)
