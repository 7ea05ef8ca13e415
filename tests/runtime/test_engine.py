"""The engine's requests: batching, faults, stop texts, scores, streaming, counters, memory."""

import dataclasses
import time

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from moecore_jax.runtime.engine import Engine, Request
from moecore_jax.runtime.requests import TextStream
from moecore_jax.specs import EngineSpec, ResidencySpec
from moecore_jax.testing import tiny

SPEC = tiny.tiny_spec(num_experts=8, num_experts_per_tok=2)
ENGINE = EngineSpec(
  batch_size=2,
  context_tokens=64,
  prefill_buckets=(8, 16),
  kv_block_tokens=16,
  layer_loop="scanned",
)


def letters() -> tokenizers.Tokenizer:
  """One token a character of a small alphabet."""
  vocab = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz .,:;!?0123456789-+*/=()[]{}<>#")}
  tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
  tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
  tokenizer.decoder = decoders.Fuse()
  return tokenizer


@pytest.fixture(scope="module")
def model():
  return tiny.random_model(SPEC, ENGINE)


def make_engine(model, policy="rhac", slots=3, spec=ENGINE, **kwargs):
  residency = ResidencySpec(policy, (slots,) * 2, **kwargs)
  return Engine(model.spec, residency, spec, model.params, model.banks, letters(), ("math", "qa"))


def test_batched_requests_equal_those_run_alone(model):
  prompts = tiny.random_prompts(SPEC, [3, 20, 7, 1, 12])
  requests = [Request(str(i), p, 4 + i) for i, p in enumerate(prompts)]
  together = {c.id: c for c in make_engine(model).generate(requests)}
  assert len(together) == 5
  for request in requests:
    (alone,) = make_engine(model).generate([request])
    assert together[request.id].token_ids == alone.token_ids
    assert len(alone.token_ids) == request.max_new_tokens
    assert alone.finish_reason == "length"
    assert alone.metrics.prompt_tokens == len(request.prompt)
    assert 0 <= alone.metrics.hit_rate <= 1
    assert 0 < alone.metrics.ttft_ms <= alone.metrics.e2el_ms


@pytest.mark.parametrize(
  ("request_", "words"),
  [
    (Request("x", [], 3), "empty"),
    (Request("x", "", 3), "empty"),
    (Request("x", [1] * 60, 5), "exceed the context of 64"),
    (Request("x", [1], 0), "max_new_tokens is 0"),
    (Request("x", [1], None), "max_new_tokens is None"),
    (Request("x", [1], 2.5), "max_new_tokens is 2.5"),
    (Request("x", None, 3), "the prompt is None, expected text or whole token ids"),
    (Request("x", 7, 3), "the prompt is 7"),
    (Request("x", [1.7, 2], 3), "the prompt is [1.7, 2]"),
    (Request("x", np.ones(3), 3), "whole token ids"),
    (Request("x", ["1"], 3), "the prompt is ['1']"),
    (Request("x", b"ab", 3), "the prompt is b'ab'"),
    (Request("x", [1, 99], 3), "outside 0..63"),
    (Request("x", [1], 3, domain="poetry"), "math, qa"),
    (Request("x", "a\ud800", 3), "not valid text"),
    (Request("ok", [1], 3), "earlier request"),
  ],
)
def test_a_request_at_fault_fails_alone(model, request_, words):
  good = Request("ok", [1, 2, 3], 3, domain="math")
  done = list(make_engine(model).generate([good, request_, dataclasses.replace(good, id="ok2")]))
  errors = [c for c in done if c.error]
  assert [c.id for c in errors] == [request_.id]
  assert words in errors[0].error
  assert errors[0].metrics is None
  fine = [c for c in done if not c.error]
  assert {c.id for c in fine} == {"ok", "ok2"}
  assert fine[0].token_ids == fine[1].token_ids


def test_a_tokenizer_of_another_model_is_told_apart_from_wrong_ids(model):
  tokenizer = letters()
  tokenizer.add_tokens([f"<{i}>" for i in range(9)])  # past the model's vocabulary
  engine = make_engine(model)
  engine.tokenizer = tokenizer
  prompts = ["ab", "ab<8>", Request("ids", tokenizer.encode("ab").ids, 64 - 2)]
  done = {c.id: c for c in engine.generate(prompts, max_new_tokens=2)}
  assert "tokenizer gives token ids outside 0..63, it is not the model's" in done["1"].error
  assert done["0"].error is None
  assert done["0"].token_ids == done["ids"].token_ids[:2]


def test_bare_prompts_are_text_or_token_ids(model):
  prompts = [None, [1, 2], (1, 2), np.array([1, 2]), 5, "bc"]
  done = {c.id: c for c in make_engine(model).generate(prompts, max_new_tokens=np.int64(3))}
  assert len(done) == len(prompts)
  assert {i for i, c in done.items() if c.error} == {"0", "4"}
  assert len({c.token_ids for c in done.values() if not c.error}) == 1
  assert len(done["1"].token_ids) == 3


