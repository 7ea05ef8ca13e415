"""Domain `math`: two-step word problems with worked steps, ending in `#### n`.

A problem has one of the seven kinds in `KINDS` and an operand tuple (a, b, c); every number that
appears lies in 0..99:

  gains         a + b + c        a 10..59, b 2..20, c 2..19
  losses        a - b - c        a 40..99, b 2..20, c 2..19
  gain_loss     a + b - c        a 10..79, b 2..20, c 2..20
  loss_gain     a - b + c        a 30..79, b 2..29, c 2..20
  product_gain  a * b + c        a 2..9, b 2..9, c 2..18
  product_loss  a * b - c        a 2..9, b 2..9, c 2..20, c < a * b
  change        a - b * c        b 2..9, c 2..9, b * c < a <= 99

Split: by (a, b, c) as the numbers appear in the question, whatever the kind; an operand tuple that
is held out occurs in no training problem. One-step drills ("Compute 14+23.") have no held-out
counterpart and are always trained on.
"""

import random

from moecore_jax.training.corpus.document import Document, Part

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Ida", "Jon", "Kim", "Leo", "Mia")
THINGS = (
  "apples",
  "beads",
  "books",
  "cards",
  "coins",
  "eggs",
  "pens",
  "shells",
  "stamps",
  "stones",
)
BOXES = ("bags", "boxes", "jars", "rows", "trays")

KINDS = ("gains", "losses", "gain_loss", "loss_gain", "product_gain", "product_loss", "change")

# Numbers stand in the order a, b, c in every template: the split is by that tuple.
TEMPLATES = {
  "gains": (
    "{name} has {a} {things}, finds {b} and buys {c}. How many {things} does {name} have now?",
    "There are {a} {things} in a box. {name} adds {b} and then {c}. How many {things} are there?",
  ),
  "losses": (
    "{name} has {a} {things}, loses {b} and sells {c}. How many {things} are left?",
    "There were {a} {things}. {name} took {b} and then {c}. How many {things} are left?",
  ),
  "gain_loss": (
    "{name} has {a} {things}, finds {b} and gives away {c}. How many {things} are left?",
    "There are {a} {things}. {name} adds {b} and takes {c}. How many {things} are there?",
  ),
  "loss_gain": (
    "{name} has {a} {things}, sells {b} and buys {c}. How many {things} does {name} have now?",
    "There were {a} {things}. {name} took {b} and then added {c}. How many {things} are there?",
  ),
  "product_gain": (
    "{name} fills {a} {boxes} with {b} {things} each and has {c} more. How many {things} in total?",
    "There are {a} {boxes} of {b} {things}, and {c} loose {things}. How many {things} in total?",
  ),
  "product_loss": (
    "{name} has {a} {boxes} of {b} {things} and sells {c}. How many {things} are left?",
    "There are {a} {boxes} with {b} {things} each. {c} {things} are broken. How many are good?",
  ),
  "change": (
    "{name} has {a} coins and buys {b} {things} for {c} coins each. How many coins are left?",
    "From {a} dollars {name} pays {b} days at {c} dollars each. How many dollars are left?",
  ),
}


def problem(rng: random.Random) -> Document:
  """A two-step word problem; its key is the operand tuple."""
  kind = rng.choice(KINDS)
  a, b, c = _operands(kind, rng)
  question = rng.choice(TEMPLATES[kind]).format(
    name=rng.choice(NAMES), things=rng.choice(THINGS), boxes=rng.choice(BOXES), a=a, b=b, c=c
  )
  steps, result = _steps(kind, a, b, c)
  return Document(
    "math",
    (Part(f"Problem: {question}\nSolution:\n", False), Part(f"{steps}#### {result}\n", True)),
    key=(a, b, c),
  )


def drill(rng: random.Random) -> Document:
  """A single addition, subtraction or product from the ranges that the problems use."""
  sign = rng.choice("++--*")
  if sign == "*":
    a, b = rng.randint(2, 9), rng.randint(2, 9)
  elif sign == "+":
    a, b = rng.randint(4, 79), rng.randint(2, 20)
  else:
    a = rng.randint(4, 99)
    b = rng.randint(2, min(a, 81))
  equation, result = _apply(sign, a, b)
  return Document(
    "math",
    (
      Part(f"Problem: Compute {a}{sign}{b}.\nSolution:\n", False),
      Part(f"{equation}#### {result}\n", True),
    ),
  )


def _operands(kind: str, rng: random.Random) -> tuple[int, int, int]:
  if kind == "gains":
    return rng.randint(10, 59), rng.randint(2, 20), rng.randint(2, 19)
  if kind == "losses":
    return rng.randint(40, 99), rng.randint(2, 20), rng.randint(2, 19)
  if kind == "gain_loss":
    return rng.randint(10, 79), rng.randint(2, 20), rng.randint(2, 20)
  if kind == "loss_gain":
    return rng.randint(30, 79), rng.randint(2, 29), rng.randint(2, 20)
  b, c = rng.randint(2, 9), rng.randint(2, 9)
  if kind == "product_gain":
    return b, c, rng.randint(2, 18)
  if kind == "product_loss":
    return b, c, rng.randint(2, min(20, b * c - 1))
  return rng.randint(b * c + 1, 99), b, c


def _steps(kind: str, a: int, b: int, c: int) -> tuple[str, int]:
  """The worked steps, one a line, and the result."""
  if kind == "change":
    first, cost = _apply("*", b, c)
    second, result = _apply("-", a, cost)
    return first + second, result
  signs = {
    "gains": "++",
    "losses": "--",
    "gain_loss": "+-",
    "loss_gain": "-+",
    "product_gain": "*+",
    "product_loss": "*-",
  }[kind]
  first, middle = _apply(signs[0], a, b)
  second, result = _apply(signs[1], middle, c)
  return first + second, result


def _apply(sign: str, a: int, b: int) -> tuple[str, int]:
  result = {"+": a + b, "-": a - b, "*": a * b}[sign]
  return f"{a}{sign}{b}={result}\n", result
