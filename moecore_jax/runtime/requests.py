"""Requests, completions and their latencies; plain data of the host side."""

import dataclasses
import operator
import reprlib
from collections.abc import Sequence
from typing import Any, Literal

import tokenizers
from tokenizers import decoders


@dataclasses.dataclass(frozen=True)
class Request:
  """One prompt to complete.

  Attributes:
    id: names the request; unique among those in flight.
    prompt: text, or token ids.
    max_new_tokens: longest completion in tokens, >= 1.
    domain: domain of the prompt, None where unknown.
    stop: texts that end the completion; the completion leaves them out.
  """

  id: str
  prompt: str | Sequence[int]
  max_new_tokens: int
  domain: str | None = None
  stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
  """What one request cost; times start when its prefill starts.

  Attributes:
    prompt_tokens: tokens of the prompt.
    output_tokens: tokens generated, an end token included.
    ttft_ms: time to first token.
    tpot_ms: mean time per output token after the first; None for fewer than two.
    e2el_ms: time to the last token.
    hit_rate: share of the decoded tokens' expert invocations whose expert was resident when its
      layer routed; None for fewer than two output tokens.
  """

  prompt_tokens: int
  output_tokens: int
  ttft_ms: float
  tpot_ms: float | None
  e2el_ms: float
  hit_rate: float | None


@dataclasses.dataclass(frozen=True)
class Completion:
  """The answer to one request.

  Attributes:
    id: the request's.
    text: generated text; empty without a tokenizer.
    token_ids: generated tokens.
    finish_reason: "stop" (end token or stop text), "length", or "error".
    error: one sentence on what was wrong with the request, None otherwise.
    metrics: None for an error.
  """

  id: str
  text: str
  token_ids: tuple[int, ...]
  finish_reason: Literal["stop", "length", "error"]
  error: str | None
  metrics: RequestMetrics | None


def prompt_tokens(
  request: Request,
  tokenizer: tokenizers.Tokenizer | None,
  vocab_size: int,
  context_tokens: int,
  domains: Sequence[str] | None,
) -> list[int]:
  """Checks a request and returns its prompt as token ids.

  Args:
    request: the request.
    tokenizer: turns text into tokens; None accepts token ids only.
    vocab_size: V of the model.
    context_tokens: capacity of a row, prompt and completion together.
    domains: known domains; None: any.

  Raises:
    ValueError: one sentence on what is wrong with the request.
  """
  if not _is_whole(request.max_new_tokens) or request.max_new_tokens < 1:
    raise ValueError(
      f"max_new_tokens is {request.max_new_tokens}, expected a whole number, at least 1"
    )
  if request.domain is not None and domains is not None and request.domain not in domains:
    raise ValueError(f"domain is {request.domain!r}, expected one of {', '.join(domains)}")
  if isinstance(request.prompt, str):
    if tokenizer is None:
      raise ValueError(
        "the prompt is text but the checkpoint has no tokenizer.json; copy the model's into the "
        "folder, or pass token ids"
      )
    try:
      request.prompt.encode("utf-8")
    except UnicodeEncodeError as error:
      raise ValueError(f"the prompt is not valid text: {error.reason}") from None
    ids = tokenizer.encode(request.prompt).ids
    fault = f"the tokenizer gives token ids outside 0..{vocab_size - 1}, it is not the model's"
  else:
    ids = _whole_numbers(request.prompt)
    fault = f"the prompt has token ids outside 0..{vocab_size - 1}"
  if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
    raise ValueError(fault)
  if not ids:
    raise ValueError("the prompt is empty, expected at least one token")
  if len(ids) + request.max_new_tokens > context_tokens:
    raise ValueError(
      f"the prompt's {len(ids)} tokens and max_new_tokens = {request.max_new_tokens} exceed the "
      f"context of {context_tokens} tokens; shorten the prompt or raise engine.context_tokens"
    )
  return ids


def _whole_numbers(prompt: Any) -> list[int]:
  try:
    if not isinstance(prompt, bytes):
      return [operator.index(token) for token in prompt]
  except TypeError:  # not a sequence, or not of integers
    pass
  raise ValueError(f"the prompt is {reprlib.repr(prompt)}, expected text or whole token ids")


def _is_whole(value: Any) -> bool:
  """Tells whether a value is an integer, of Python or of an array."""
  try:
    operator.index(value)
  except TypeError:
    return False
  return True


class TextStream:
  """Turns tokens into text as they come, and finds stop texts."""

  def __init__(self, tokenizer: tokenizers.Tokenizer | None, stop: tuple[str, ...]):
    self._tokenizer, self._stop = tokenizer, tuple(s for s in stop if s)
    self._decoder = decoders.DecodeStream(skip_special_tokens=True)
    self._sent = 0
    self.text = ""
    self.stopped = False

  def add(self, token: int) -> str:
    """Takes one token and returns the text that is now certain not to be part of a stop text."""
    if self._tokenizer is None:
      return ""
    self.text += self._decoder.step(self._tokenizer, token) or ""
    found = [at for at in (self.text.find(s) for s in self._stop) if at >= 0]
    if found:
      self.text, self.stopped = self.text[: min(found)], True
      return self.rest()
    held = max((len(s) - 1 for s in self._stop), default=0)
    return self._send(max(self._sent, len(self.text) - held))

  def rest(self) -> str:
    """Returns the text that was held back."""
    return self._send(len(self.text))

  def _send(self, end: int) -> str:
    piece, self._sent = self.text[self._sent : end], max(self._sent, end)
    return piece
