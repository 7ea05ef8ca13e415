"""Records an engine's routing as a trace.

Outputs of calls stay on the device until a few of them are there; then they are fetched together,
so that a step costs the host next to nothing and waits for nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from moecore_jax.runtime.engine import Engine
from moecore_jax.runtime.prefill import PrefillOut
from moecore_jax.runtime.state import NO_EXPERT, StepOut
from moecore_jax.traces.trace import EventKind, Events, Phase, Trace

_MAX_PENDING_CALLS = 64
_MAX_PENDING_BYTES = 64 << 20

OnScores = Callable[[str, np.ndarray], None]
"""Called with a domain ("" for none) and float32 [T, L, N], selection scores of T of its tokens."""


class _Call(NamedTuple):
  """A call whose outputs may still be on the device.

  Attributes:
    number, phase: of the call.
    rows: batch row of each token.
    sequences: sequence of each batch row at that time.
    staged: MoE layers that ran from a staging buffer.
    arrays: (bool [T] tokens that count, topk_ids [L, T, A], scores [L, T, N], predicted [L, T, A]).
  """

  number: int
  phase: Phase
  rows: np.ndarray
  sequences: dict[int, int]
  staged: Sequence[int]
  arrays: tuple[Any, ...]


class TraceRecorder:
  """Keeps what an engine's calls chose; give it to the engine when it is built.

  Args:
    keeps_scores: keep the selection scores in the trace: 4 bytes of host memory for each token and
      expert of each layer.
    on_scores: gets the selection scores as they come, whether they are kept or not.
  """

  def __init__(self, keeps_scores: bool = True, on_scores: OnScores | None = None):
    self._keeps_scores, self._on_scores = keeps_scores, on_scores
    self._pending: list[_Call] = []
    self._pending_bytes = 0
    self._tokens: list[dict[str, np.ndarray]] = []
    self._events: list[tuple[int, EventKind, int, jax.Array | None]] = []
    self._domains: list[str] = []  # of each sequence
    self._sequences: dict[int, int] = {}  # of each batch row

  # What an engine calls, see runtime.recording.

  def on_admission(
    self, number: int, row: int, domain: str | None, warm_started: jax.Array | None
  ) -> None:
    self._sequences = self._sequences | {row: len(self._domains)}
    self._domains.append(domain or "")
    self._events.append((number, EventKind.ADMISSION, row, None))
    if warm_started is not None:
      self._events.append((number, EventKind.WARM_START, row, warm_started))

  def on_reset(self, number: int) -> None:
    self._events.append((number, EventKind.RESET, NO_EXPERT, None))

  def on_prefill(
    self, number: int, row: int, num_tokens: int, staged: Sequence[int], out: PrefillOut
  ) -> None:
    is_token = np.arange(out.topk_ids.shape[1]) < num_tokens
    rows = np.full(len(is_token), row, np.uint16)
    self._add(number, Phase.PREFILL, rows, staged, (is_token, *_choices(out)))

  def on_decode(self, number: int, out: StepOut) -> None:
    rows = np.arange(out.topk_ids.shape[1], dtype=np.uint16)
    self._add(number, Phase.DECODE, rows, (), (out.was_active, *_choices(out)))

  def _add(
    self,
    number: int,
    phase: Phase,
    rows: np.ndarray,
    staged: Sequence[int],
    arrays: tuple[Any, ...],
  ) -> None:
    self._pending.append(_Call(number, phase, rows, self._sequences, staged, arrays))
    self._pending_bytes += sum(array.nbytes for array in arrays)
    if len(self._pending) >= _MAX_PENDING_CALLS or self._pending_bytes >= _MAX_PENDING_BYTES:
      self.flush()

  # What has been recorded.

  def flush(self) -> None:
    """Fetches what is still on the device."""
    fetched = jax.device_get([call.arrays for call in self._pending])
    for call, arrays in zip(self._pending, fetched, strict=True):
      self._take(call, *arrays)
    self._pending, self._pending_bytes = [], 0

  def _take(
    self,
    call: _Call,
    is_token: np.ndarray,
    topk_ids: np.ndarray,
    scores: np.ndarray,
    predicted: np.ndarray,
  ) -> None:
    rows = call.rows[is_token]
    if not len(rows):
      return
    sequences = np.array([call.sequences[row] for row in rows.tolist()])
    staged = np.zeros((len(rows), topk_ids.shape[0]), bool)
    staged[:, list(call.staged)] = True
    scores, experts, predicted = (
      np.ascontiguousarray(x[:, is_token].swapaxes(0, 1)) for x in (scores, topk_ids, predicted)
    )
    if self._on_scores is not None:
      for sequence in dict.fromkeys(sequences.tolist()):
        self._on_scores(self._domains[sequence], scores[sequences == sequence])
    tokens = {
      "sequence": sequences,
      "experts": experts,
      "phase": np.full(len(rows), call.phase, np.uint8),
      "step": np.full(len(rows), call.number, np.int32),
      "row": rows,
      "staged": staged,
      "predicted": predicted,
    }
    if self._keeps_scores:
      tokens["scores"] = scores
    self._tokens.append(tokens)

  def trace(self, engine: Engine) -> Trace:
    """Returns the trace so far.

    Args:
      engine: the one that was recorded; it tells its model, its residency and its seed.

    Raises:
      ValueError: no token was recorded.
    """
    self.flush()
    if not self._tokens:
      raise ValueError("nothing was recorded: no token ran since the engine was built")
    gathered = {
      name: np.concatenate([part[name] for part in self._tokens]) for name in self._tokens[0]
    }
    order = np.argsort(gathered["sequence"], kind="stable")
    tokens = {name: array[order] for name, array in gathered.items()}
    sequences = tokens.pop("sequence")
    counts = np.bincount(sequences, minlength=len(self._domains))
    model = engine.model_spec
    groups = [model.expert_groups[model.group_of(layer)[0]] for layer in model.moe_layers]
    if not engine.residency.prefetch.max_experts:
      del tokens["predicted"]
    if not tokens["staged"].any():
      del tokens["staged"]
    return Trace(
      **tokens,
      sequence_offsets=np.append(0, np.cumsum(counts)).astype(np.int64),
      num_experts=np.array([group.num_experts for group in groups], np.int32),
      top_k=np.array([group.num_experts_per_tok for group in groups], np.int32),
      expert_bytes=engine.expert_bytes(),
      domain=np.array(self._domains, str),
      events=self._event_table(),
      residency=engine.residency,
      seed=engine.spec.sampling.seed,
      meta={"fingerprint": engine.fingerprint},
    )

  def _event_table(self) -> Events:
    happened = jax.device_get([condition for *_, condition in self._events])
    events = [
      event[:3]
      for event, condition in zip(self._events, happened, strict=True)
      if condition is None or condition
    ]
    step, kind, row = zip(*events, strict=True)
    return Events(np.array(step, np.int32), np.array(kind, np.uint8), np.array(row, np.uint16))


def _choices(out: PrefillOut | StepOut) -> tuple[jax.Array, ...]:
  """Returns the arrays [L, T, ..] of a call.

  Raises:
    ValueError: the program does not record.
  """
  if out.scores is None or out.predicted is None:
    raise ValueError("the program gives no scores; give the recorder to the engine that it records")
  return out.topk_ids, out.scores, out.predicted
