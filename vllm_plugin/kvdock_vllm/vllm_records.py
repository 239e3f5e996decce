"""The records of the requests that vLLM has not finished."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvdock_vllm.engine.records import ExtraTokens, Record
from kvdock_vllm.says import Says

if TYPE_CHECKING:
    from vllm.v1.request import Request

_SAMPLE_NUMBER = re.compile(r"\A[0-9]+_")


class Records(dict[str, Record]):
    """Records by request_id."""

    def __init__(self, num_groups: int) -> None:
        super().__init__()
        self._num_groups = num_groups
        self._says = Says()
        # vLLM makes a request of each sample of a prompt (``n`` > 1). Its response carries only the
        # kv_transfer_params of the sample that ended last. So the samples share one ExtraTokens,
        # which lives as long as their records.
        self._extras: WeakValueDictionary[str, ExtraTokens] = WeakValueDictionary()

    def of(self, request: Request) -> Record:
        """The request's record, and makes one if there is none."""
        record = self.get(request.request_id)
        if record is None:
            tables: list[list[int]] = [[] for _ in range(self._num_groups)]
            extra = self._extras.setdefault(_prompt_id(request.request_id), ExtraTokens())
            record = self[request.request_id] = Record(request, extra, tables)
            record.say = self._says.of(request)
        return record


def _prompt_id(request_id: str) -> str:
    """The part of a request_id that all samples of a prompt share. vLLM puts the number of the
    sample before it (``ParentRequest.get_child_info``).
    """
    return _SAMPLE_NUMBER.sub("", request_id)
