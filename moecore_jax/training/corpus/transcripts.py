"""Domain `agent`: a user's request, a tool call, the tool's result, and a closing call of `reply`.

Every assistant turn is one line of JSON, {"tool": ..., "args": {...}}. The tools are those of
`TOOLS`: `light` (room, level 5..95 in fives), `timer` (minutes 2..90, label), `weather` (station,
day), `event` (title, day, hour 8..19), `order` (item, count 2..30) and `route` (start, goal). What
`weather` and `route` return is drawn freely, so the reply has to read it. Split: by the tool and
the arguments of its call; a held-out request shares its words with training, never all of them.
"""

import json
import random
from typing import Any

from moecore_jax.training.corpus.document import Document, Part

ROOMS = ("attic", "bedroom", "cellar", "garage", "hall", "kitchen", "office", "porch")
LABELS = ("bread", "laundry", "noodles", "nap", "pizza", "stretching", "tea", "yoga")
STATIONS = ("airport", "beach", "castle", "harbor", "lake", "market", "museum", "summit")
SKIES = ("clear", "cloudy", "foggy", "rainy", "snowy", "stormy")
TITLES = ("budget review", "chess club", "dentist", "interview", "piano lesson", "team lunch")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
GOODS = ("batteries", "candles", "envelopes", "filters", "notebooks", "screws", "towels")

_Turn = tuple[str, dict[str, Any], dict[str, Any], str]  # request, arguments, result, reply


def transcript(rng: random.Random) -> Document:
  """Request, call, result, reply; its key is the tool with its arguments."""
  tool = rng.choice(sorted(TOOLS))
  request, args, result, reply = TOOLS[tool](rng)
  parts = (
    Part(f"user: {request}\nassistant:\n", False),
    Part(_call(tool, args), True),
    Part(f"tool: {_json(result)}\nassistant:\n", False),
    Part(_call("reply", {"text": reply}), True),
  )
  return Document("agent", parts, key=(tool, *args.values()))


def _call(tool: str, args: dict[str, Any]) -> str:
  return _json({"tool": tool, "args": args}) + "\n"


def _json(value: dict[str, Any]) -> str:
  return json.dumps(value, separators=(",", ":"))


def _light(rng: random.Random) -> _Turn:
  room, level = rng.choice(ROOMS), rng.randrange(5, 100, 5)
  request = rng.choice(
    (f"Set the {room} light to {level} percent.", f"Please dim the {room} to {level} percent.")
  )
  reply = f"The {room} light is at {level} percent."
  return request, {"room": room, "level": level}, {"ok": True}, reply


def _timer(rng: random.Random) -> _Turn:
  minutes, label = rng.randint(2, 90), rng.choice(LABELS)
  request = rng.choice(
    (f"Start a {minutes} minute timer for {label}.", f"Time my {label}: {minutes} minutes.")
  )
  reply = f"Your {label} timer rings in {minutes} minutes."
  return request, {"minutes": minutes, "label": label}, {"ok": True}, reply


def _weather(rng: random.Random) -> _Turn:
  station, day = rng.choice(STATIONS), rng.choice(DAYS)
  sky, degrees = rng.choice(SKIES), rng.randint(1, 35)
  request = rng.choice(
    (f"How is the weather at the {station} on {day}?", f"{day} forecast for the {station}, please.")
  )
  reply = f"On {day} the {station} is {sky}, {degrees} degrees."
  return request, {"station": station, "day": day}, {"sky": sky, "degrees": degrees}, reply


def _event(rng: random.Random) -> _Turn:
  title, day, hour = rng.choice(TITLES), rng.choice(DAYS), rng.randint(8, 19)
  request = rng.choice(
    (f"Put {title} on {day} at {hour}.", f"Schedule {title} for {day}, {hour} o'clock.")
  )
  reply = f"Added {title} on {day} at {hour}."
  return request, {"title": title, "day": day, "hour": hour}, {"ok": True}, reply


def _order(rng: random.Random) -> _Turn:
  item, count = rng.choice(GOODS), rng.randint(2, 30)
  request = rng.choice((f"Order {count} {item}.", f"We need {count} more {item}."))
  return request, {"item": item, "count": count}, {"ok": True}, f"Ordered {count} {item}."


def _route(rng: random.Random) -> _Turn:
  start, goal = rng.sample(STATIONS, 2)
  minutes = rng.randint(3, 80)
  request = rng.choice(
    (f"Guide me from the {start} to the {goal}.", f"How far from the {start} to the {goal}?")
  )
  reply = f"From the {start} to the {goal} it takes {minutes} minutes."
  return request, {"start": start, "goal": goal}, {"minutes": minutes}, reply


TOOLS = {
  "light": _light,
  "timer": _timer,
  "weather": _weather,
  "event": _event,
  "order": _order,
  "route": _route,
}
"""Each tool draws a request, the arguments of its call, its result and the reply."""
