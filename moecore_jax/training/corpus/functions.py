"""Domain `code`: signature and docstring, a short body, assertions (the HumanEval form).

`FAMILIES` lists what a function does. A function is a family, two constants a 2..20 and b 2..9
(unused ones are 0), a name from `VERBS` x `NOUNS` and an argument from `ARGUMENTS`. Split: by
(family, a, b, name, argument).
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from moecore_jax.training.corpus.document import Document, Part

VERBS = ("apply", "build", "compute", "derive", "find", "get", "make", "run", "solve", "take")
NOUNS = ("data", "entry", "output", "result", "target", "value")
ARGUMENTS = {
  "number": ("n", "x", "num", "count"),
  "list": ("xs", "items", "nums", "values"),
  "text": ("s", "text", "word", "line"),
}
INPUTS = {
  "number": (0, 3, 11, -4),
  "list": ([], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [12, 5, 7, 5, 20, 3], [9, 18, 4, 2, 15]),
  "text": ("", "tree", "a small lantern", "Echo Bay"),
}


class Family(NamedTuple):
  """A function's docstring, its body, and what it computes.

  Attributes:
    kind: type of the argument, a key of `INPUTS`.
    constants: how many of the constants a, b it uses.
    doc: docstring with {v} for the argument.
    body: the function's body, {v} likewise.
    reference: the value for (argument, a, b); expected results of the assertions come from here.
  """

  kind: str
  constants: int
  doc: str
  body: str
  reference: Callable[[Any, int, int], Any]


_LOOP = """    total = 0
    for item in {v}:
        if item CONDITION:
            total += GAIN
    return total
"""


def _loop(condition: str, gain: str) -> str:
  return _LOOP.replace("CONDITION", condition).replace("GAIN", gain)


FAMILIES = (
  Family("number", 1, "Return {v} plus {a}.", "    return {v} + {a}\n", lambda v, a, b: v + a),
  Family("number", 1, "Return {v} minus {a}.", "    return {v} - {a}\n", lambda v, a, b: v - a),
  Family(
    "number",
    2,
    "Return {v} times {a} plus {b}.",
    "    return {v} * {a} + {b}\n",
    lambda v, a, b: v * a + b,
  ),
  Family(
    "number",
    2,
    "Add {b} to {v} and multiply the sum by {a}.",
    "    return ({v} + {b}) * {a}\n",
    lambda v, a, b: (v + b) * a,
  ),
  Family(
    "number",
    1,
    "Return True if {v} is divisible by {a}.",
    "    return {v} % {a} == 0\n",
    lambda v, a, b: v % a == 0,
  ),
  Family(
    "number",
    1,
    "Return the larger of {v} and {a}.",
    "    return max({v}, {a})\n",
    lambda v, a, b: max(v, a),
  ),
  Family(
    "number",
    1,
    "Return the smaller of {v} and {a}.",
    "    return min({v}, {a})\n",
    lambda v, a, b: min(v, a),
  ),
  Family(
    "list", 1, "Return the first {a} of {v}.", "    return {v}[:{a}]\n", lambda v, a, b: v[:a]
  ),
  Family(
    "list", 1, "Return the last {a} of {v}.", "    return {v}[-{a}:]\n", lambda v, a, b: v[-a:]
  ),
  Family(
    "list",
    1,
    "Return {v} with {a} added to each item.",
    "    return [item + {a} for item in {v}]\n",
    lambda v, a, b: [i + a for i in v],
  ),
  Family(
    "list",
    1,
    "Return {v} with each item times {a}.",
    "    return [item * {a} for item in {v}]\n",
    lambda v, a, b: [i * a for i in v],
  ),
  Family(
    "list",
    1,
    "Keep the items of {v} above {a}.",
    "    return [item for item in {v} if item > {a}]\n",
    lambda v, a, b: [i for i in v if i > a],
  ),
  Family(
    "list",
    1,
    "Keep the items of {v} below {a}.",
    "    return [item for item in {v} if item < {a}]\n",
    lambda v, a, b: [i for i in v if i < a],
  ),
  Family(
    "list",
    1,
    "Count how often {a} occurs in {v}.",
    "    return {v}.count({a})\n",
    lambda v, a, b: v.count(a),
  ),
  Family(
    "list",
    1,
    "Sum the items of {v} above {a}.",
    _loop("> {a}", "item"),
    lambda v, a, b: sum(i for i in v if i > a),
  ),
  Family(
    "list",
    1,
    "Count the items of {v} below {a}.",
    _loop("< {a}", "1"),
    lambda v, a, b: sum(i < a for i in v),
  ),
  Family(
    "list",
    2,
    "Sum the items of {v} divisible by {b}, each times {a}.",
    _loop("% {b} == 0", "item * {a}"),
    lambda v, a, b: sum(i * a for i in v if i % b == 0),
  ),
  Family("text", 1, "Repeat {v} {a} times.", "    return {v} * {a}\n", lambda v, a, b: v * a),
  Family(
    "text",
    1,
    "Return the first {a} letters of {v} in upper case.",
    "    return {v}[:{a}].upper()\n",
    lambda v, a, b: v[:a].upper(),
  ),
  Family(
    "text",
    1,
    "Return True if {v} has more than {a} letters.",
    "    return len({v}) > {a}\n",
    lambda v, a, b: len(v) > a,
  ),
)


def function(rng: random.Random) -> Document:
  """One function; its key is (family, a, b, name, argument)."""
  index = rng.randrange(len(FAMILIES))
  family = FAMILIES[index]
  a = rng.randint(2, 20)
  b = rng.randint(2, 9) if family.constants == 2 else 0
  name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
  argument = rng.choice(ARGUMENTS[family.kind])
  doc = family.doc.format(v=argument, a=a, b=b)
  tests = "".join(
    f"assert {name}({value!r}) == {family.reference(value, a, b)!r}\n"
    for value in INPUTS[family.kind]
  )
  return Document(
    "code",
    (
      Part(f'def {name}({argument}):\n    """{doc}"""\n', False),
      Part(family.body.format(v=argument, a=a, b=b), True),
    ),
    key=(index, a, b, name, argument),
    tests=tests,
  )
