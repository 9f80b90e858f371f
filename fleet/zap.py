"""Who may connect: an allow-list of CURVE keys and the thread that answers libzmq's questions about them.

libzmq asks the handler bound to ``inproc://zeromq.zap.01`` of a context before it admits a CURVE client
(https://rfc.zeromq.org/spec/27/). Without a handler a server with a ZAP domain *and* ``ZAP_ENFORCE_DOMAIN`` refuses
everybody; ``fleet.sockets`` sets both. This handler admits nothing but CURVE with a key of the allow-list, in the
one domain it was given. pyzmq's own authenticator admits NULL connections and needs an asyncio loop in its thread,
which Windows would make a proactor loop.

A handshake is asked about once: taking a key from the list ends no session that is already there. Receivers
therefore check every message with ``authorised_sender``.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import zmq
from zmq.utils import z85

from fleet.limited_log import LimitedLog

ZAP_DOMAIN = "fleet"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"

_log = logging.getLogger("paceline.zap")


class AllowList:
    """A set of public keys (Z85 text) that any thread may read and replace while sockets use it."""

    def __init__(self, public_keys: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._keys = frozenset(public_keys)

    def __contains__(self, public_key: object) -> bool:
        return public_key in self._keys

    @property
    def keys(self) -> frozenset[str]:
        """The keys at this moment."""
        return self._keys

    def replace(self, public_keys: Iterable[str]) -> None:
        """From now on exactly these keys."""
        self._keys = frozenset(public_keys)

    def add(self, public_key: str) -> None:
        with self._lock:
            self._keys = self._keys | {public_key}

    def discard(self, public_key: str) -> None:
        with self._lock:
            self._keys = self._keys - {public_key}


def sender_key(frame: zmq.Frame) -> str | None:
    """The authenticated public key (Z85) of the peer that sent a frame; None where nobody was authenticated.

    Receive with ``copy=False`` to get frames. A ROUTER's identity frame carries no key: give a later one.
    """
    try:
        user_id = frame.get("User-Id")
    except zmq.ZMQError:
        return None
    return user_id if isinstance(user_id, str) and user_id else None


def authorised_sender(frame: zmq.Frame, allow_list: AllowList) -> str | None:
    """The sender's key if it is on the list *now*, else None: drop the message then."""
    key = sender_key(frame)
    return key if key is not None and key in allow_list else None


class ZapHandler:
    """The thread that answers for one context, one per context. Closing it or terminating the context ends it."""

    def __init__(self, context: zmq.Context[Any], allow_list: AllowList, domain: str = ZAP_DOMAIN) -> None:
        # Sockets of an asyncio context would be asyncio sockets, and Context.destroy() closes sockets from its own
        # thread: a shadow of the same libzmq context has neither trouble.
        self._context = zmq.Context(shadow=context.underlying)
        self._allow_list = allow_list
        self._domain = domain.encode()
        self._closing = False
        # Strangers may knock as often as they like.
        self._limited_log = LimitedLog(_log)
        self._stop_endpoint = f"inproc://paceline-zap-stop-{secrets.token_hex(8)}"
        requests = self._context.socket(zmq.REP)
        requests.linger = 0
        try:
            requests.bind(ZAP_ENDPOINT)
        except zmq.ZMQError:
            requests.close()
            raise
        stop = self._context.socket(zmq.PAIR)
        stop.linger = 0
        stop.bind(self._stop_endpoint)
        self._thread = threading.Thread(target=self._run, args=(requests, stop), name="zap-handler", daemon=True)
        self._thread.start()

    def __enter__(self) -> ZapHandler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread; new clients are refused from then on. Safe to call twice."""
        if self._thread.is_alive() and not self._closing:
            self._closing = True
            # Where the context is gone, the thread has been told so by libzmq.
            with contextlib.suppress(zmq.ZMQError), self._context.socket(zmq.PAIR) as stop:
                stop.connect(self._stop_endpoint)
                stop.send(b"")
        self._thread.join()

    def _run(self, requests: zmq.Socket[bytes], stop: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(requests, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if stop in ready:
                    # A closed socket gives its endpoint back some time later, an unbound one at once: the context may
                    # then have another handler.
                    requests.unbind(ZAP_ENDPOINT)
                    return
                if requests in ready:
                    requests.send_multipart(self.answer(requests.recv_multipart()))
        except zmq.ZMQError as error:
            if error.errno != zmq.ETERM:
                raise
            _log.debug("the context was terminated")
        finally:
            requests.close()
            stop.close()

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The ZAP reply: version, request id, status, text, user id, metadata."""
        request_id = request[1] if len(request) > 1 else b""
        if len(request) != 7 or request[0] != b"1.0":
            return _reply(request_id, b"400", b"malformed request")
        domain, address, mechanism, credential = request[2], request[3], request[5], request[6]
        if mechanism != b"CURVE" or domain != self._domain or len(credential) != 32:
            self._limited_log.warning(
                f"refused a connection from {address.decode(errors='replace')}: not CURVE, or not for this fleet"
            )
            return _reply(request_id, b"400", b"not admitted")
        public_key = z85.encode(credential)
        if public_key.decode("ascii") not in self._allow_list:
            self._limited_log.warning(
                f"refused a connection from {address.decode(errors='replace')}: its key is not trusted"
            )
            return _reply(request_id, b"400", b"key not trusted")
        return _reply(request_id, b"200", b"OK", public_key)


def start_zap(context: zmq.Context[Any], allow_list: AllowList, domain: str = ZAP_DOMAIN) -> ZapHandler:
    """Starts the handler of a context (blocking or asyncio). Call it before the context's servers bind.

    Raises:
        zmq.ZMQError: the context has a handler already.
    """
    return ZapHandler(context, allow_list, domain)


def _reply(request_id: bytes, status: bytes, text: bytes, user_id: bytes = b"") -> list[bytes]:
    return [b"1.0", request_id, status, text, user_id, b""]
