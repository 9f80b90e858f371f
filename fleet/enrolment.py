"""Enrolment tokens: how a PC joins a fleet without anybody comparing digits.

A token carries the controller's public key, so the agent pins it, and a secret that lets the agent prove to the
controller that it was given the token. The proof goes through a CURVE session in which both keys were proved
already; it covers both keys and the controller's nonce, so it is good for this pair and this session only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from zmq.utils import z85

from fleet.control_messages import Hex
from fleet.data_dir import create_data_dir, locked, read_file, write_private
from fleet.errors import DataFolderError, EnrolmentError
from fleet.identity import Identity
from fleet.node import PublicKey

TOKENS_FILE = "enrolment-tokens.json"
TOKEN_PREFIX = "paceline-1-"
NONCE_BYTES = 32
_PROOF_LABEL = "paceline enrolment v1"
_ID_BYTES = 8
_SECRET_BYTES = 16
_EXPIRY_BYTES = 6
_CHECKSUM_BYTES = 4
_PAYLOAD_BYTES = 32 + _ID_BYTES + _SECRET_BYTES + _EXPIRY_BYTES
_KEPT_AFTER_EXPIRY_S = 7 * 24 * 3600
"""An expired token is remembered this long, so that its holder reads "expired" and not "unknown"."""


@dataclass(frozen=True)
class Token:
    """What the text of a token says. ``expires_at_s`` is Unix time, by the controller's clock."""

    controller_key: str
    token_id: str
    secret: bytes = field(repr=False)
    expires_at_s: int


def format_token(token: Token) -> str:
    """The text: a prefix with the version, then base32 in lower case, which survives mail, chat and being read out."""
    payload = (
        z85.decode(token.controller_key)
        + bytes.fromhex(token.token_id)
        + token.secret
        + token.expires_at_s.to_bytes(_EXPIRY_BYTES, "big")
    )
    return TOKEN_PREFIX + _base32(payload + _checksum(payload))


def parse_token(text: str) -> Token:
    """The token that a person pasted or typed; spaces, line breaks and case do not matter.

    The expiry is not checked: the controller does that by its own clock, which this PC's may differ from.

    Raises:
        EnrolmentError: this is no token, is one of another version, or has a typing mistake.
    """
    compact = re.sub(r"\s", "", text).lower()
    if not compact.startswith(TOKEN_PREFIX):
        if re.match(r"paceline-\d{1,9}-", compact):
            raise EnrolmentError("This enrolment token was made by another version of Paceline; update this PC.")
        raise EnrolmentError(f"This is not an enrolment token: it must begin with {TOKEN_PREFIX}.")
    body = compact.removeprefix(TOKEN_PREFIX).upper()
    try:
        content = base64.b32decode(body + "=" * (-len(body) % 8))
    except (binascii.Error, ValueError):
        content = b""
    if _base32(content) != body.lower():
        content = b""  # the spare bits of the last character are not zero
    payload, checksum = content[:_PAYLOAD_BYTES], content[_PAYLOAD_BYTES:]
    if len(payload) != _PAYLOAD_BYTES or not hmac.compare_digest(checksum, _checksum(payload)):
        raise EnrolmentError("The enrolment token has a typing mistake or is not complete; copy it again.")
    key, rest = payload[:32], payload[32:]
    return Token(
        controller_key=z85.encode(key).decode("ascii"),
        token_id=rest[:_ID_BYTES].hex(),
        secret=rest[_ID_BYTES : _ID_BYTES + _SECRET_BYTES],
        expires_at_s=int.from_bytes(rest[_ID_BYTES + _SECRET_BYTES :], "big"),
    )


def new_nonce() -> str:
    """A controller's nonce for one Hello: 64 hex digits."""
    return secrets.token_hex(NONCE_BYTES)


def proof(secret: bytes, agent_key: str, controller_key: str, nonce: str) -> str:
    """HMAC-SHA256 in hex of label, agent's key, controller's key and nonce, joined by ``|``, which no part contains."""
    transcript = "|".join((_PROOF_LABEL, agent_key, controller_key, nonce)).encode()
    return hmac.new(secret, transcript, hashlib.sha256).hexdigest()


