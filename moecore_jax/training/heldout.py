"""Cheap evaluation on held-out items: exact match under teacher forcing, and which experts a domain
uses.

Greedy decoding gives exactly the reference answer if and only if, fed the reference, the model's
likeliest token is the reference's at every position of it. One forward pass an item therefore
gives the rate of exact answers; other answers that score are not counted.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx

from moecore_jax.training import corpus
from moecore_jax.training.batches import encode
from moecore_jax.training.tokenizer import PAD_ID


class Domain(NamedTuple):
  """The held-out items of one domain as arrays.

  Attributes:
    tokens: int32 [I, T], one item a row, PAD_ID behind it.
    is_target: bool [I, T], tokens that the model is to produce.
  """

  tokens: np.ndarray
  is_target: np.ndarray


def load(
  tokenizer: tokenizers.Tokenizer, num_items: int, part: corpus.Split = "validation"
) -> dict[str, Domain]:
  """Returns the first `num_items` items of each domain in a held-out part, all of one width T."""
  encoded = {
    name: [encode(tokenizer, document) for document in corpus.held_out(name, num_items, part)]
    for name in corpus.DOMAINS
  }
  shape = (num_items, max(len(ids) for items in encoded.values() for ids, _ in items))
  domains = {}
  for name, items in encoded.items():
    domain = Domain(np.full(shape, PAD_ID, np.int32), np.zeros(shape, bool))
    for row, (ids, weights) in enumerate(items):
      domain.tokens[row, : len(ids)] = ids
      domain.is_target[row, : len(ids)] = np.equal(weights, 1.0)
    domains[name] = domain
  return domains


def make_evaluate(graphdef: nnx.GraphDef, domains: dict[str, Domain]):
  """Returns a function of (params, biases) to ({domain: exact-match rate}, {domain: int [L, N]}).

  The second result counts, over the items' tokens, how often each expert of each MoE layer is
  chosen.
  """

  @jax.jit
  def run(params, biases, tokens, is_target):
    out = nnx.merge(graphdef, params, biases)(tokens)
    right = (jnp.argmax(out.logits[:, :-1], -1) == tokens[:, 1:]) | ~is_target[:, 1:]
    num_experts = out.loads[0].shape[0]
    real = (tokens != PAD_ID).astype(jnp.int32).reshape(-1, 1, 1)
    counts = [
      (jax.nn.one_hot(routing.topk_ids, num_experts, dtype=jnp.int32) * real).sum((0, 1))
      for routing in out.routings
    ]
    return right.all(-1).mean(), jnp.stack(counts)

  def evaluate(params, biases):
    results = {name: run(params, biases, *domain) for name, domain in domains.items()}
    rates = {name: float(rate) for name, (rate, _) in results.items()}
    return rates, {name: np.asarray(counts) for name, (_, counts) in results.items()}

  return evaluate


def top_quarter_overlap(counts: dict[str, np.ndarray]) -> dict[str, float]:
  """Overlap of the most used quarter of the experts, for each pair of domains.

  Args:
    counts: {domain: int [L, N]} uses of each expert.

  Returns:
    {"a-b": share of the quarter that both have, averaged over layers}; 0.25 is chance.
  """
  tops = {}
  for name, uses in counts.items():
    quarter = uses.shape[1] // 4
    order = np.argsort(-uses, axis=1, kind="stable")[:, :quarter]
    tops[name] = [set(row) for row in order]
  return {
    f"{a}-{b}": float(np.mean([len(x & y) / len(x) for x, y in zip(tops[a], tops[b], strict=True)]))
    for a, b in itertools.combinations(tops, 2)
  }
