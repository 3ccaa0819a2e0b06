"""Errors that every part shares."""

from __future__ import annotations


class UserMistakeError(Exception):
    """The user can mend it: shown as one line without a traceback, exit code 2.

    The message names the file or field, what was found, what is allowed, and the remedy.
    """
