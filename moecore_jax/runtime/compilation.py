"""What a platform's compiler is asked for beyond its defaults, for the decode step."""

import functools

import jax
from absl import logging

CompilerOptions = tuple[tuple[str, bool | float], ...]

COMPILER_OPTIONS: dict[str, CompilerOptions] = {
  # A copy starts as late as its estimated time allows: where the attention alone seems to hide it,
  # when the experts have run. If the link is taken for slow, it starts as early as it can.
  "tpu": (("xla_tpu_pcie_bandwidth_multiplier", 0.01),),
}
"""By platform; see `bench.aot` for what they bring."""


@functools.cache
def accepted_options(platform: str) -> CompilerOptions:
  """Returns the platform's options, none if its compiler, that is of another version, refuses them.

  Args:
    platform: of the device that is attached, such as "tpu".
  """
  options = COMPILER_OPTIONS.get(platform, ())
  if not options:
    return options
  try:
    jax.jit(lambda x: x, compiler_options=dict(options)).lower(0).compile()
  except jax.errors.JaxRuntimeError as error:
    logging.warning(
      "compiler options %s are refused (%s); prefetches overlap less without them",
      ", ".join(name for name, _ in options),
      str(error).splitlines()[0],
    )
    return ()
  return options