class _IssuedToken(msgspec.Struct, forbid_unknown_fields=True):
    secret: Hex
    expires_at_s: Annotated[int, msgspec.Meta(ge=0)]
    uses: Annotated[int, msgspec.Meta(ge=1)]
    used_by: list[PublicKey] = []


class TokenStore:
    """The tokens that a controller gave out, kept in its data folder and shared by all its processes."""

    def __init__(self, data_dir: Path, wall_clock: Callable[[], float] = time.time) -> None:
        self._path = create_data_dir(data_dir) / TOKENS_FILE
        self._wall_clock = wall_clock

    def create(self, identity: Identity, uses: int, expires_s: float) -> str:
        """The text of a new token for ``uses`` PCs that is good for ``expires_s`` seconds.

        Raises:
            EnrolmentError: ``uses`` or ``expires_s`` is not positive, or too large.
        """
        if uses < 1 or not 0 < expires_s < 2**32:
            raise EnrolmentError("An enrolment token needs at least one use and a time to expire in the future.")
        token = Token(
            controller_key=identity.public_key,
            token_id=secrets.token_hex(_ID_BYTES),
            secret=secrets.token_bytes(_SECRET_BYTES),
            expires_at_s=int(self._wall_clock() + expires_s),
        )
        with locked(self._path):
            tokens = self._read()
            tokens[token.token_id] = _IssuedToken(token.secret.hex(), token.expires_at_s, uses)
            self._write(tokens)
        return format_token(token)

    def accept(self, token_id: str, token_proof: str, agent_key: str, controller_key: str, nonce: str) -> None:
        """Checks a proof and takes one use of the token; an agent that proves again takes no second one.

        Args:
            agent_key: the key that the agent proved in the CURVE session, never one that it merely names.
            nonce: what this controller sent in this session's Hello.

        Raises:
            EnrolmentError: unknown, expired or used-up token, or a wrong proof.
        """
        with locked(self._path):
            tokens = self._read()
            token = tokens.get(token_id)
            if token is None:
                raise EnrolmentError(
                    "The enrolment token is not known here; make a new one with 'paceline fleet token'."
                )
            expected = proof(bytes.fromhex(token.secret), agent_key, controller_key, nonce)
            if not hmac.compare_digest(expected, token_proof):
                raise EnrolmentError("The PC does not prove that it holds the enrolment token; give it a new one.")
            if agent_key in token.used_by:
                return
            if token.expires_at_s <= self._wall_clock():
                raise EnrolmentError("The enrolment token has expired; make a new one with 'paceline fleet token'.")
            if len(token.used_by) >= token.uses:
                raise EnrolmentError(
                    f"The enrolment token was good for {token.uses} PCs and is used up; make a new one with "
                    "'paceline fleet token'."
                )
            token.used_by.append(agent_key)
            self._write(tokens)

    def _read(self) -> dict[str, _IssuedToken]:
        content = read_file(self._path)
        if content is None:
            return {}
        try:
            return msgspec.json.decode(content, type=dict[str, _IssuedToken])
        except msgspec.MsgspecError:
            raise DataFolderError(
                f"{self._path} is damaged; delete it and make new enrolment tokens with 'paceline fleet token'."
            ) from None

    def _write(self, tokens: dict[str, _IssuedToken]) -> None:
        oldest_s = self._wall_clock() - _KEPT_AFTER_EXPIRY_S
        kept = {token_id: token for token_id, token in tokens.items() if token.expires_at_s > oldest_s}
        write_private(self._path, msgspec.json.format(msgspec.json.encode(kept)))


def create_token(data_dir: Path, identity: Identity, uses: int, expires_s: float) -> str:
    """A new enrolment token of the controller whose data folder and identity these are; see ``TokenStore.create``."""
    return TokenStore(data_dir).create(identity, uses, expires_s)


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()[:_CHECKSUM_BYTES]


def _base32(content: bytes) -> str:
    return base64.b32encode(content).decode("ascii").rstrip("=").lower()
