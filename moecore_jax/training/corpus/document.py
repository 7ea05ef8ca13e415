"""What a generator yields, and the rule that splits training from held-out text."""

import hashlib
from typing import NamedTuple

HELD_OUT_FRAC = 0.2


class Part(NamedTuple):
  """A stretch of text; the model is trained fully on targets and lightly on what it only reads."""

  text: str
  is_target: bool


class Document(NamedTuple):
  """One generated text.

  Attributes:
    domain: "math", "code", "qa" or "agent".
    parts: the text in order; each part is tokenised on its own.
    key: what makes the problem that problem (operands, fact, arguments); `is_held_out(key)` decides
      its side of the split. The empty key belongs to text that may always be trained on: statements
      of facts and one-step drills.
    tests: for code, assertions on the function that the parts define.
  """

  domain: str
  parts: tuple[Part, ...]
  key: tuple = ()
  tests: str = ""

  @property
  def text(self) -> str:
    return "".join(part.text for part in self.parts)


def is_held_out(key: tuple) -> bool:
  """Tells whether a problem is kept out of training, by a fixed hash of its key's repr."""
  if not key:
    return False
  digest = hashlib.sha256(repr(key).encode()).digest()
  return int.from_bytes(digest[:4]) < HELD_OUT_FRAC * 2**32
