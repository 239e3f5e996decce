"""Waiting for jobs and futures on the event loop, also when the waiter is cancelled."""

from __future__ import annotations

import asyncio

from kvdock_server.transfer.devices.lane import Job


async def until_settled(job: Job) -> None:
    """Wait for a job. TransferFailedError if it failed.

    A waiter that is cancelled cancels the job, and still waits for it: until it has settled, its
    memory is in use.
    """
    settled = asyncio.wrap_future(job.settled)
    try:
        await asyncio.shield(settled)
    except asyncio.CancelledError:
        job.cancel()
        try:
            await until_done(settled)
        finally:
            settled.exception()  # marks it as seen: it only says that the job was cancelled
        raise


async def until_done(future: asyncio.Future[None]) -> None:
    """Wait for a future. A waiter that is cancelled is told so only when the future is done."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    if cancelled is not None:
        raise cancelled
