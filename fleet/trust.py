"""Whom this PC trusts: as a controller, the nodes that joined; as an agent, the controllers that may command it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fleet.control_messages import Hex
from fleet.data_dir import create_data_dir, locked, read_file, write_private
from fleet.enrolment import Token, proof
from fleet.errors import DataFolderError
from fleet.node import PublicKey, Text

TRUST_FILE = "trust.json"


class TrustedNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that joined this controller's fleet."""

    public_key: PublicKey
    name: Text


class TrustedController(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A controller that may command this agent. The token fields hold what it enrolled with, to prove it when asked."""

    public_key: PublicKey
    name: Text = ""
    token_id: Hex = ""
    token_secret: Hex = ""

    def prove(self, agent_key: str, nonce: str) -> str:
        """The enrolment proof for a Welcome; empty where no token was used."""
        if not self.token_secret:
            return ""
        return proof(bytes.fromhex(self.token_secret), agent_key, self.public_key, nonce)


class _Trust(msgspec.Struct, forbid_unknown_fields=True):
    nodes: dict[PublicKey, TrustedNode] = {}
    controllers: dict[PublicKey, TrustedController] = {}


class TrustStore:
    """Kept in the data folder and shared by all processes that use it; every call reads or replaces the file.

    Every method raises DataFolderError where the file is damaged or cannot be read or written: a PC that does not
    know whom it trusts trusts nobody.
    """

    def __init__(self, data_dir: Path) -> None:
        self._path = create_data_dir(data_dir) / TRUST_FILE

    def nodes(self) -> dict[str, TrustedNode]:
        """The trusted nodes by public key."""
        with locked(self._path):
            return dict(self._read().nodes)

    def trust_node(self, public_key: str, name: str) -> None:
        """Adds a node, or gives one that is there a new name."""
        with self._change() as trust:
            trust.nodes[public_key] = TrustedNode(public_key, name)

    def forget_node(self, public_key: str) -> None:
        with self._change() as trust:
            trust.nodes.pop(public_key, None)

    def controllers(self) -> dict[str, TrustedController]:
        """The trusted controllers by public key; an agent's allow-list has exactly these keys."""
        with locked(self._path):
            return dict(self._read().controllers)

    def trust_controller(self, public_key: str, name: str = "", token: Token | None = None) -> None:
        """Adds a controller; without a token, what is known of the one that it enrolled with before is kept."""
        with self._change() as trust:
            known = trust.controllers.get(public_key)
            trust.controllers[public_key] = TrustedController(
                public_key,
                name or (known.name if known else ""),
                token.token_id if token else known.token_id if known else "",
                token.secret.hex() if token else known.token_secret if known else "",
            )

    def forget_controller(self, public_key: str) -> None:
        with self._change() as trust:
            trust.controllers.pop(public_key, None)

    @contextmanager
    def _change(self) -> Iterator[_Trust]:
        with locked(self._path):
            trust = self._read()
            yield trust
            write_private(self._path, msgspec.json.format(msgspec.json.encode(trust)))

    def _read(self) -> _Trust:
        content = read_file(self._path)
        if content is None:
            return _Trust()
        try:
            return msgspec.json.decode(content, type=_Trust)
        except msgspec.MsgspecError:
            raise DataFolderError(
                f"{self._path} is damaged; put back a copy of it, or delete it and enrol the PCs again."
            ) from None
