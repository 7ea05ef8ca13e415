"""`moecore profile`: from a workload to the file that ranks a run's experts."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from moecore_jax import traces
from moecore_jax.cli import main
from moecore_jax.residency import profiles
from moecore_jax.testing import random_checkpoint
from moecore_jax.training import corpus, workloads

pytestmark = pytest.mark.usefixtures("quick_compilation")

DEMO = "--config=configs/demo.py"
PROMPTS = [
  {"prompt": "tom has apples", "domain": "math", "max_new_tokens": 4},
  {"prompt": "def add", "domain": "code", "max_new_tokens": 3, "stop": []},
  {"prompt": "ann has pears", "domain": "math", "max_new_tokens": 2},
  {"prompt": "apples and " * 200, "domain": "math", "max_new_tokens": 2},
]


@pytest.fixture
def checkpoint(tmp_path):
  """A tiny random model; a token is a letter."""
  folder = random_checkpoint.write_checkpoint(tmp_path / "checkpoint")
  vocab = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
  tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=" "))
  tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
  tokenizer.save(str(folder / "tokenizer.json"))
  return folder


def test_a_workload_becomes_profiles(checkpoint, tmp_path, capsys):
  prompts, output, trace = (tmp_path / name for name in ("prompts.jsonl", "p.npz", "trace.npz"))
  prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
  argv = ["profile", DEMO, f"--prompts={prompts}", f"--output={output}", f"--trace={trace}"]
  argv += [f"--config.model.checkpoint={checkpoint}", "--config.residency.slots_per_layer=4"]
  argv += ["--config.residency.prefetch.max_experts=0", "--config.residency.staging.enabled=False"]
  assert main.main([*argv, "--scores", f"--json={tmp_path / 'profile.json'}"]) == 1
  out, err = capsys.readouterr()
  assert "line 4: the prompt's" in err.splitlines()[-1]
  recorded = traces.load(trace)
  fingerprint = recorded.meta["fingerprint"]
  made = profiles.load(output, fingerprint, recorded.num_experts)
  assert made.domains == ("math", "code")
  result = json.loads((tmp_path / "profile.json").read_text())
  assert result["fingerprint"] == fingerprint
  lengths = np.diff(recorded.sequence_offsets)
  for domain in made.domains:
    is_domain = np.repeat(recorded.domain == domain, lengths)
    found = made.lookup(domain)
    scores = recorded.scores[is_domain].astype(np.float64)
    lowest = np.where(np.isfinite(scores), scores, np.inf).min(2, keepdims=True)
    mean = np.where(np.isfinite(scores), scores, lowest).mean(0)
    np.testing.assert_allclose(found.mean_scores, mean, rtol=1e-6)
    assert result["domains"][domain]["tokens"] == found.num_tokens == is_domain.sum()
    assert f"{found.num_tokens}" in out


@pytest.mark.parametrize(
  ("line", "argv", "words"),
  [
    ("", (), "has no prompts"),
    ("[]", (), "line 1: prompt is None"),
    ("{", (), "line 1: is no JSON"),
    ('{"prompt": "x", "max_new_tokens": 3}', (), "line 1: domain is None"),
    ('{"prompt": "x", "domain": "a", "max_new_tokens": true}', (), "max_new_tokens is True"),
    ('{"prompt": "x", "domain": "a", "max_new_tokens": 1, "stop": "y"}', (), "stop is 'y'"),
    ('{"prompt": "x", "domain": "a", "max_new_tokens": -2}', (), "is -2, expected 1 or more"),
    (None, ("--trace=p.npz", "--output=./p.npz"), "name one file twice: ./p.npz, p.npz"),
    (None, ("--json=p.npz", "--output=p.npz"), "name one file twice"),
    (None, ("--output=",), "--output=OUTPUT is empty"),
    (None, ("--output=/nowhere/p.npz",), "--output=/nowhere/p.npz: its folder does not exist"),
    (None, ("--trace=/nowhere/t.npz",), "--trace=/nowhere/t.npz"),
    (None, ("--prompts=/nowhere/x.jsonl",), "/nowhere/x.jsonl"),
    (None, ("--config.eval.tasks=maths",), "maths"),
  ],
)
def test_wrong_input(line, argv, words, tmp_path, capsys):
  prompts = tmp_path / "prompts.jsonl"
  if line is not None:
    prompts.write_text(line + "\n")
    argv = (*argv, f"--prompts={prompts}")
  assert main.main(["profile", DEMO, f"--output={tmp_path / 'p.npz'}", *argv]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert err.startswith("moecore profile: ") and len(err.splitlines()) == 1
  assert words in err
  assert not (tmp_path / "p.npz").exists()


def test_the_demo_profiles_text_is_no_measured_item(tmp_path):
  """The command writes prompts that the verb reads, all of the validation split."""
  path = tmp_path / "validation.jsonl"
  assert workloads.main([f"--output={path}", "--items=5"]) == 0
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  assert [row["domain"] for row in rows] == [name for name in corpus.DOMAINS for _ in range(5)]
  held_out = {item.prompt for name in corpus.DOMAINS for item in workloads.items(name)}
  assert held_out.isdisjoint(row["prompt"] for row in rows)
  assert workloads.main([]) == 2
