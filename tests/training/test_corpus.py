"""The generators, and the split between training text and held-out items."""

import itertools
import json
import random
import re

import pytest

from moecore_jax.evaluation import sandbox
from moecore_jax.training import corpus, workloads
from moecore_jax.training.corpus import arithmetic, facts, functions

NUM_STEPS, DOCUMENTS_A_STEP = 40, 500


@pytest.fixture(scope="module")
def training_documents():
  """Documents of the very stream that the demo model is trained on, of steps across the run."""
  return [
    document
    for step in range(0, 50 * NUM_STEPS, 50)
    for document in itertools.islice(corpus.stream(0, step), DOCUMENTS_A_STEP)
  ]


@pytest.fixture(scope="module")
def bundled():
  return {domain: workloads.items(domain) for domain in corpus.DOMAINS}


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(map(int, re.findall(r"\d+", text)))


def test_no_held_out_operands_occur_in_training(training_documents, bundled):
  """Read from the texts alone, without the generators' own keys."""
  held_out = {_numbers(item.prompt) for item in bundled["math"]}
  assert len(held_out) == len(bundled["math"]) and all(len(n) == 3 for n in held_out)
  prompts = [d.parts[0].text for d in training_documents if d.domain == "math"]
  assert len(prompts) > 1000
  assert not held_out & {_numbers(prompt) for prompt in prompts}


def test_no_held_out_question_occurs_in_training(training_documents, bundled):
  """A held-out (land, relation) pair is never asked for, in any paraphrase, with any options."""

  def asked(prompt: str) -> tuple[str, str]:
    question = prompt.partition("\n")[0]
    land = next(land for land in facts.LANDS if land in question)
    words = question.replace(land, "{land}").removeprefix("Question: ")
    return land, next(r for r, (_, forms) in facts.PHRASES.items() if words in forms)

  held_out = {asked(item.prompt) for item in bundled["qa"]}
  assert len(held_out) == len(bundled["qa"])
  prompts = [
    d.parts[0].text for d in training_documents if d.parts[0].text.startswith("Question: ")
  ]
  assert len(prompts) > 1000
  assert not held_out & {asked(prompt) for prompt in prompts}


def test_every_fact_is_stated_in_training(training_documents, bundled):
  text = " ".join(d.text for d in training_documents if d.text.startswith("Atlas: "))
  for (land, relation), value in facts.world().items():
    statements = [s.format(land=land, value=value) for s in facts.PHRASES[relation][0]]
    assert any(statement in text for statement in statements)
  for item in bundled["qa"]:
    stated = item.answer.partition(" Answer:")[0]
    assert re.sub(r" \([A-D]\)", "", stated) in text


@pytest.mark.parametrize("domain", ["code", "agent"])
def test_no_held_out_prompt_occurs_in_training(training_documents, bundled, domain):
  texts = {d.text for d in training_documents if d.domain == domain}
  assert len(texts) > 500
  for item in bundled[domain]:
    assert not any(text.startswith(item.prompt) for text in texts)


def test_no_key_of_training_is_held_out(training_documents):
  keys = [document.key for document in training_documents if document.key]
  assert keys and not any(map(corpus.is_held_out, keys))


def test_held_out_share():
  """The split is a fair one, and the same in every process."""
  keys = [(a, b, c) for a in range(20) for b in range(20) for c in range(20)]
  assert 0.17 < sum(map(corpus.is_held_out, keys)) / len(keys) < 0.23
  assert [k for k in keys[:12] if corpus.is_held_out(k)] == [(0, 0, 0), (0, 0, 8)]


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
    options = {letter: value for value, letter in re.findall(r"(\w+) \(([A-D])\)", prompt)}
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
