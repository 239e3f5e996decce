"""Where vLLM's requests say something for themselves, and how they are answered.

A client says it in ``kv_transfer_params``, under the key "kvdock". An orchestrator may say it in
vLLM's own ``kv_hints`` (from vLLM 0.32 on), as an action of the type "kvdock". Where both say
something about the same, the client's word counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvdock_vllm.engine.say import NOTHING_SAID, Say

if TYPE_CHECKING:
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

KEY = "kvdock"
"""In kv_transfer_params, the type of an action of kv_hints, and in the answer."""
_ACTION_VERSION = "1"


class Says:
    """Reads what requests say. Warns once of each kind of fault."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def of(self, request: Request) -> Say:
        """What the request says. Never raises."""
        say = NOTHING_SAID
        hints: Any = getattr(request, "kv_hints", None)
        for action in getattr(hints, "actions", None) or ():
            if getattr(action, "action_type", None) == KEY:
                say = self._with_action(say, action)
        asked = request.kv_transfer_params
        if isinstance(asked, Mapping) and asked.get(KEY) is not None:
            say = say.with_words(asked[KEY])
        for fault in say.faults:
            if fault.kind not in self._warned:
                self._warned.add(fault.kind)
                _log.warning(
                    "request %s: what it says for KVDock is left out: %s (more of the kind is not "
                    "logged; the response's kv_transfer_params tell each request)",
                    request.request_id,
                    fault.message,
                )
        return say

    def _with_action(self, say: Say, action: Any) -> Say:
        version = str(getattr(action, "action_version", ""))
        if version.partition(".")[0] != _ACTION_VERSION:
            return say.with_words(f"action_version {version}")
        return say.with_words(getattr(action, "payload", None))


def answer(say: Say) -> dict[str, Any]:
    """For the response's kv_transfer_params: what was left out, and why."""
    if not say.faults:
        return {}
    return {KEY: {"ignored": [fault.message for fault in say.faults]}}
