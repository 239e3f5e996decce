"""Runs one engine of bench/multiturn.py, and writes what it did as JSON.

python bench/multiturn_child.py PLAN.json RESULT.json
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conversations import Check, Request, Run, Work
from modelkit import random_prompt
from pinkit import WorkerPinning, wait_until_pinned
from stepped_engine import Setup, SteppedEngine

CHECKS = 2
NAME_WIDTH = len("t00u000")


@dataclass(frozen=True)
class Plan:
    """One engine."""

    kv_transfer_config: dict[str, Any] | None
    work: Work
    on_cpu: bool
    pinned_by: str
    """Who pins the pool: "worker", "nobody", or the address of KVDock's server."""


@dataclass
class Load:
    """The conversations, as they go on."""

    engine: SteppedEngine
    work: Work
    run: Run
    began: float = 0.0
    _history: dict[int, list[int]] = field(default_factory=dict)
    _live: dict[str, Request] = field(default_factory=dict)
    _latest: dict[str, tuple[int, float]] = field(default_factory=dict)

    def carry_out(self) -> None:
        """All turns of all users."""
        self._follow()
        waiting = self.work.order()[::-1]
        open_turns = [0] * self.work.users
        self.began = time.perf_counter()
        while waiting or self._live:
            while waiting and len(self._live) < self.work.in_flight:
                turn, user = waiting[-1]
                if open_turns[user] < turn:
                    break
                waiting.pop()
                self._ask(turn, user)
            outputs = self.engine.step()
            now = self._now()
            for output in outputs:
                request = self._live.get(output.request_id)
                if request is not None and self._take(request, output, now):
                    open_turns[request.user] += 1
        self.run.total_seconds = self._now()

    def _ask(self, turn: int, user: int) -> None:
        vocab = self.engine.shape.vocab
        if turn:
            self._history[user] += self.work.addition(user, turn, vocab)
        else:
            self._history[user] = self.work.opening(user, vocab)
        prompt = self._history[user]
        name = f"t{turn:02}u{user:03}"
        self._live[name] = Request(turn, user, len(prompt), self._now())
        self.engine.add(name, list(prompt), self.work.answer_tokens)

    def _take(self, request: Request, output: Any, now: float) -> bool:
        """Notes what a step brought for a request; whether the request is finished."""
        name, answer = output.request_id, output.outputs[0].token_ids
        count, since = self._latest.get(name, (0, 0.0))
        if len(answer) > count:
            if count:
                self.run.gaps.append((now - since) / (len(answer) - count))
            else:
                request.first_token = now
            self._latest[name] = (len(answer), now)
        if not output.finished:
            return False
        request.finished = now
        request.cached_tokens = output.num_cached_tokens or 0
        request.answer = list(answer)
        self._history[request.user] += request.answer
        self.run.requests.append(request)
        del self._live[name], self._latest[name]
        return True

    def _now(self) -> float:
        return time.perf_counter() - self.began

    def _follow(self) -> None:
        """Has the scheduler and its connector tell when they come to a request."""
        scheduler, connector = self.engine.scheduler, self.engine.connector
        schedule = scheduler.schedule

        def scheduled(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            for new in output.scheduled_new_reqs:
                request = self._request(new.req_id)
                if request is not None and request.scheduled is None:
                    request.scheduled = self._now()
            return output

        scheduler.schedule = scheduled
        if connector is not None:
            self._follow_connector(connector)

    def _follow_connector(self, connector: Any) -> None:
        match, allocate = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        update = connector.update_connector_output

        def matched(vllm_request: Any, num_computed_tokens: int) -> Any:
            request = self._request(vllm_request.request_id)
            if request is not None and request.lookup is None:
                request.lookup = self._now()
            answer = match(vllm_request, num_computed_tokens)
            if request is not None and request.answered is None:
                request.lookups += 1
                if answer[0] is not None:
                    request.answered = self._now()
            if request is not None and answer[0] is not None and request.allocated is None:
                request.local_tokens, request.promised_tokens = num_computed_tokens, answer[0]
            return answer

        def allocated(vllm_request: Any, *arguments: Any, **options: Any) -> Any:
            request = self._request(vllm_request.request_id)
            if request is not None and request.allocated is None:
                request.allocated = self._now()
            return allocate(vllm_request, *arguments, **options)

        def update_and_note(output: Any) -> Any:
            updated = update(output)  # KVDock adds loads whose end it knows before its worker told
            for name in output.finished_recving or ():
                request = self._request(name)
                if request is not None:
                    request.loaded = self._now()
            return updated

        connector.get_num_new_matched_tokens = matched
        connector.update_state_after_alloc = allocated
        connector.update_connector_output = update_and_note

    def _request(self, internal_name: str) -> Request | None:
        """vLLM appends something of its own to the names of requests."""
        return self._live.get(internal_name[:NAME_WIDTH])


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    plan = Plan(**{**found, "work": Work(**found["work"])})
    work, target = plan.work, Path(sys.argv[2])
    pinning = WorkerPinning()
    began = time.perf_counter()
    setup = Setup(
        plan.kv_transfer_config,
        work.cache_tokens,
        work.in_flight,
        work.step_tokens,
        plan.on_cpu,
    )
    engine = SteppedEngine(setup, target.parent / "model")
    start_seconds = time.perf_counter() - began

    def prompt(tokens: int, seed: int) -> list[int]:
        return random_prompt(tokens, seed=seed, vocab=engine.shape.vocab)

    checked = [prompt(work.checked_tokens, 500 + number) for number in range(CHECKS)]
    before = []
    for question in checked:
        engine.ask(question)
        before.append(engine.ask(question).tokens)
    for number in range(work.fillers):
        engine.ask(prompt(work.filler_tokens, 600 + number))
    # The first loads, which set up what is set up only once.
    for question in checked:
        engine.ask(question)
    warm_up_seconds = time.perf_counter() - began - start_seconds
    pinned = wait_until_pinned(plan.pinned_by, pinning)
    run = Run(start_seconds, warm_up_seconds, pinned, engine.runner)
    print(f"engine up in {start_seconds:.1f} s, {pinned}", flush=True)
    Load(engine, work, run).carry_out()
    ended = time.perf_counter()
    engine.settle()
    run.settle_seconds = time.perf_counter() - ended
    for question, answer in zip(checked, before, strict=True):
        sample = engine.ask(question)
        run.checks.append(Check(answer, sample.tokens, sample.cached_tokens))
    target.write_text(json.dumps(asdict(run)))
    engine.close()


if __name__ == "__main__":
    main()
