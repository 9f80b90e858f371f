from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.enrolment import (
    TOKEN_PREFIX,
    TOKENS_FILE,
    Token,
    TokenStore,
    create_token,
    format_token,
    new_nonce,
    parse_token,
    proof,
)
from fleet.errors import DataFolderError, EnrolmentError
from fleet.identity import Identity
from fleet.trust import TRUST_FILE, TrustStore

CONTROLLER = Identity.generate()
AGENTS = [Identity.generate() for _ in range(4)]
NONCE = new_nonce()

tokens = st.builds(
    Token,
    controller_key=st.just(CONTROLLER.public_key),
    token_id=st.binary(min_size=8, max_size=8).map(bytes.hex),
    secret=st.binary(min_size=16, max_size=16),
    expires_at_s=st.integers(0, 2**48 - 1),
)


def use(store: TokenStore, token: Token, agent: Identity, nonce: str = NONCE) -> None:
    token_proof = proof(token.secret, agent.public_key, CONTROLLER.public_key, nonce)
    store.accept(token.token_id, token_proof, agent.public_key, CONTROLLER.public_key, nonce)


@given(tokens)
def test_the_text_holds_the_token(token: Token) -> None:
    text = format_token(token)
    assert parse_token(text) == token
    assert parse_token(f" {text[:40]}\n{text[40:].upper()} ") == token


@given(tokens, st.data())
def test_one_wrong_character_is_a_typing_mistake(token: Token, data: st.DataObject) -> None:
    text = format_token(token)
    position = data.draw(st.integers(len(TOKEN_PREFIX), len(text) - 1))
    other = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz234567").filter(lambda new: new != text[position]))
    with pytest.raises(EnrolmentError, match="typing mistake"):
        parse_token(text[:position] + other + text[position + 1 :])


@given(st.text(max_size=150))
def test_no_text_raises_anything_else(text: str) -> None:
    for attempt in (text, TOKEN_PREFIX + text):
        with pytest.raises(EnrolmentError):
            parse_token(attempt)


def test_a_token_of_another_version_is_told_apart() -> None:
    with pytest.raises(EnrolmentError, match="another version"):
        parse_token("paceline-2-abc")


def test_each_agent_takes_one_use_however_often_it_proves(tmp_path: Path) -> None:
    token = parse_token(create_token(tmp_path, CONTROLLER, 2, 60))
    store = TokenStore(tmp_path)
    use(store, token, AGENTS[0])
    use(store, token, AGENTS[0], new_nonce())
    use(store, token, AGENTS[1])
    with pytest.raises(EnrolmentError, match="used up"):
        use(store, token, AGENTS[2])
    use(store, token, AGENTS[0])


def test_uses_are_not_exceeded_by_agents_at_once(tmp_path: Path) -> None:
    token = parse_token(create_token(tmp_path, CONTROLLER, 2, 60))

    def attempt(agent: Identity) -> bool:
        try:
            use(TokenStore(tmp_path), token, agent)
        except EnrolmentError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(attempt, AGENTS)) == 2


def test_expiry_is_by_the_controllers_clock_and_does_not_shut_out_who_joined(tmp_path: Path) -> None:
    now_s = 1_000_000.0
    store = TokenStore(tmp_path, wall_clock=lambda: now_s)
    token = parse_token(store.create(CONTROLLER, 5, 100))
    use(store, token, AGENTS[0])
    now_s += 101
    use(store, token, AGENTS[0])
    with pytest.raises(EnrolmentError, match="expired"):
        use(store, token, AGENTS[1])


def test_a_proof_is_good_for_its_keys_and_nonce_alone(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    token = parse_token(store.create(CONTROLLER, 5, 60))
    stolen = proof(token.secret, AGENTS[0].public_key, CONTROLLER.public_key, NONCE)
    for agent, controller, nonce in (
        (AGENTS[1], CONTROLLER, NONCE),
        (AGENTS[0], AGENTS[2], NONCE),
        (AGENTS[0], CONTROLLER, new_nonce()),
    ):
        with pytest.raises(EnrolmentError, match="does not prove"):
            store.accept(token.token_id, stolen, agent.public_key, controller.public_key, nonce)
    with pytest.raises(EnrolmentError, match="not known"):
        store.accept("00" * 8, stolen, AGENTS[0].public_key, CONTROLLER.public_key, NONCE)


@pytest.mark.parametrize(("uses", "expires_s"), [(0, 60), (-1, 60), (1, 0), (1, -5), (1, 2**40), (1, float("nan"))])
def test_tokens_that_nobody_could_use_are_not_made(tmp_path: Path, uses: int, expires_s: float) -> None:
    with pytest.raises(EnrolmentError):
        create_token(tmp_path, CONTROLLER, uses, expires_s)


@pytest.mark.parametrize("content", [b"", b"{", b'{"x": 1}', b"\xff\xfe", b"[]"])
def test_damaged_files_trust_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TOKENS_FILE).write_bytes(content)
    (tmp_path / TRUST_FILE).write_bytes(content)
    with pytest.raises(DataFolderError, match="damaged"):
        use(TokenStore(tmp_path), Token(CONTROLLER.public_key, "00" * 8, bytes(16), 0), AGENTS[0])
    with pytest.raises(DataFolderError, match="damaged"):
        TrustStore(tmp_path).controllers()
    with pytest.raises(DataFolderError, match="damaged"):
        TrustStore(tmp_path).trust_node(AGENTS[0].public_key, "PC-1")
    assert (tmp_path / TRUST_FILE).read_bytes() == content


def test_trust_is_kept_and_forgotten(tmp_path: Path) -> None:
    store = TrustStore(tmp_path)
    token = parse_token(create_token(tmp_path, CONTROLLER, 1, 60))
    agent = AGENTS[0]
    store.trust_controller(CONTROLLER.public_key, token=token)
    store.trust_controller(CONTROLLER.public_key, "desk")
    store.trust_node(agent.public_key, "PC-1")
    known = TrustStore(tmp_path).controllers()[CONTROLLER.public_key]
    assert known.name == "desk"
    assert known.prove(agent.public_key, NONCE) == proof(token.secret, agent.public_key, CONTROLLER.public_key, NONCE)
    assert store.nodes()[agent.public_key].name == "PC-1"
    store.forget_controller(CONTROLLER.public_key)
    store.forget_node(agent.public_key)
    assert not store.controllers()
    assert not store.nodes()
    store.trust_controller(CONTROLLER.public_key)
    assert store.controllers()[CONTROLLER.public_key].prove(agent.public_key, NONCE) == ""


@settings(max_examples=30)
@given(st.binary(min_size=16, max_size=16))
def test_the_secret_stays_out_of_logs(secret: bytes) -> None:
    assert repr(secret) not in repr(Token(CONTROLLER.public_key, "00" * 8, secret, 0))
