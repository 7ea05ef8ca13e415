"""Packs documents of the training stream into rows of tokens with loss weights."""

from typing import NamedTuple

import numpy as np
import tokenizers

from moecore_jax.training import corpus
from moecore_jax.training.tokenizer import EOS_ID, PAD_ID

READ_WEIGHT = 0.1
"""Loss weight of text that the model reads (questions, tool results); targets weigh 1."""


class Batch(NamedTuple):
  """Packed rows.

  Attributes:
    tokens: int32 [B, T]; whole documents one after another, PAD_ID behind the last.
    weights: float32 [B, T], loss weight of predicting each token; 0 on padding.
  """

  tokens: np.ndarray
  weights: np.ndarray


def make_batch(
  tokenizer: tokenizers.Tokenizer,
  seed: int,
  step: int,
  num_rows: int,
  row_tokens: int,
) -> Batch:
  """Returns the batch of a training step, a function of its arguments alone.

  Documents are drawn until they would fill all rows, then placed longest first into the first row
  with room; what finds none is dropped.

  Args:
    tokenizer: of moecore_jax.training.tokenizer.
    seed: of the stream.
    step: index of the training step.
    num_rows: B.
    row_tokens: T, at least the longest document.
  """
  documents, total = [], 0
  for document in corpus.stream(seed, step):
    documents.append(encode(tokenizer, document))
    total += len(documents[-1][0])
    if total >= num_rows * row_tokens:
      break
  documents.sort(key=lambda pair: -len(pair[0]))
  tokens = np.full((num_rows, row_tokens), PAD_ID, np.int32)
  weights = np.zeros((num_rows, row_tokens), np.float32)
  used = np.zeros(num_rows, np.int64)
  rng = np.random.default_rng((seed, step))
  rows: list[list[tuple[list[int], list[float]]]] = [[] for _ in range(num_rows)]
  for ids, loss in documents:
    roomy = np.flatnonzero(used + len(ids) <= row_tokens)
    if roomy.size:
      row = roomy[np.argmax(used[roomy])]
      rows[row].append((ids, loss))
      used[row] += len(ids)
  for row, members in enumerate(rows):
    at = 0
    for i in rng.permutation(len(members)):
      ids, loss = members[i]
      tokens[row, at : at + len(ids)] = ids
      weights[row, at : at + len(ids)] = loss
      at += len(ids)
  return Batch(tokens, weights)


def encode(
  tokenizer: tokenizers.Tokenizer, document: corpus.Document
) -> tuple[list[int], list[float]]:
  """Returns the tokens of a document, end mark included, and their loss weights."""
  ids: list[int] = []
  weights: list[float] = []
  for part in document.parts:
    part_ids = tokenizer.encode(part.text).ids
    ids += part_ids
    weights += [1.0 if part.is_target else READ_WEIGHT] * len(part_ids)
  return [*ids, EOS_ID], [*weights, 1.0]
