"""A small random model with a tokenizer of single characters, as a published checkpoint."""

import shutil
import string
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

ORACLE = Path(__file__).parents[1] / "oracles" / "deepseek_v3"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
  """2 MoE layers of 16 experts, 4 a token; a token is a character."""
  folder = tmp_path_factory.mktemp("checkpoint")
  for name in ("config.json", "model.safetensors"):
    shutil.copy(ORACLE / name, folder)
  characters = string.ascii_letters + string.digits + string.punctuation + " \n"
  tokenizer = tokenizers.Tokenizer(
    models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=" ")
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
  tokenizer.decoder = decoders.Fuse()
  tokenizer.save(str(folder / "tokenizer.json"))
  return folder
