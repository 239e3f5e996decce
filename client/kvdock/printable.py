"""Text from others, made safe for terminals and logs.

Names of engines, namespaces, labels and adapters come from whoever uses the server, and messages
from servers. Their characters could move the cursor, turn the reading direction, or begin a line
that looks like one of ours. So such text is printed through :func:`printable` and logged through
:class:`PrintableLog`.
"""

from __future__ import annotations

import logging

_FORMATTER = logging.Formatter()


def printable(text: str, most: int | None = None) -> str:
    r"""The text with an escape (``\n``, ``\x1b``) for every character that is not printable.

    Not printable are control and formatting characters (also those of the reading direction),
    blanks other than the space, and unassigned code points. The result has at most ``most``
    characters; what was longer ends with an ellipsis.
    """
    if not text.isprintable():
        text = "".join(map(_escaped, text if most is None else text[: most + 1]))
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class PrintableLog(logging.Handler):
    """Makes one printable line of each message, and indents the lines of its traceback.

    This handler writes nothing. It changes the record for the handlers after it: those added to the
    same logger later, and those of the logger's parents.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            record.msg, record.args = printable(record.getMessage()), None
            if record.exc_info and not record.exc_text:
                lines = _FORMATTER.formatException(record.exc_info).splitlines()
                record.exc_text = "\n".join(f"  {printable(line)}" for line in lines)
        except Exception:
            # Every handler does so with a message whose arguments do not fit it.
            self.handleError(record)
