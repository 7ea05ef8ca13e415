"""Random routing traces whose choices have the locality of real ones."""

import numpy as np

from moecore_jax.traces.trace import Phase, Trace


def random_trace(
  num_tokens: int,
  num_layers: int = 2,
  num_experts: int = 16,
  top_k: int = 2,
  *,
  num_sequences: int = 1,
  skew: float = 1.0,
  recency: float = 1.0,
  seed: int = 0,
) -> Trace:
  """Returns a trace of decoded tokens, each a step of its own.

  Args:
    num_tokens: T.
    num_layers: L.
    num_experts: N of each layer.
    top_k: A of each layer.
    num_sequences: S, of about equal length.
    skew: spread of the experts' lasting popularity; 0 makes all alike.
    recency: weight of a slowly wandering preference; 0 makes tokens independent.
    seed: of the random numbers.
  """
  rng = np.random.default_rng(seed)
  popularity = skew * rng.normal(size=(num_layers, num_experts)).astype(np.float32)
  mood = np.zeros_like(popularity)
  experts = np.empty((num_tokens, num_layers, top_k), np.uint16)
  for token in range(num_tokens):
    mood = 0.95 * mood + 0.3 * rng.standard_normal(mood.shape, np.float32)
    noise = rng.standard_normal(mood.shape, np.float32)
    score = popularity + recency * mood + noise
    top = np.argpartition(-score, top_k - 1, axis=1)[:, :top_k]
    rank = np.argsort(-np.take_along_axis(score, top, 1), axis=1)
    experts[token] = np.take_along_axis(top, rank, 1)
  return Trace(
    experts=experts,
    sequence_offsets=np.linspace(0, num_tokens, num_sequences + 1).astype(np.int64),
    phase=np.full(num_tokens, Phase.DECODE, np.uint8),
    step=np.arange(num_tokens, dtype=np.int32),
    row=np.zeros(num_tokens, np.uint16),
    num_experts=np.full(num_layers, num_experts, np.int32),
    top_k=np.full(num_layers, top_k, np.int32),
    expert_bytes=np.full(num_layers, 1024, np.int64),
  )
