"""What others named reaches terminals and logs as harmless text."""

from __future__ import annotations

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.printable import PrintableLog, printable


@pytest.mark.parametrize(
    ("named", "shown"),
    [
        ("llama[bf16] é 模型", "llama[bf16] é 模型"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),  # what some terminals take for ESC [
        ("abc\u202efed\u2066", r"abc\u202efed\u2066"),
        ("\u2028\u200b\ufeff", r"\u2028\u200b\ufeff"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_shows_nothing_itself_is_escaped(named: str, shown: str) -> None:
    assert printable(named) == shown


@given(st.text(), st.integers(1, 20))
def test_all_is_printable_and_no_longer_than_allowed(text: str, most: int) -> None:
    assert printable(text).isprintable()
    cut = printable(text, most)
    assert cut.isprintable()
    assert len(cut) <= most
    assert cut == printable(text) or cut == printable(text)[: most - 1] + "…"


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO]:
    logger, written = logging.Logger("test"), io.StringIO()
    writer = logging.StreamHandler(written)
    writer.setFormatter(logging.Formatter("kvdock: %(levelname)s: %(message)s"))
    logger.addHandler(PrintableLog())
    logger.addHandler(writer)
    return logger, written


def test_a_message_is_one_line(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    logger.warning("worker of %s: %s", "e\nkvdock: ERROR: forged", "\x1b[2J")

    assert written.getvalue() == (
        "kvdock: WARNING: worker of e\\nkvdock: ERROR: forged: \\x1b[2J\n"
    )


def test_no_line_of_a_traceback_looks_like_a_message(
    log: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, written = log
    try:
        raise ValueError("e\nkvdock: ERROR: forged\x1b[2J")
    except ValueError:
        logger.exception("it failed")

    first, *rest = written.getvalue().splitlines()
    assert first == "kvdock: ERROR: it failed"
    assert rest[-1] == r"  kvdock: ERROR: forged\x1b[2J"
    assert all(line.startswith("  ") for line in rest)


def test_a_call_whose_arguments_do_not_fit_harms_nobody(
    log: tuple[logging.Logger, io.StringIO], capsys: pytest.CaptureFixture[str]
) -> None:
    logger, _ = log
    logger.warning("%d", "x")

    assert "Logging error" in capsys.readouterr().err
