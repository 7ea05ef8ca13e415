"""Drawing the next token inside a program."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from moecore_jax.specs import SamplingSpec


def sample(logits: Float32[Array, "B V"], key: jax.Array, spec: SamplingSpec) -> Int32[Array, "B"]:
  """Draws one token a row.

  Args:
    logits: float32 [B, V].
    key: random key, unused when greedy.
    spec: temperature 0 takes the largest logit, the lowest index among equals. Otherwise logits are
      divided by the temperature, then cut to the top_k largest (0: all), then to the smallest set
      whose probability reaches top_p; the largest always stays.

  Returns:
    int32 [B].
  """
  if spec.temperature == 0:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  logits = logits / spec.temperature
  if 0 < spec.top_k < logits.shape[-1]:
    lowest = lax.top_k(logits, spec.top_k)[0][:, -1:]
    logits = jnp.where(logits < lowest, -jnp.inf, logits)
  if spec.top_p < 1:
    falling = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(falling, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = jnp.where(before < spec.top_p, falling, jnp.inf)
    logits = jnp.where(logits < kept.min(-1, keepdims=True), -jnp.inf, logits)
  return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
