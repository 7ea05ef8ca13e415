"""The file that carries slots per layer from `moecore allocate` to a run.

A JSON object with `version`, `slots` (of each MoE layer, in order) and `fingerprint` (of the
weights whose traces it was made from; "": unknown). Further keys say how it was made, for people.
"""

import dataclasses
import json
import pathlib

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Allocation:
  """Slots of each MoE layer.

  Attributes:
    slots: in layer order, each >= 1.
    fingerprint: of the weights that they were made for; "": unknown.
  """

  slots: tuple[int, ...]
  fingerprint: str = ""

  def to_dict(self) -> dict[str, object]:
    """Returns the content of the file."""
    return {"version": VERSION, "slots": list(self.slots), "fingerprint": self.fingerprint}


def read(path: str | pathlib.Path) -> Allocation:
  """Reads an allocation.

  Raises:
    ValueError: the file is missing, or is no allocation of this version.
  """
  fault = f"allocation file {path}: "
  try:
    content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
  except OSError as error:
    raise ValueError(f"{fault}cannot be read: {error.strerror}") from None
  except ValueError as error:
    raise ValueError(f"{fault}is not JSON ({error}); run moecore allocate again") from None
  if not isinstance(content, dict) or content.get("version") != VERSION:
    raise ValueError(f"{fault}expected an object of version {VERSION}; run moecore allocate again")
  slots, fingerprint = content.get("slots"), content.get("fingerprint", "")
  is_list = isinstance(slots, list) and all(type(k) is int and k >= 1 for k in slots)
  if not is_list or not slots or not isinstance(fingerprint, str):
    raise ValueError(f"{fault}slots is no list of whole numbers from 1; run moecore allocate again")
  return Allocation(tuple(slots), fingerprint)
