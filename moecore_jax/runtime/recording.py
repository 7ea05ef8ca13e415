"""What an engine tells a recorder, call by call.

A recorder is injected; the engine does not know what it keeps. It gets arrays in device memory, of
steps that may still run, and decides when to wait for them.

Vocabulary: a *call* is one run of a compiled program, a prefill chunk or a decode step; its number
is its place among all calls since the engine was built, those of `warm_up` included, for each of
them splits the random key.
"""

from collections.abc import Sequence
from typing import Protocol

import jax

from moecore_jax.runtime.prefill import PrefillOut
from moecore_jax.runtime.state import StepOut


class Recorder(Protocol):
  """Takes what happens, in order."""

  def on_admission(
    self, number: int, row: int, domain: str | None, warm_started: jax.Array | None
  ) -> None:
    """Takes the arrival of a prompt.

    Args:
      number: of the call that comes next, the first of the prompt's chunks.
      row: batch row that the prompt gets.
      domain: of the request.
      warm_started: bool [], the slots of staged layers are filled and their signals start anew;
        None: they are not.
    """

  def on_reset(self, number: int) -> None:
    """Takes that pool, tables and signals were emptied right before call `number`."""

  def on_prefill(
    self, number: int, row: int, num_tokens: int, staged: Sequence[int], out: PrefillOut
  ) -> None:
    """Takes a chunk.

    Args:
      number: of the call.
      row: batch row of the prompt.
      num_tokens: leading tokens of `out` that are the prompt's; the others are padding.
      staged: MoE layers (indices among them) that ran from a staging buffer.
      out: with scores and predictions.
    """

  def on_decode(self, number: int, out: StepOut) -> None:
    """Takes a step, with scores and predictions; rows that were not active chose nothing."""
