"""The demo model's byte-pair tokenizer: digits one by one, any text as bytes.

Vocabulary: two special tokens, the 256 bytes, then merges learnt from the training text. Merges
stay inside the pieces of `PIECES`: an option's letter such as ` (A)`, a digit, a word, a run of
signs, white space.
"""

import itertools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from moecore_jax.training import corpus

PAD_TOKEN, EOS_TOKEN = "<|pad|>", "<|eos|>"
PAD_ID, EOS_ID = 0, 1
VOCAB_SIZE = 1024
NUM_DOCUMENTS = 24_000
PIECES = r" ?\([A-Z]\)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train(seed: int, vocab_size: int = VOCAB_SIZE, num_documents: int = NUM_DOCUMENTS):
  """Trains the tokenizer on documents of the training stream.

  Args:
    seed: of the stream.
    vocab_size: entries, special tokens and bytes included.
    num_documents: documents read, those of step 0 of the stream.

  Returns:
    A tokenizers.Tokenizer; the same for the same arguments.
  """
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(PIECES), behavior="isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[PAD_TOKEN, EOS_TOKEN],
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  documents = itertools.islice(corpus.stream(seed, 0), num_documents)
  tokenizer.train_from_iterator((document.text for document in documents), trainer)
  return tokenizer
