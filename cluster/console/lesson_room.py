"""Where lessons are given: an actor that is started when somebody asks, and ended when nobody has for a while.

The answers depend on the arguments alone, so each is worked out once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from kvorum.cluster.console.lesson import Json, Lesson
from kvorum.kvstore.errors import EngineLostError, KvorumError

# Gives a lesson by its name: a method of Lesson, and its arguments.
Teach = Callable[[str, Mapping[str, int]], Awaitable[Json]]

_IDLE_S = 120.0
_LESSON_TIMEOUT_S = 120.0
_MAX_REMEMBERED = 256


class LessonRoom:
    """Gives lessons, one at a time, in an actor of its own."""

    def __init__(self, *, idle_s: float = _IDLE_S) -> None:
        """idle_s: after which the actor, which holds a model, is ended."""
        self._idle_s = idle_s
        self._actor: Any = None
        self._ending: asyncio.TimerHandle | None = None
        self._turn = asyncio.Lock()
        self._remembered: OrderedDict[tuple[object, ...], Json] = OrderedDict()

    async def teach(self, name: str, arguments: Mapping[str, int]) -> Json:
        """Return a lesson.

        Raises:
            InvalidRequestError: there is no such layer, head or budget.
            CheckpointError: the embedded model is not installed.
            EngineLostError: the actor died, or takes too long.
        """
        key = (name, *sorted(arguments.items()))
        async with self._turn:
            if key not in self._remembered:
                self._remembered[key] = await self._ask(name, arguments)
                if len(self._remembered) > _MAX_REMEMBERED:
                    self._remembered.popitem(last=False)
            return self._remembered[key]

    async def _ask(self, name: str, arguments: Mapping[str, int]) -> Json:
        if self._ending:
            self._ending.cancel()
        if self._actor is None:
            self._actor = ray.remote(Lesson).options(num_cpus=0).remote()
        try:
            async with asyncio.timeout(_LESSON_TIMEOUT_S):
                lesson: Json = await getattr(self._actor, name).remote(**arguments)
        except RayTaskError as error:
            if isinstance(error.cause, KvorumError):
                raise error.cause from None
            raise
        except (RayActorError, TimeoutError) as error:
            self.close()
            why = "it takes too long" if isinstance(error, TimeoutError) else str(error)
            raise EngineLostError(f"no lesson can be given: {why}") from error
        finally:
            self._ending = asyncio.get_running_loop().call_later(self._idle_s, self.close)
        return lesson

    def close(self) -> None:
        """End the actor."""
        if self._ending:
            self._ending.cancel()
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = None
