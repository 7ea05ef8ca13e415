"""The generators, and the split between training text and held-out items."""

import functools
import itertools
import json
import pathlib
import random
import re
from typing import NamedTuple

import pytest

import moecore_jax
from moecore_jax.config_loading import load_config
from moecore_jax.evaluation import sandbox, tasks
from moecore_jax.training import corpus, tokenizer, workloads
from moecore_jax.training.batches import encode
from moecore_jax.training.corpus import arithmetic, facts, functions

ROOT = pathlib.Path(moecore_jax.__file__).parents[1]

DOCUMENTS_A_STEP = 70  # more than the demo's batches draw


class Training(NamedTuple):
  """What the whole training text of the demo model holds, read from the texts alone.

  Attributes:
    operands: the numbers of each math prompt.
    questions: (land, relation) of each qa prompt.
    statements: sentences of the qa statements.
    texts: whole texts of the other domains.
    keys: the generators' own keys.
  """

  operands: set[tuple[int, ...]]
  questions: set[tuple[str, str]]
  statements: set[str]
  texts: dict[str, set[str]]
  keys: set[tuple]


@pytest.fixture(scope="module")
def training():
  """Every step of the run that made the bundled weights."""
  seen = Training(set(), set(), set(), {"code": set(), "agent": set()}, set())
  train = load_config(str(ROOT / "configs" / "demo_train.py")).train
  for step in range(train.num_steps):
    for document in itertools.islice(corpus.stream(train.seed, step), DOCUMENTS_A_STEP):
      seen.keys.add(document.key)
      prompt = document.parts[0].text
      if document.domain == "math":
        seen.operands.add(_numbers(prompt))
      elif document.domain != "qa":
        seen.texts[document.domain].add(document.text)
      elif prompt.startswith("Question: "):
        seen.questions.add(_asked(prompt))
      elif prompt.startswith("Atlas: "):
        seen.statements.update(re.findall(r"[^.:]+\.", prompt.removeprefix("Atlas:")))
  return seen


@pytest.fixture(scope="module")
def bundled():
  return {domain: tasks.load_items(domain) for domain in corpus.DOMAINS}


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(map(int, re.findall(r"\d+", text)))


@functools.cache
def _questions() -> dict[str, tuple[str, str]]:
  """Every way of asking for every fact."""
  return {
    form.format(land=land): (land, relation)
    for relation, (_, forms) in facts.PHRASES.items()
    for form in forms
    for land in facts.LANDS
  }


def _asked(prompt: str) -> tuple[str, str]:
  return _questions()[prompt.partition("\n")[0].removeprefix("Question: ")]


def test_a_step_draws_fewer_documents():
  words = tokenizer.train(0)
  train = load_config(str(ROOT / "configs" / "demo_train.py")).train
  for step in [*range(20), *range(train.num_steps - 20, train.num_steps)]:
    drawn = itertools.islice(corpus.stream(train.seed, step), DOCUMENTS_A_STEP)
    tokens = sum(len(encode(words, document)[0]) for document in drawn)
    assert tokens > 1.2 * train.batch_rows * train.row_tokens


def test_no_held_out_operands_occur_in_training(training, bundled):
  held_out = {_numbers(item.prompt) for item in bundled["math"]}
  assert len(held_out) == len(bundled["math"]) and all(len(n) == 3 for n in held_out)
  assert len(training.operands) > 10_000
  assert not held_out & training.operands


def test_no_held_out_question_occurs_in_training(training, bundled):
  """A held-out (land, relation) pair is never asked for, in any paraphrase, with any options."""
  held_out = {_asked(item.prompt) for item in bundled["qa"]}
  assert len(held_out) == len(bundled["qa"])
  assert len(training.questions) > 250
  assert not held_out & training.questions


def test_every_fact_is_stated_in_training(training, bundled):
  for (land, relation), value in facts.world().items():
    for form in facts.PHRASES[relation][0]:
      assert " " + form.format(land=land, value=value) in training.statements
  for item in bundled["qa"]:
    stated = item.answer.partition(" Answer:")[0]
    assert " " + re.sub(r" \([A-D]\)", "", stated) in training.statements


@pytest.mark.parametrize("domain", ["code", "agent"])
def test_no_held_out_prompt_occurs_in_training(training, bundled, domain):
  assert len(training.texts[domain]) > 1000
  for item in bundled[domain]:
    assert not any(text.startswith(item.prompt) for text in training.texts[domain])


