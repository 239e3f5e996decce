"""What others named, for terminals and logs.

Engines, namespaces, labels and adapters are named by whoever uses the server, and messages are
written by servers. Their characters could move the cursor, turn the reading direction, or begin a
line that looks like one of ours. So all of it is printed through :func:`printable` and logged
through :class:`PrintableLog`.
"""

from __future__ import annotations

import logging

_FORMATTER = logging.Formatter()


def printable(text: str, most: int | None = None) -> str:
    r"""The text with an escape (``\n``, ``\x1b``) for every character that shows nothing itself.

    Those are control and formatting characters (also those of the reading direction), blanks other
    than the space, and what no character is assigned to. The result has at most ``most``
    characters; a longer one ends with an ellipsis.
    """
    if not text.isprintable():
        text = "".join(map(_escaped, text if most is None else text[: most + 1]))
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class PrintableLog(logging.Handler):
    """Makes one printable line of each message, and indents the lines of its traceback.

    It writes nothing itself. It changes the record for the handlers that come after it: those that
    were added to the same logger later, and those of the logger's parents.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Changes the record."""
        try:
            record.msg, record.args = printable(record.getMessage()), None
            if record.exc_info and not record.exc_text:
                lines = _FORMATTER.formatException(record.exc_info).splitlines()
                record.exc_text = "\n".join(f"  {printable(line)}" for line in lines)
        except Exception:
            # As every handler does with a call whose arguments do not fit its text.
            self.handleError(record)
