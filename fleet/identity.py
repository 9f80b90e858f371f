"""Who a node is: a CURVE key pair, kept in the data folder. The node's id is a hash of the public key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from fleet.data_dir import create_data_dir, locked, read_file, write_private
from fleet.errors import DataFolderError
from fleet.node import NodeId

IDENTITY_FILE = "identity.key"
Z85_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
"""https://rfc.zeromq.org/spec/32/"""
_Z85_DIGITS = {character: digit for digit, character in enumerate(Z85_ALPHABET)}


def is_public_key(text: str) -> bool:
    """Whether this is 32 bytes in Z85 form, as libzmq takes them for a CURVE key.

    Five characters stand for four bytes, so there are groups of five that stand for none.
    """
    if len(text) != 40 or not _Z85_DIGITS.keys() >= set(text):
        return False
    return all(_z85_value(text[start : start + 5]) < 2**32 for start in range(0, 40, 5))


def _z85_value(group: str) -> int:
    value = 0
    for character in group:
        value = value * 85 + _Z85_DIGITS[character]
    return value


def node_id_of(public_key: str) -> NodeId:
    """The first 16 hex digits of the SHA-256 of the key's Z85 text."""
    return NodeId(hashlib.sha256(public_key.encode("ascii")).hexdigest()[:16])


@dataclass(frozen=True)
class Identity:
    """A CURVE key pair, both keys as Z85 text of 40 characters. The secret key never shows in ``repr``."""

    public_key: str
    secret_key: str = field(repr=False)

    @property
    def node_id(self) -> NodeId:
        return node_id_of(self.public_key)

    @classmethod
    def generate(cls) -> Identity:
        """A new key pair."""
        public_key, secret_key = zmq.curve_keypair()
        return cls(public_key.decode("ascii"), secret_key.decode("ascii"))

    @classmethod
    def of_secret_key(cls, secret_key: str) -> Identity:
        """The pair that belongs to a secret key. ValueError where it is not a key."""
        if not is_public_key(secret_key):
            raise ValueError("not a CURVE key")
        return cls(zmq.curve_public(secret_key.encode("ascii")).decode("ascii"), secret_key)


def load_or_create_identity(data_dir: Path) -> Identity:
    """The identity kept in the data folder; the first call makes it, and only one of several callers at once.

    Raises:
        DataFolderError: the file is damaged or cannot be read or written.
    """
    create_data_dir(data_dir)
    path = data_dir / IDENTITY_FILE
    content = read_file(path)
    if content is None:
        with locked(path):
            content = read_file(path)
            if content is None:
                identity = Identity.generate()
                write_private(path, identity.secret_key.encode("ascii") + b"\n")
                return identity
    try:
        return Identity.of_secret_key(content.decode("ascii").strip())
    except ValueError:
        raise DataFolderError(
            f"{path} does not hold a key; put back a copy of it, or delete it to give this PC a new identity, "
            "which must then be enrolled again."
        ) from None