def test_stop_texts_end_a_completion_and_are_left_out(model):
  engine = make_engine(model)
  (whole,) = engine.generate([Request("a", "hello", 12)])
  assert len(whole.text) > 8  # some ids have no letter
  stop = whole.text[4:6]
  pieces = []
  (cut,) = make_engine(model).generate(
    [Request("a", "hello", 12, stop=(stop,))], on_token=lambda _, piece: pieces.append(piece)
  )
  assert cut.finish_reason == "stop"
  assert cut.text == whole.text[: whole.text.index(stop)]
  assert "".join(pieces) == cut.text


def test_an_end_token_ends_a_completion(model):
  (whole,) = make_engine(model).generate([Request("a", [1, 2, 3], 12)])
  end = whole.token_ids[5]
  spec = dataclasses.replace(SPEC, eos_token_ids=(end,))
  (cut,) = make_engine(model._replace(spec=spec)).generate([Request("a", [1, 2, 3], 12)])
  assert cut.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
  assert cut.finish_reason == "stop"


def test_the_callers_time_is_not_the_requests(model):
  engine = make_engine(model)
  engine.warm_up()
  requests = [Request(str(i), [1, 2, 3], 2 + 4 * i) for i in range(4)]
  for completion in engine.generate(requests):
    assert completion.metrics.e2el_ms < 1000
    assert completion.metrics.ttft_ms <= completion.metrics.e2el_ms
    time.sleep(1)


def test_score_equals_prefill_of_other_chunk_lengths(model):
  tokens = np.array(tiny.random_prompts(SPEC, [20, 20]))
  scores = make_engine(model).score(tokens)
  assert scores.shape == (2, 20, SPEC.vocab_size)
  assert scores.dtype == np.float32
  other = make_engine(model, spec=dataclasses.replace(ENGINE, prefill_buckets=(32,))).score(tokens)
  np.testing.assert_allclose(scores, other, atol=1e-4)


@pytest.mark.parametrize(
  ("tokens", "words"),
  [
    (np.zeros(3, int), "batch, length"),
    (np.zeros((1, 2)), "batch, length"),
    (np.full((1, 2), 64), "0..63"),
    (np.zeros((1, 65), int), "context is 64"),
  ],
)
def test_score_refuses_what_is_no_matrix_of_tokens(model, tokens, words):
  with pytest.raises(ValueError, match=words):
    make_engine(model).score(tokens)


def test_reset_between_requests_makes_each_start_cold(model):
  engine = make_engine(model, reset_between_requests=True)
  first, second = (next(engine.generate([Request("a", [5, 6, 7], 8)])) for _ in range(2))
  assert first.metrics.hit_rate == second.metrics.hit_rate


def test_counters_outlive_their_int32_on_the_device(model):
  engine = make_engine(model)
  list(engine.generate([Request("a", [1, 2, 3], 5)]))
  once = engine.counters()
  assert int(engine.state.counters.sum()) == 0
  again = engine.counters()
  for name in once:
    np.testing.assert_array_equal(once[name], again[name])
  assert once["prefill_invocations"].tolist() == [6, 6]
  assert once["decode_invocations"].tolist() == [8, 8]


def test_memory_report_counts_every_array_in_its_memory(model):
  engine = make_engine(model)
  report = engine.memory_report()
  expert = sum(array[0].nbytes for array in engine.banks[0].values())
  assert report["host"] == {"expert_bank": 16 * expert}
  assert report["device"]["expert_slots"] == (2 * 3 + 1) * expert
  arrays = jax.tree.leaves((engine.params, engine.state))
  assert sum(report["device"].values()) == sum(array.nbytes for array in arrays)
  assert {a.sharding.memory_kind for a in jax.tree.leaves(engine.banks)} == {"pinned_host"}
  assert {a.sharding.memory_kind for a in arrays} == {"device"}


def test_text_stream_holds_back_what_may_become_a_stop_text():
  tokenizer = letters()
  stream, sent = TextStream(tokenizer, ("stop",)), ""
  for read, letter in enumerate("a stone stop", start=1):
    assert not stream.stopped
    sent += stream.add(tokenizer.token_to_id(letter))
    assert "a stone ".startswith(sent)
    assert len(sent) >= min(read - 3, 8)
  assert stream.stopped
  assert stream.text == sent == "a stone "


@pytest.mark.parametrize(("slots", "warned"), [(1, True), (2, False)])
def test_fewer_slots_than_experts_a_token_are_warned_of(model, slots, warned, caplog):
  with caplog.at_level("WARNING"):
    make_engine(model, slots=slots)
  assert ("2 of 2 MoE layers have fewer slots" in caplog.text) == warned
  assert ("layer 1: 1 of 2" in caplog.text) == warned
