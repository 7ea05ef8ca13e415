"""What a generator yields, and the rule that splits training, validation and test text."""

import hashlib
from typing import Literal, NamedTuple

Split = Literal["train", "validation", "test"]

TEST_FRAC, VALIDATION_FRAC = 0.2, 0.1


class Part(NamedTuple):
  """A stretch of text; the model is trained fully on targets and lightly on what it only reads."""

  text: str
  is_target: bool


class Document(NamedTuple):
  """One generated text.

  Attributes:
    domain: "math", "code", "qa" or "agent".
    parts: the text in order; each part is tokenised on its own.
    key: what makes the problem that problem (operands, fact, arguments); `split(key)` decides where
      it belongs. The empty key belongs to text that may always be trained on: statements of facts
      and drills.
    tests: for code, assertions on the function that the parts define.
  """

  domain: str
  parts: tuple[Part, ...]
  key: tuple = ()
  tests: str = ""

  @property
  def text(self) -> str:
    return "".join(part.text for part in self.parts)


def split(key: tuple) -> Split:
  """Tells where a problem belongs, by a fixed hash of its key's repr.

  Problems of the test split become the bundled workloads; those of the validation split are what a
  training run watches.
  """
  if not key:
    return "train"
  digest = hashlib.sha256(b"demo 2: " + repr(key).encode()).digest()
  place = int.from_bytes(digest[:4]) / 2**32
  if place < TEST_FRAC:
    return "test"
  return "validation" if place < TEST_FRAC + VALIDATION_FRAC else "train"
