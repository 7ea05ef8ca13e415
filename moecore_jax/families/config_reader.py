"""Reads fields of a published config.json, with one clear sentence where a value is not one that
the family has.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from moecore_jax.specs import RopePairs, RopeSpec, YarnSpec

_LARGEST = 2**31 - 1
_MOST_LAYERS = 1000
_FAR = 1e30  # in float32, too
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 80, 80


def shown(value: Any) -> str:
  """Returns the repr of a value in few words, whatever it is."""
  return _SHORT.repr(value)


class ConfigReader:
  """A parsed config.json of one family; every fault is a ValueError that names the field.

  Args:
    config: the fields.
    family: for messages.
    prefix: of the names in messages.
  """

  def __init__(self, config: Mapping[str, Any], family: str, prefix: str = ""):
    self.config, self.family, self.prefix = config, family, prefix

  def has(self, name: str) -> bool:
    """Tells whether a field is there, and not null."""
    return self.config.get(name) is not None

  def whole(
    self, *names: str, default: int | None = None, least: int = 1, most: int = _LARGEST
  ) -> int:
    """Returns a whole number, under the first of `names` that is there.

    Args:
      names: of the field.
      default: where it is missing; None: it must be there.
      least: the least number that the family has.
      most: the greatest that makes sense.
    """
    name = next(filter(self.has, names), names[0])
    value = self.config.get(name)
    if value is None and default is not None:
      return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
      limit = f"{least} or more" if value is None or most == _LARGEST else f"{least} to {most}"
      self.refuse(name, f"a whole number of {limit}")
    return value

  def layers(self, name: str, default: int | None = None) -> int:
    """Returns a number of layers; with a default there may be none."""
    least = 1 if default is None else 0
    return self.whole(name, default=default, least=least, most=_MOST_LAYERS)

  def number(self, name: str, default: float | None = None, is_positive: bool = False) -> float:
    """Returns a number, `default` where it is missing."""
    value = self.config.get(name)
    if value is None and default is not None:
      return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < _FAR or (is_positive and value <= 0):
      self.refuse(name, "a number above 0" if is_positive else "a number")
    return float(value)

  def flag(self, name: str, default: bool) -> bool:
    """Returns a truth value, `default` where it is missing."""
    value = self.config.get(name)
    if value is None:
      return default
    if not isinstance(value, bool):
      self.refuse(name, "true or false")
    return value

  def kinds(self, name: str, known: Sequence[str], count: int) -> list[str] | None:
    """Returns what is told of each of `count` layers or more, None where nothing is."""
    value = self.config.get(name)
    if value is None:
      return None
    if not isinstance(value, list) or len(value) < count or any(v not in known for v in value):
      options = " or ".join(map(repr, known))
      self.refuse(name, f"{options} for each of {count} layers")
    return value

  def nested(self, name: str) -> "ConfigReader":
    """Returns a reader of the fields of a field; without any where it is missing."""
    value = self.config.get(name)
    if value is not None and not isinstance(value, dict):
      self.refuse(name, "an object")
    return ConfigReader(value or {}, self.family, f"{self.prefix}{name}.")

  def expect(self, name: str, *values: Any) -> None:
    """Refuses a field that is there with another value than the family has."""
    value = self.config.get(name)
    if value is not None and value not in values:
      expected = " or ".join(map(repr, values))
      raise ValueError(
        f"config.json: {self.prefix}{name} is {shown(value)}, {self.family} has {expected}"
      )

  def refuse(self, name: str, expected: str) -> NoReturn:
    """Raises for a field."""
    raise ValueError(
      f"config.json: {self.prefix}{name} is {shown(self.config.get(name))}, {self.family} needs "
      f"{expected}"
    )

  def rope(self, dim: int, pairs: RopePairs, theta: float = 10000.0) -> RopeSpec:
    """Reads both spellings: `rope_theta` with `rope_scaling`, or `rope_parameters` with
    everything.
    """
    rope = self.nested("rope_parameters" if self.config.get("rope_parameters") else "rope_scaling")
    theta = rope.number("rope_theta", self.number("rope_theta", theta, True), True)
    name = "rope_type" if rope.has("rope_type") else "type"
    rope.expect(name, "default", "yarn")
    if rope.config.get(name) != "yarn":
      return RopeSpec(dim, theta, None, pairs)
    yarn = YarnSpec(
      factor=rope.number("factor", is_positive=True),
      original_max_position=rope.whole("original_max_position_embeddings"),
      beta_fast=rope.number("beta_fast", 32.0, True),
      beta_slow=rope.number("beta_slow", 1.0, True),
      mscale=rope.number("mscale", 1.0) or 1.0,
      mscale_all_dim=rope.number("mscale_all_dim", 0.0),
      is_truncated=rope.flag("truncate", True),
    )
    return RopeSpec(dim, theta, yarn, pairs)

  def common(self) -> dict[str, Any]:
    """Returns the fields of ModelSpec that every family spells alike."""
    vocab_size = self.whole("vocab_size")
    return {
      "family": self.family,
      "vocab_size": vocab_size,
      "embed_dim": self.whole("hidden_size"),
      "rms_norm_eps": self.number("rms_norm_eps", 1e-6, True),
      "tie_embeddings": self.flag("tie_word_embeddings", False),
      "max_context_tokens": self.whole("max_position_embeddings", default=4096),
      "eos_token_ids": self._eos_token_ids(vocab_size),
    }

  def _eos_token_ids(self, vocab_size: int) -> tuple[int, ...]:
    value = self.config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(n) is not int or not 0 <= n < vocab_size for n in ids):
      self.refuse("eos_token_id", f"a token id or a list of them, each 0 to {vocab_size - 1}")
    return tuple(ids)

  def head_dim(self) -> int:
    """Returns the width of an attention head: its own field, else the stream over the heads."""
    heads = self.whole("num_attention_heads")
    width = self.whole("head_dim", default=self.whole("hidden_size") // heads, least=1)
    if not width:
      self.refuse("num_attention_heads", "at most hidden_size of them")
    return width
