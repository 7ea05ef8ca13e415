"""The tokenizer: reproducible, any text, digits one by one, prompts cut as in training."""

import pathlib

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import moecore_jax
from moecore_jax.training import corpus, tokenizer, workloads

ASSETS = pathlib.Path(moecore_jax.__file__).parent / "assets" / "demo"


@pytest.fixture(scope="module")
def bundled():
  return tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


def test_training_again_gives_the_bundled_one(bundled):
  assert tokenizer.train(0).to_str() == bundled.to_str()


def test_special_tokens(bundled):
  assert bundled.get_vocab_size() == tokenizer.VOCAB_SIZE
  assert bundled.token_to_id(tokenizer.PAD_TOKEN) == tokenizer.PAD_ID
  assert bundled.token_to_id(tokenizer.EOS_TOKEN) == tokenizer.EOS_ID


@given(st.text())
def test_any_text_survives(text):
  words = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
  if tokenizer.PAD_TOKEN in text or tokenizer.EOS_TOKEN in text:
    return
  assert words.decode(words.encode(text).ids) == text


def test_digits_stand_alone(bundled):
  assert len(bundled.encode("407 apples, x1y22").tokens) > 9
  digits = [t for t in bundled.get_vocab() if set(t) & set("0123456789")]
  assert sorted(digits) == list("0123456789")


@pytest.mark.parametrize("domain", corpus.DOMAINS)
def test_prompts_are_cut_as_in_training(bundled, domain):
  """A prompt as a whole has the tokens that its parts have in training."""
  documents = corpus.held_out(domain, workloads.NUM_ITEMS)
  for document, item in zip(documents, workloads.items(domain), strict=True):
    parts, length = [], 0
    for part in document.parts:
      if length < len(item.prompt):
        parts += bundled.encode(part.text).ids
      length += len(part.text)
    assert bundled.encode(item.prompt).ids == parts