def test_keys_of_training_are_of_its_split(training):
  assert {corpus.split(key) for key in training.keys} == {"train"}


@pytest.mark.parametrize("domain", corpus.DOMAINS)
def test_the_bundled_items_are_the_held_out_ones(bundled, domain):
  assert bundled[domain] == workloads.items(domain)
  assert all(corpus.split(document.key) == "test" for document in corpus.held_out(domain, 64))


def test_shares_of_the_split():
  """The split is a fair one, and the same in every process."""
  keys = [(a, b, c) for a in range(20) for b in range(20) for c in range(20)]
  parts = [corpus.split(key) for key in keys]
  assert 0.17 < parts.count("test") / len(keys) < 0.23
  assert 0.08 < parts.count("validation") / len(keys) < 0.12
  assert [i for i, part in enumerate(parts[:12]) if part != "train"] == [2, 6, 8, 11]


def test_the_stream_is_a_function_of_seed_and_step():
  def first(seed, step):
    return list(itertools.islice(corpus.stream(seed, step), 50))

  assert first(0, 3) == first(0, 3)
  assert first(0, 3) != first(0, 4)
  assert first(0, 3) != first(1, 3)


@pytest.mark.parametrize("generator", [arithmetic.problem, arithmetic.drill])
def test_worked_steps_are_right(generator):
  rng = random.Random(1)
  for _ in range(2000):
    document = generator(rng)
    *steps, last = document.parts[1].text.splitlines()
    for step in steps:
      left, right = step.split("=")
      a, sign, b = re.fullmatch(r"(\d+)([-+*])(\d+)", left).groups()
      assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(right)
    assert last == f"#### {steps[-1].split('=')[1]}"
    assert all(0 <= n <= 99 for n in _numbers(document.text))


def test_the_right_option_is_the_fact():
  rng = random.Random(2)
  for _ in range(500):
    document = facts.question(rng)
    prompt, answer = (part.text for part in document.parts)
    options = dict(re.findall(r"\(([A-D])\) (\w+)", prompt))
    assert "".join(options) == "ABCD" and len(set(options.values())) == 4
    letter = answer.strip()[-1]
    assert options[letter] == facts.world()[document.key]
    assert f" {options[letter]} ({letter})." in answer


@pytest.mark.parametrize("index", range(len(functions.FAMILIES)))
def test_bodies_pass_their_assertions(index):
  rng = random.Random(index)
  document = next(d for d in iter(lambda: functions.function(rng), None) if d.key[0] == index)
  assert sandbox.passes(document.text + document.tests)
  assert not sandbox.passes(document.parts[0].text + "    return None\n" + document.tests)


def test_transcripts_are_json_lines():
  rng = random.Random(3)
  for _ in range(300):
    document = corpus.sample(rng)
    if document.domain != "agent":
      continue
    for part in document.parts:
      if part.is_target:
        assert set(json.loads(part.text)) == {"tool", "args"}


def test_the_right_letter_is_drawn_at_random():
  """A letter follows neither from the value nor from the fact: the options must be read."""
  letters: dict[tuple[str, str], set[str]] = {}
  for seed in range(6000):
    document = facts.question(random.Random(seed))
    letters.setdefault(document.key, set()).add(document.parts[1].text.strip()[-1])
  assert len(letters) == len(facts.LANDS) * len(facts.RELATIONS)
  assert sum(len(drawn) >= 3 for drawn in letters.values()) > 0.95 * len(letters)


def test_lookups_ask_for_the_letters_of_their_options():
  rng = random.Random(4)
  for _ in range(200):
    document = facts.lookups(rng)
    listed, _, answers = document.text.partition("\n")
    letters = {value: letter for letter, value in re.findall(r"\(([A-D])\) (\w+)", listed)}
    asked = re.findall(r"(\w+) \(([A-D])\)", answers)
    assert len(letters) == 4 and len(asked) == 12
    assert all(letters[value] == letter for value, letter in asked)
    assert [part.is_target for part in document.parts[1:-1:2]] == [False] * 12


def test_shares_of_the_mixture():
  assert abs(sum(corpus.MIXTURE.values()) - 1) < 1e-9
