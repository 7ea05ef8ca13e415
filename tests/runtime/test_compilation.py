"""Compiler options are used where the compiler knows them, else left out with a warning."""

import jax
import pytest

from moecore_jax.runtime import compilation

KNOWN, UNKNOWN = ("xla_cpu_enable_fast_min_max", True), ("xla_no_such_option", True)


@pytest.fixture
def set_options(monkeypatch):
  def set_them(*options):
    monkeypatch.setitem(compilation.COMPILER_OPTIONS, jax.default_backend(), options)
    compilation.accepted_options.cache_clear()

  yield set_them
  compilation.accepted_options.cache_clear()


def test_known_options_are_used(set_options):
  set_options(KNOWN)
  assert compilation.accepted_options(jax.default_backend()) == (KNOWN,)


def test_refused_options_are_left_out_with_a_warning(set_options, caplog):
  set_options(KNOWN, UNKNOWN)
  assert compilation.accepted_options(jax.default_backend()) == ()
  assert "xla_no_such_option" in caplog.text


def test_a_platform_without_options_has_none():
  assert compilation.accepted_options("metal") == ()
