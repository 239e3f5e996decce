"""The verbs of the asyncio face, made of those of the blocking one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def awaited(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]]:
    """The coroutine method with the name, the arguments, the text and the errors of ``method``.

    ``method`` does no I/O itself. It builds a request, and returns what another method of its
    object (``_call``, for instance) makes of the request. In the blocking face the other method
    waits and returns the result; in this face it is a coroutine function.
    """

    @functools.wraps(method)
    async def verb(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        result: Result = await method(self, *args, **kwargs)  # type: ignore[misc]  # see above
        return result

    return verb
