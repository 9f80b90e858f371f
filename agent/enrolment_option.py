"""How an agent is given its enrolment token: every user of a PC can read the arguments of its processes."""

from __future__ import annotations

import sys

FROM_INPUT = "-"


def given_token(option: str | None) -> str | None:
    """The token that ``--enrol`` names: itself, or for ``-`` the first line of standard input."""
    return sys.stdin.readline().strip() if option == FROM_INPUT else option
